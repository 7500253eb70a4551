"""Writing keys and values into the paged KV cache on the GPU: one program a token."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (column < SIZE)
    target = (slot * HEADS + head) * SIZE + column
    key = tl.load(k + token * k_stride_token + head * k_stride_head + column, mask=mask)
    tl.store(k_cache + target, key, mask=mask)
    value = tl.load(v + token * v_stride_token + head * v_stride_head + column, mask=mask)
    tl.store(v_cache + target, value, mask=mask)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `kernels.cache.write_kv_reference`.

    Raises ValueError where the last dimension of k or v is not contiguous, or another tensor
    is not contiguous as a whole.
    """
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"write_kv needs contiguous heads, got strides {k.stride()}, {v.stride()}")
    if not all(tensor.is_contiguous() for tensor in (k_cache, v_cache, slots)):
        raise ValueError("write_kv needs contiguous caches and slots")
    num_tokens, heads, size = k.shape
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
    )
