"""Paged attention for CPUs: few large PyTorch calls instead of one per sequence.

Decodes of similar length are gathered and attended together, the query heads of one KV
head side by side as if they were query positions (all see the same keys, so nothing is
repeated for grouped-query attention). Longer queries are attended one sequence at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """G sequences with one query each, padded to the same number of blocks."""

    rows: Tensor | None  # [G] int64, their rows in q; None: the rows of q as they are
    blocks: Tensor  # [G * num_blocks] int64, their block tables one after the other
    mask: Tensor  # [G, 1, 1, num_blocks * block_size] added to scores: 0 or -inf


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence with several queries."""

    rows: slice
    blocks: Tensor  # [num_blocks] int64
    seq_len: int
    mask: Tensor | None  # [queries, seq_len] bool; None: no earlier context, plainly causal


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same for every layer of a step."""

    decodes: list[DecodeGroup]
    prefills: list[Prefill]


def paged_attention_cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """The same as `kernels.attention.paged_attention_reference`, in the dtype of the cache."""
    plan = _plan(batch, k_cache.shape[1], len(q), q.dtype)
    if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
        return _decode(q, k_cache, v_cache, plan.decodes[0], scale)
    out = torch.zeros(q.shape, dtype=q.dtype)
    for group in plan.decodes:
        out[group.rows] = _decode(q[group.rows], k_cache, v_cache, group, scale)
    for prefill in plan.prefills:
        out[prefill.rows] = _prefill(q[prefill.rows], k_cache, v_cache, prefill, scale)
    return out


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: DecodeGroup, scale: float
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    keys, values = (
        cache.index_select(0, group.blocks).view(num_seqs, -1, kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    grouped = q.reshape(num_seqs, kv_heads, num_heads // kv_heads, head_dim)
    mask = group.mask.expand(-1, -1, grouped.shape[2], -1)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(num_seqs, num_heads, head_dim)


def _prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, prefill: Prefill, scale: float) -> Tensor:
    keys, values = (
        cache.index_select(0, prefill.blocks).flatten(0, 1)[: prefill.seq_len].transpose(0, 1)[None]
        for cache in (k_cache, v_cache)
    )
    attended = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


@lru_cache(maxsize=1)  # every layer of a step asks with the same batch
def _plan(batch: AttentionBatch, block_size: int, num_rows: int, dtype: torch.dtype) -> Plan:
    starts = batch.query_start.tolist()
    alike: dict[int, list[int]] = defaultdict(list)  # bucket of length -> decoding sequences
    prefills = []
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        num_blocks = -(-seq_len // block_size)
        if starts[i + 1] - starts[i] == 1 and seq_len:
            alike[_bucket(num_blocks)].append(i)
        elif seq_len:
            prefills.append(_plan_prefill(batch, i, slice(starts[i], starts[i + 1]), num_blocks))
    groups = [
        _plan_decodes(batch, members, block_size, num_rows, dtype) for members in alike.values()
    ]
    return Plan(groups, prefills)


def _bucket(num_blocks: int) -> int:
    """Lengths within a quarter of each other share a bucket, so that padding stays small."""
    step = 1 << max(0, num_blocks.bit_length() - 3)
    return -(-num_blocks // step) * step


def _plan_decodes(
    batch: AttentionBatch, members: list[int], block_size: int, num_rows: int, dtype: torch.dtype
) -> DecodeGroup:
    index = torch.tensor(members)
    seq_lens = batch.seq_lens[index]
    num_blocks = -(-int(seq_lens.max()) // block_size)
    foreign = torch.arange(num_blocks * block_size) >= seq_lens[:, None]
    everything = len(members) == len(batch.seq_lens) == num_rows
    return DecodeGroup(
        rows=None if everything else batch.query_start[index].long(),
        blocks=batch.block_tables[index, :num_blocks].flatten().long(),
        mask=torch.zeros(foreign.shape, dtype=dtype).masked_fill_(foreign, -torch.inf)[
            :, None, None
        ],
    )


def _plan_prefill(batch: AttentionBatch, i: int, rows: slice, num_blocks: int) -> Prefill:
    seq_len = int(batch.seq_lens[i])
    queries = rows.stop - rows.start
    mask = None
    if queries < seq_len:
        key = torch.arange(seq_len)
        mask = key <= key[seq_len - queries :, None]
    return Prefill(rows, batch.block_tables[i, :num_blocks].long(), seq_len, mask)
