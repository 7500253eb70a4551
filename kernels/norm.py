"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), alone and after a residual sum."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, of any shape and strides.

    Computed in float32 and rounded once, where Hugging Face rounds before `weight` too.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total), total)` with `total = residual + x`, all [T, H] of one dtype."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total
