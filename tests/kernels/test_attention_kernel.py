from __future__ import annotations

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from exactness import assert_as_exact
from hypothesis import Phase, given, settings
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import AttentionBatch, paged_attention_reference
from kernels.triton.attention import MAX_SPLITS, Plan, launch, paged_attention, plan_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.3
UNSPLIT = Plan(block_m=16, block_n=16, splits=1, num_warps=4)
SPLIT = UNSPLIT._replace(splits=4)


@dataclass(frozen=True)
class Case:
    """Random queries over a cache whose unused places are NaN, so that using one shows."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch

    def attend(self, plan: Plan) -> Tensor:
        return launch(self.q, self.k_cache, self.v_cache, self.batch, SCALE, plan)

    def reference(self, dtype: torch.dtype | None = None) -> Tensor:
        tensors = (self.q, self.k_cache, self.v_cache)
        q, k_cache, v_cache = (x.to(dtype or x.dtype) for x in tensors)
        return paged_attention_reference(q, k_cache, v_cache, self.batch, SCALE)


def make_case(
    lengths: list[tuple[int, int]],  # (query length, whole length) of each sequence
    *,
    group: int = 3,
    kv_heads: int = 1,
    head_dim: int = 6,
    page: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tables = [-(-seq_len // page) for _, seq_len in lengths]
    order = torch.randperm(sum(tables) + 2, generator=generator)
    unused, used = order[0], iter(order[1:])
    caches = torch.full((2, len(order), page, kv_heads, head_dim), torch.nan)
    block_tables = unused.repeat(len(lengths), max(tables) + 1).int()
    for i, (_, seq_len) in enumerate(lengths):
        for j in range(tables[i]):
            block_tables[i, j] = block = next(used)
            filled = min(page, seq_len - j * page)
            caches[:, block, :filled] = torch.randn(
                (2, filled, kv_heads, head_dim), generator=generator
            )
    query_lens = torch.tensor([query_len for query_len, _ in lengths])
    heads = group * kv_heads
    spaced = torch.randn(int(query_lens.sum()), heads + 1, head_dim + 3, generator=generator)
    k_cache, v_cache = caches.to(DEVICE, dtype)
    return Case(
        q=spaced.to(DEVICE, dtype)[:, 1:, :head_dim],
        k_cache=k_cache,
        v_cache=v_cache,
        batch=AttentionBatch(
            block_tables=block_tables.to(DEVICE),
            query_start=torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int().to(DEVICE),
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths]).int().to(DEVICE),
            max_query_len=int(query_lens.max()),
            max_seq_len=max(seq_len for _, seq_len in lengths),
        ),
    )


def sequences(max_size: int = 3) -> st.SearchStrategy[list[tuple[int, int]]]:
    length = st.tuples(st.integers(1, 9), st.integers(0, 36))
    both = length.map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))
    decode = st.integers(1, 48).map(lambda seq_len: (1, seq_len))
    return st.lists(decode | both, min_size=1, max_size=max_size)


# Examples are small already, and shrinking them takes the interpreter minutes.
quick = settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


def test_reference_is_sdpa() -> None:
    """With pages in order, one sequence is what PyTorch's attention takes directly."""
    case = make_case([(5, 13)], group=2, kv_heads=2, page=13)
    table = case.batch.block_tables[0, 0]
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.k_cache[table], case.v_cache[table]))
    mask = causal_lower_right(5, 13)
    expected = scaled_dot_product_attention(
        q[None], k[None], v[None], mask, scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(case.reference(), expected[0].transpose(0, 1))


@settings(quick, max_examples=12)
@given(
    lengths=sequences(),
    shape=st.sampled_from([(1, 2, 5), (3, 1, 16), (7, 1, 6), (2, 2, 20)]),
    page=st.sampled_from([1, 3, 4, 16]),
    splits=st.sampled_from([1, 2, 4]),
    block_m=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
)
def test_any_mix_is_as_exact_as_the_reference(
    lengths: list[tuple[int, int]],
    shape: tuple[int, int, int],
    page: int,
    splits: int,
    block_m: int,
    seed: int,
) -> None:
    group, kv_heads, head_dim = shape
    case = make_case(
        lengths, group=group, kv_heads=kv_heads, head_dim=head_dim, page=page, seed=seed
    )
    plan = Plan(block_m, 16, splits, num_warps=4)
    assert_as_exact(case.attend(plan), case.reference(), case.reference(torch.float64))


def test_a_group_larger_than_the_smallest_tile() -> None:
    case = make_case([(1, 18), (2, 3)], group=20)
    got = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    assert_as_exact(got, case.reference(), case.reference(torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", [UNSPLIT, SPLIT])
def test_half_precision(plan: Plan, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (6, 20)], head_dim=16, dtype=dtype)
    assert_as_exact(case.attend(plan), case.reference(), case.reference(torch.float64))


def test_the_public_call_chooses_a_plan() -> None:
    case = make_case([(1, 70), (3, 5), (1, 1)], group=7)
    got = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, SCALE)
    assert_as_exact(got, case.reference(), case.reference(torch.float64))


@quick
@given(lengths=sequences(max_size=2), group=st.sampled_from([1, 3, 7]), seed=st.integers(0, 99))
def test_splitting_changes_nothing(lengths: list[tuple[int, int]], group: int, seed: int) -> None:
    case = make_case(lengths, group=group, seed=seed)
    torch.testing.assert_close(case.attend(SPLIT), case.attend(UNSPLIT))


def test_more_splits_than_keys() -> None:
    """Most parts are empty; a merge that weighed them would give NaN."""
    case = make_case([(1, 1), (2, 3)])
    got = case.attend(UNSPLIT._replace(splits=16))
    assert_as_exact(got, case.reference(), case.reference(torch.float64))


@pytest.mark.parametrize("plan", [UNSPLIT, SPLIT])
def test_large_scores_do_not_overflow(plan: Plan) -> None:
    case = make_case([(1, 40), (3, 20)])
    case = replace(case, q=1000 * case.q)
    assert_as_exact(case.attend(plan), case.reference(), case.reference(torch.float64))


@quick
@given(data=st.data(), plan=st.sampled_from([UNSPLIT, SPLIT]), seed=st.integers(0, 99))
def test_chunks_give_what_one_prefill_gives(data: st.DataObject, plan: Plan, seed: int) -> None:
    total = data.draw(st.integers(2, 40))
    cut = data.draw(st.integers(1, total - 1))
    whole = make_case([(total, total)], seed=seed)

    def chunk(begin: int, end: int) -> Tensor:
        batch = replace(
            whole.batch,
            query_start=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=DEVICE),
            max_query_len=end - begin,
        )
        return replace(whole, q=whole.q[begin:end], batch=batch).attend(plan)

    chunks = torch.cat((chunk(0, cut), chunk(cut, total)))
    torch.testing.assert_close(chunks, whole.attend(UNSPLIT))


