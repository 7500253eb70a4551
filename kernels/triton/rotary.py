"""Rotary position embedding on the GPU: one program rotates every head of one token."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x,
    stride_head,
    cos,
    sin,
    pair,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate HEADS rows in place; a thread owns both elements of a pair, so no race."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    mask = (head < HEADS) & (pair < HALF)
    first = x + head * stride_head + pair
    second = first + HALF
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, a * cos - b * sin, mask=mask)
    tl.store(second, b * cos + a * sin, mask=mask)


@triton.jit
def _rotary_kernel(
    q,
    k,
    cos,
    sin,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
    _rotate(q + token * q_stride_token, q_stride_head, c, s, pair, Q_HEADS, BLOCK_Q_HEADS, HALF)
    _rotate(k + token * k_stride_token, k_stride_head, c, s, pair, K_HEADS, BLOCK_K_HEADS, HALF)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `kernels.rotary.rotary_reference`.

    Raises ValueError where the last dimension is not contiguous, or cos or sin are not.
    """
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        raise ValueError(f"rotary needs contiguous heads, got strides {q.stride()}, {k.stride()}")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("rotary needs contiguous cos and sin")
    num_tokens, q_heads, head_dim = q.shape
    _rotary_kernel[(num_tokens,)](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        Q_HEADS=q_heads,
        K_HEADS=k.shape[1],
        BLOCK_Q_HEADS=triton.next_power_of_2(q_heads),
        BLOCK_K_HEADS=triton.next_power_of_2(k.shape[1]),
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )
