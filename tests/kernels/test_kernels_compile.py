"""What the interpreter cannot show: that kernels compile, and fit the memory of a GPU."""

import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kernels.triton

# Shared memory of one block in bytes: of the smallest GPU of a generation, less its reserve.
LIMITS = {80: 99 * 1024, 90: 227 * 1024}


def every_kernel() -> set[str]:
    modules = pkgutil.iter_modules(kernels.triton.__path__, "kernels.triton.")
    return {
        name
        for module in modules
        for name in vars(import_module(module.name))
        if name[-7:] == "_kernel"
    }


@pytest.mark.parametrize("capability", LIMITS)
def test_every_kernel_compiles_and_fits(capability: int) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(kernels.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == every_kernel()
    assert {report["dtype"] for report in reports} == {"torch.bfloat16", "torch.float32"}
    for report in reports:
        assert report["is_elf"], report
        assert report["capability"] == capability
        assert report["shared"] <= LIMITS[capability], report
        if report["kernel"] == "_attention_kernel" and report["dtype"] == "torch.bfloat16":
            assert report["uses_tensor_cores"], report
            assert report["copies_16_bytes"], report