@quick
@given(
    lengths=sequences(max_size=2), plan=st.sampled_from([UNSPLIT, SPLIT]), seed=st.integers(0, 99)
)
def test_where_blocks_lie_does_not_matter(
    lengths: list[tuple[int, int]], plan: Plan, seed: int
) -> None:
    case = make_case(lengths)
    generator = torch.Generator().manual_seed(seed)
    moved_to = torch.randperm(case.k_cache.shape[0], generator=generator).to(DEVICE)
    k_cache, v_cache = torch.empty_like(case.k_cache), torch.empty_like(case.v_cache)
    k_cache[moved_to], v_cache[moved_to] = case.k_cache, case.v_cache
    tables = moved_to[case.batch.block_tables.long()].int()
    batch = replace(case.batch, block_tables=tables)
    moved = replace(case, k_cache=k_cache, v_cache=v_cache, batch=batch)
    assert torch.equal(moved.attend(plan), case.attend(plan))


@pytest.mark.parametrize("plan", [UNSPLIT, SPLIT])
@pytest.mark.parametrize("query_len", [0, 1, 3])
def test_padding_sequences_are_harmless(query_len: int, plan: Plan) -> None:
    """A captured graph's spare sequences: their rows become zero, others stay as they were."""
    lengths = [(1, 18), (3, 9)]
    case = make_case(lengths)
    spare = torch.randn(2 * query_len, *case.q.shape[1:], device=DEVICE)
    end = int(case.batch.query_start[-1])
    starts = torch.tensor([end + query_len, end + 2 * query_len], device=DEVICE)
    batch = replace(
        case.batch,
        block_tables=torch.nn.functional.pad(case.batch.block_tables, (0, 0, 0, 2)),
        query_start=torch.cat((case.batch.query_start, starts.int())),
        seq_lens=torch.nn.functional.pad(case.batch.seq_lens, (0, 2)),
    )
    padded = replace(case, q=torch.cat((case.q, spare)), batch=batch)
    got = padded.attend(plan)
    assert torch.equal(got[:end], case.attend(plan))
    assert torch.equal(got[end:], torch.zeros_like(spare))
    assert torch.equal(padded.reference()[end:], torch.zeros_like(spare))


