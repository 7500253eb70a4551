"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split as in GPT-NeoX."""

import torch
from torch import Tensor


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hk, D] in place; cos and sin are [T, D/2] float32.

    Element i pairs with i + D/2, as in Hugging Face's Llama. q and k may be views into one
    fused projection.
    """
    cos = torch.cat((cos, cos), dim=-1)[:, None]
    sin = torch.cat((-sin, sin), dim=-1)[:, None]
    half = q.shape[-1] // 2
    for x in (q, k):
        x.copy_(torch.addcmul(x * cos, x.roll(half, dims=-1), sin))
