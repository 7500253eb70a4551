"""Compile every kernel as a GPU would get it, on a machine that has none.

    python tests/kernels/compile_kernels.py 90

takes a compute capability and calls the public functions, behind a driver that claims such
a GPU, with launches that compile and do not run. Prints one JSON object a kernel.
"""

import json
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from kernels import AttentionBatch
from kernels.triton import TRITON
from kernels.triton.attention import launch, plan_for


class Driver:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    """Stands in for `kernel[grid]`."""

    def report(*args: object, **options: object) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **options)
        report = {
            "kernel": compiled.name,
            "dtype": str(args[0].dtype) if isinstance(args[0], Tensor) else None,
            "capability": compiled.metadata.target.arch,
            "shared": compiled.metadata.shared,
            "is_elf": compiled.asm["cubin"].startswith(b"\x7fELF"),
            "uses_tensor_cores": "mma" in compiled.asm["ptx"],
            "copies_16_bytes": "cp.async.cg.shared.global" in compiled.asm["ptx"],
            "grid": grid,
        }
        print(json.dumps(report), flush=True)

    return report


def attend(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Attention for queries of these lengths over up to 8,192 keys, on 132 processors."""
    num_seqs, num_tokens = len(lengths), sum(lengths)
    batch = AttentionBatch(
        block_tables=torch.empty(num_seqs, 512, dtype=torch.int32),
        query_start=torch.empty(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.empty(num_seqs, dtype=torch.int32),
        max_query_len=max(lengths),
        max_seq_len=8192,
    )
    q = torch.empty(num_tokens, heads, head_dim, dtype=dtype)
    cache = torch.empty(32, 16, kv_heads, head_dim, dtype=dtype)
    launch(q, cache, cache, batch, 1.0, plan_for(q, cache, batch, num_sms=132))


def compile_elementwise(dtype: torch.dtype) -> None:
    """For a hidden size of 4,096 and 32 query heads over 8 KV heads of 128."""
    x, weight = torch.empty(16, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    TRITON.rms_norm(x, weight, 1e-5)
    TRITON.add_rms_norm(x, x, weight, 1e-5)
    TRITON.swiglu(torch.empty(16, 28672, dtype=dtype))
    qkv = torch.empty(16, 48, 128, dtype=dtype)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    TRITON.rms_norm(q, weight[:128], 1e-5)
    TRITON.rotary(q, k, torch.empty(16, 64), torch.empty(16, 64))
    cache = torch.empty(4, 16, 8, 128, dtype=dtype)
    TRITON.write_kv(k, v, cache, cache, torch.empty(16, dtype=torch.int64))


def main() -> None:
    triton.runtime.driver.set_active(Driver(int(sys.argv[1])))
    triton.JITFunction.__getitem__ = compile_only
    for dtype in (torch.bfloat16, torch.float32):
        compile_elementwise(dtype)
    attend([1] * 256, heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    attend([1] * 4, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    attend([1] * 64 + [1984], heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    attend([2048], heads=32, kv_heads=32, head_dim=80, dtype=torch.bfloat16)
    attend([1] * 4, heads=14, kv_heads=2, head_dim=64, dtype=torch.float32)


if __name__ == "__main__":
    main()
