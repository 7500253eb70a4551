"""RMSNorm on the GPU: whole rows in registers, so that memory is read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normalize(x, weight, eps, SIZE: tl.constexpr):
    """Rows of x [ROWS, BLOCK] float32, zero past SIZE, normalized and scaled."""
    variance = tl.sum(x * x, axis=1, keep_dims=True) / SIZE
    return x * tl.rsqrt(variance + eps) * weight


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    stride_token,
    stride_head,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < SIZE)
    source = x + (row // HEADS).to(tl.int64) * stride_token + row % HEADS * stride_head + column
    row = row.to(tl.int64)
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, _normalize(values, scale, eps, SIZE), mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    stride_x,
    stride_residual,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < SIZE)
    row = row.to(tl.int64)
    values = tl.load(x + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    source = residual + row * stride_residual + column
    values += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    # The norm must see the sum as the next layer will: rounded.
    values = values.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + column, values, mask=mask)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = _normalize(values.to(tl.float32), scale, eps, SIZE)
    tl.store(out + row * SIZE + column, normed, mask=mask)


def _launch_shape(num_rows: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and block sizes: a program takes several rows when they are as short as a head."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    warps = min(16, max(1, rows * block // 512))
    return (triton.cdiv(num_rows, rows),), {"BLOCK": block, "ROWS": rows, "num_warps": warps}


def _check_contiguous(*tensors: Tensor) -> None:
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("RMSNorm needs a contiguous last dimension of each tensor")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm.rms_norm_reference`; x is [T, H] or [T, heads, D] with strided rows.

    Raises ValueError where the last dimension of x or weight is not contiguous.
    """
    _check_contiguous(x, weight)
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, size = x.shape[0] * heads, x.shape[-1]
    grid, blocks = _launch_shape(num_rows, size)
    _rms_norm_kernel[grid](
        x, weight, out, x.stride(0), x.stride(-2), num_rows, eps, HEADS=heads, SIZE=size, **blocks
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.norm.add_rms_norm_reference`; rows of x and residual may be strided.

    Raises ValueError where the last dimension of x, residual or weight is not contiguous.
    """
    _check_contiguous(x, residual, weight)
    num_rows, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    grid, blocks = _launch_shape(num_rows, size)
    _add_rms_norm_kernel[grid](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        num_rows,
        eps,
        SIZE=size,
        **blocks,
    )
    return out, total
