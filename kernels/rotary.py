"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split as in GPT-NeoX."""

import torch
from torch import Tensor


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hk, D] in place; cos and sin are [T, D/2] float32.

    Element i pairs with i + D/2, as in Hugging Face's Llama. q and k may be views into one
    fused projection.
    """
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
