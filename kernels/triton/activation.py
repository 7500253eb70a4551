"""SwiGLU on the GPU."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu_kernel(gate_up, out, stride_token, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    source = gate_up + token * stride_token + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, gate * tl.sigmoid(gate) * up, mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `kernels.activation.swiglu_reference`; rows may be strided.

    Raises ValueError where the last dimension is not contiguous.
    """
    if gate_up.stride(-1) != 1:
        raise ValueError(f"swiglu needs contiguous rows, got strides {gate_up.stride()}")
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = (num_tokens, triton.cdiv(size, BLOCK))
    _swiglu_kernel[grid](gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=BLOCK)
    return out
