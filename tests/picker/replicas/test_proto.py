"""The generated module is what the compiler makes of proto/replica.proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["replica_pb2.py", "replica_pb2.pyi"])
def test_the_generated_module_is_up_to_date(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ipicker/replicas=proto"]
    outs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, *outs, "picker/replicas/replica.proto"], cwd=ROOT, check=True)
    made = (tmp_path / "picker/replicas" / name).read_text()
    assert made == (ROOT / "picker/replicas" / name).read_text(), "make proto"
