"""Attention over a paged KV cache: what a batch is, and the plain PyTorch computation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Where the S sequences of one step keep their keys, and which query rows are theirs.

    Prefills, chunks of prefills and decodes mix freely. The queries of a sequence are its
    last positions, and their keys are already in the cache. A sequence of length 0 is
    padding: its rows become zero. Rows past `query_start[S]` are left undefined.
    """

    block_tables: Tensor  # [S, max_blocks] int32; entries past a sequence's end are not read
    query_start: Tensor  # [S + 1] int32, where each sequence's rows start in q
    seq_lens: Tensor  # [S] int32, the whole context, this step's tokens included
    max_query_len: int  # upper bounds, so that a captured CUDA graph can replay
    max_seq_len: int  # shorter batches


def paged_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """Causal attention of q [T, Hq, D] over caches [num_blocks, block_size, Hk, D].

    Query head h reads KV head `h // (Hq / Hk)` (grouped-query attention, arXiv 2305.13245).
    Returns [T, Hq, D] of q's dtype; scores and softmax are float32.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k_cache.shape[2]
    starts = batch.query_start.tolist()
    out = q.new_zeros(q.shape)
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        if seq_len == 0:
            continue
        rows = slice(starts[i], starts[i + 1])
        keys, values = (
            _gather(cache, batch.block_tables[i], seq_len).to(wide).repeat_interleave(group, dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].to(wide), keys) * scale
        position = torch.arange(seq_len, device=q.device)
        hidden = position > position[seq_len - (rows.stop - rows.start) :, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _gather(cache: Tensor, table: Tensor, seq_len: int) -> Tensor:
    """One sequence's rows of a paged cache, in order: [seq_len, Hk, D]."""
    num_blocks = -(-seq_len // cache.shape[1])
    return cache[table[:num_blocks].long()].flatten(0, 1)[:seq_len]
