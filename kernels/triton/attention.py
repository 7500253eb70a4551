"""Paged attention on the GPU: one kernel for prefill, chunks, decode and any mix of them.

A program takes a tile: all query heads of one KV head times a few query tokens of one
sequence, so that a key is read once for its whole group and the matrix units see enough
rows (Ringlein et al. 2025, arXiv 2511.11581; vLLM's unified Triton kernel). It walks the
keys with an online softmax (FlashAttention-2, Dao 2023, arXiv 2307.08691). Where a batch
has too few tiles to fill the GPU, several programs share the keys of one tile and a second
kernel merges their parts by their log-sum-exp (Flash-Decoding, Dao et al. 2023).

Launch grids follow from tensor shapes and the batch's upper bounds alone, so a captured
CUDA graph serves every shorter batch; programs with nothing to do leave at once.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionBatch

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64

# Triton's interpreter keeps bfloat16 as raw bits, on which its arithmetic is silently wrong.
UPCAST = triton.knobs.runtime.interpret


class Plan(NamedTuple):
    """How the work of one call is cut."""

    block_m: int  # rows of a tile: query tokens × query heads of one KV head
    block_n: int  # keys read at a time
    splits: int  # programs that share the keys of one tile, a power of two
    num_warps: int


@triton.jit
def _find_sequence(query_start, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence of a tile, where sequence i begins at tile `query_start[i] // BLOCK_Q + i`.

    These beginnings leave each sequence room for all its tiles, whatever the lengths.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_rows(cache, offset, used, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """Rows of the cache at `offset` as [BLOCK_N, BLOCK]; zero where not `used` or past SIZE."""
    column = tl.arange(0, BLOCK)
    source = cache + offset[:, None] + column[None, :]
    if MASK or SIZE != BLOCK:
        return tl.load(source, mask=used[:, None] & (column < SIZE)[None, :], other=0.0)
    return tl.load(source)


@triton.jit
def _attend(
    acc,
    top,
    total,
    query,
    k_cache,
    v_cache,
    table,
    kv_head,
    first_key,
    end,
    position,
    scale,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One step of the online softmax over keys first_key .. first_key + BLOCK_N.

    Without MASK every row sees every key. acc [BLOCK_M, BLOCK], top and total [BLOCK_M] are
    the running weighted values, maximum score and sum, with scores in units of log 2.
    """
    key = first_key + tl.arange(0, BLOCK_N)
    used = key < end
    if MASK:
        page = tl.load(table + key // PAGE, mask=used, other=0)
    else:
        page = tl.load(table + key // PAGE)
    offset = ((page.to(tl.int64) * PAGE + key % PAGE) * KV_HEADS + kv_head) * SIZE
    k = _load_rows(k_cache, offset, used, SIZE, BLOCK, MASK)
    v = _load_rows(v_cache, offset, used, SIZE, BLOCK, MASK)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)

    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if MASK:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen no key yet must not compute -inf - -inf.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "table_size"])
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    block_tables,
    query_start,
    seq_lens,
    stride_token,
    stride_head,
    table_size,
    num_tokens,
    num_seqs,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend one tile to one split of its keys.

    out is [SPLITS, T, Hq, D]; with several splits it holds float32 parts, and lse
    [SPLITS, T, Hq] says what each weighs: -inf where it saw no key and was not written.
    ONE_TILE says that no sequence has more queries than one tile takes.
    """
    kv_head = tl.program_id(0)  # innermost: programs that run together read whole cache rows
    tile = tl.program_id(1)
    split = tl.program_id(2)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP

    if ONE_TILE:
        sequence = tile
        start = tl.load(query_start + sequence)
        first = 0
    else:
        sequence = _find_sequence(query_start, tile, num_seqs, BLOCK_Q)
        start = tl.load(query_start + sequence)
        first = (tile - start // BLOCK_Q - sequence) * BLOCK_Q
    query_len = tl.load(query_start + sequence + 1) - start
    if first >= query_len:
        return
    context_len = tl.load(seq_lens + sequence) - query_len  # negative for padding

    row = tl.arange(0, BLOCK_M)
    index = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, BLOCK)
    token = (start + index).to(tl.int64)
    row_mask = (row < BLOCK_Q * GROUP) & (index < query_len)
    mask = row_mask[:, None] & (column < SIZE)[None, :]
    source = q + token[:, None] * stride_token + head[:, None] * stride_head + column[None, :]
    query = tl.load(source, mask=mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    keys = tl.maximum(context_len + tl.minimum(first + BLOCK_Q, query_len), 0)
    share = tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, keys)
    # Every row sees the keys up to the first row's own; only the rest needs masks.
    shared_end = tl.minimum((context_len + first + 1) // BLOCK_N * BLOCK_N, end)

    position = context_len + index
    table = block_tables + sequence.to(tl.int64) * table_size
    acc = tl.zeros((BLOCK_M, BLOCK), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for first_key in range(begin, shared_end, BLOCK_N):
        acc, top, total = _attend(
            acc, top, total, query, k_cache, v_cache, table, kv_head, first_key, end, position,
            scale, KV_HEADS, SIZE, BLOCK, PAGE, BLOCK_N, False, UPCAST,
        )  # fmt: skip
    for first_key in range(tl.maximum(begin, shared_end), end, BLOCK_N):
        acc, top, total = _attend(
            acc, top, total, query, k_cache, v_cache, table, kv_head, first_key, end, position,
            scale, KV_HEADS, SIZE, BLOCK, PAGE, BLOCK_N, True, UPCAST,
        )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    row_out = (split * num_tokens + token) * KV_HEADS * GROUP + head
    if SPLITS > 1:
        tl.store(lse + row_out, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=row_mask)
        mask = mask & (~empty)[:, None]
    tl.store(out + row_out[:, None] * SIZE + column[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    parts, lse, out, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):
    """Weigh the parts [SPLITS, num_rows, D] of one row by `2 ** lse` and sum them."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    part = tl.arange(0, SPLITS) * num_rows + row
    weights = tl.load(lse + part)
    top = tl.max(weights, axis=0)
    weight = tl.exp2(weights - tl.where(top == float("-inf"), 0.0, top))
    mask = (weights != float("-inf"))[:, None] & (column < SIZE)[None, :]
    values = tl.load(parts + part[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, axis=0)
    merged = tl.sum(values * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * SIZE + column, merged, mask=column < SIZE)


def plan_for(q: Tensor, k_cache: Tensor, batch: AttentionBatch, num_sms: int) -> Plan:
    """Choose a plan from what is the same for every replay of a CUDA graph.

    Decode tiles are as small as the matrix units allow. Long prefills take tall tiles, which
    read the keys less often; in a mix the decodes dominate, and a tall tile would waste
    arithmetic on their few rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    num_seqs = batch.seq_lens.shape[0]
    group = num_heads // kv_heads

    fits_tensor_cores = q.element_size() == 2 and head_dim <= 128
    tallest = (128 if num_tokens >= 128 * num_seqs else 64) if fits_tensor_cores else 16
    rows = min(tallest, triton.next_power_of_2(group * batch.max_query_len))
    block_m = max(16, rows, triton.next_power_of_2(group))
    block_n = 64 if fits_tensor_cores else 32

    tiles = _num_tiles(num_tokens, num_seqs, batch.max_query_len, block_m // group)
    idle = 4 * num_sms // (kv_heads * tiles)
    # A part is written and read in float32: it must stand for enough keys to be worth that.
    keys = min(batch.max_seq_len, batch.block_tables.shape[1] * page)
    splits = max(1, min(idle, keys // max(2 * block_n, 4 * block_m), MAX_SPLITS))
    return Plan(block_m, block_n, 1 << splits.bit_length() - 1, num_warps=8 if block_m > 64 else 4)


def _num_tiles(num_tokens: int, num_seqs: int, max_query_len: int, block_q: int) -> int:
    """How many tiles of block_q tokens suffice for any lengths within the bounds."""
    return num_seqs if max_query_len <= block_q else num_tokens // block_q + num_seqs


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """See `kernels.attention.paged_attention_reference`; q may be a view with strided rows.

    Raises ValueError where q's last dimension, a cache or a tensor of the batch is not
    contiguous, or where the KV heads do not divide the query heads.
    """
    whole = (k_cache, v_cache, batch.block_tables, batch.query_start, batch.seq_lens)
    if q.stride(-1) != 1 or not all(tensor.is_contiguous() for tensor in whole):
        raise ValueError("paged_attention needs contiguous caches, batch tensors and heads of q")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads do not share {k_cache.shape[2]} KV heads")
    return launch(
        q, k_cache, v_cache, batch, scale, plan_for(q, k_cache, batch, _num_sms(q.device))
    )


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, plan: Plan
) -> Tensor:
    """`paged_attention` by a given plan: every plan gives the same result, up to rounding."""
    num_tokens, num_heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    num_seqs = batch.seq_lens.shape[0]
    group = num_heads // kv_heads
    block = max(16, triton.next_power_of_2(head_dim))
    block_q = plan.block_m // group
    tiles = _num_tiles(num_tokens, num_seqs, batch.max_query_len, block_q)

    out = q.new_empty(q.shape)
    split = plan.splits > 1
    parts = q.new_empty((plan.splits, *q.shape), dtype=torch.float32) if split else out
    lse = parts.new_empty(parts.shape[:3]) if split else None
    _attention_kernel[kv_heads, tiles, plan.splits](
        q,
        k_cache,
        v_cache,
        parts,
        lse,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        q.stride(0),
        q.stride(1),
        batch.block_tables.shape[1],
        num_tokens,
        num_seqs,
        scale * LOG2_E,
        GROUP=group,
        KV_HEADS=kv_heads,
        SIZE=head_dim,
        BLOCK=block,
        PAGE=page,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        SPLITS=plan.splits,
        ONE_TILE=batch.max_query_len <= block_q,
        UPCAST=UPCAST,
        num_warps=plan.num_warps,
        num_stages=3,  # page numbers, then keys and values, then arithmetic
    )
    if split:
        num_rows = num_tokens * num_heads
        _merge_kernel[(num_rows,)](
            parts, lse, out, num_rows, SIZE=head_dim, BLOCK=block, SPLITS=plan.splits, num_warps=4
        )
    return out
