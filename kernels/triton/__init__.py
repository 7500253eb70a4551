"""The Triton versions of every operation; each file has the name of its reference's.

Kernels load, compute in float32, and round once on the store. Offsets of rows are 64 bits
wide: a cache or the activations of a long prefill may exceed 2³¹ elements.
"""

from kernels import Ops
from kernels.triton.activation import swiglu
from kernels.triton.attention import paged_attention
from kernels.triton.cache import write_kv
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotary

__all__ = ["TRITON"]

TRITON = Ops(rms_norm, add_rms_norm, rotary, swiglu, write_kv, paged_attention)
