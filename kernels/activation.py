"""SwiGLU, the gated activation of Llama's feed-forward layer (Shazeer 2020, arXiv 2002.05202)."""

import torch
from torch import Tensor
from torch.nn import functional


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """[T, 2F], gate then up, to `silu(gate) * up` [T, F]; computed in float32, rounded once."""
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up).to(gate_up.dtype)
