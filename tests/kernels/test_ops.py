import subprocess
import sys

import torch

import kernels
from kernels.triton import TRITON

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch, kernels
print(kernels.ops_for(torch.device("cpu")).swiglu(torch.ones(1, 2)).item())
"""


def test_devices_get_their_ops() -> None:
    assert kernels.ops_for(torch.device("cpu")) is kernels.TORCH
    assert kernels.ops_for(torch.device("cuda", 0)) is TRITON


def test_references_do_not_need_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - 0.7311) < 1e-4