def test_bounds_of_a_captured_graph_may_exceed_the_batch() -> None:
    case = make_case([(1, 18), (1, 9)])
    roomy = replace(case, batch=replace(case.batch, max_query_len=9, max_seq_len=4096))
    assert torch.equal(roomy.attend(UNSPLIT), case.attend(UNSPLIT))


def test_what_would_be_misread_is_refused() -> None:
    case = make_case([(1, 5)], group=3, kv_heads=2)
    q, caches = case.q, (case.k_cache, case.v_cache)
    with pytest.raises(ValueError, match="5 query heads do not share 2 KV heads"):
        paged_attention(q[:, :5], *caches, case.batch, SCALE)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(q[..., ::2], *caches, case.batch, SCALE)
    strided = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)[:, 0].expand(2)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(q, *caches, replace(case.batch, seq_lens=strided), SCALE)


def plan_of(
    num_seqs: int, num_tokens: int, max_query_len: int, max_seq_len: int, dtype: torch.dtype
) -> Plan:
    """The plan for Llama 3.1 8B on 132 processors; tensors without data, so none is read."""
    with torch.device("meta"):
        batch = AttentionBatch(
            block_tables=torch.empty(num_seqs, 8192, dtype=torch.int32),
            query_start=torch.empty(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.empty(num_seqs, dtype=torch.int32),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        q = torch.empty(num_tokens, 32, 128, dtype=dtype)
        cache = torch.empty(100, 16, 8, 128, dtype=dtype)
        return plan_for(q, cache, batch, num_sms=132)


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "max_query_len", "max_seq_len", "block_m", "splits"),
    [
        (1, 1, 1, 131072, 16, MAX_SPLITS),  # one long decode needs every processor
        (1, 1, 1, 1024, 16, 8),  # unless its parts become too short
        (16, 16, 1, 8192, 16, 4),
        (256, 256, 1, 8192, 16, 1),  # enough sequences to fill the GPU
        (1, 2048, 2048, 2048, 128, 1),
        (65, 2048, 1984, 8192, 64, 1),
        (1, 64, 64, 32768, 64, 8),  # a short chunk behind a long context
    ],
)
def test_plans_follow_shapes_alone(
    num_seqs: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    block_m: int,
    splits: int,
) -> None:
    plan = plan_of(num_seqs, num_tokens, max_query_len, max_seq_len, torch.bfloat16)
    assert (plan.block_m, plan.splits) == (block_m, splits)


def test_float32_keeps_to_short_tiles() -> None:
    assert plan_of(1, 2048, 2048, 2048, torch.float32).block_m == 16
