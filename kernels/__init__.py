"""The operations that a Llama-family model needs, for CPUs (PyTorch) and GPUs (Triton).

`kernels/NAME.py` says in PyTorch what an operation computes; `kernels/triton/NAME.py` is its
GPU kernel. Only the latter imports Triton, which some platforms lack.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.activation import swiglu_reference
from kernels.attention import AttentionBatch
from kernels.attention_cpu import paged_attention_cpu
from kernels.cache import write_kv_reference
from kernels.norm import add_rms_norm_reference, rms_norm_reference
from kernels.rotary import rotary_reference

__all__ = ["TORCH", "AttentionBatch", "Ops", "ops_for"]


class Ops(NamedTuple):
    """One implementation of every operation; shapes are in the references' docstrings."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    swiglu: Callable[[Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor]


TORCH = Ops(
    rms_norm_reference,
    add_rms_norm_reference,
    rotary_reference,
    swiglu_reference,
    write_kv_reference,
    paged_attention_cpu,
)


def ops_for(device: torch.device) -> Ops:
    """Triton's on a CUDA device, PyTorch's anywhere else."""
    if device.type != "cuda":
        return TORCH
    from kernels.triton import TRITON

    return TRITON
