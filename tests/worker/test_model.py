"""The model against what transformers computes, and attention on CPUs against its definition."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import TORCH, Ops
from kernels.attention import AttentionBatch, paged_attention_reference
from kernels.attention_cpu import paged_attention_cpu
from tests.data.make_tiny_models import MODELS, PROMPTS, RECORDED, config_of, weights_of
from tests.worker.paged import GARBAGE, Paged
from worker.model import Model

# How many tokens of which prompt each step computes; copies of a prompt are sequences of their own.
WAYS: dict[str, list[dict[str, int]]] = {
    "whole": [{"a": 37}, {"b": 12}, {"c": 1}],
    "in chunks": [{"a": 5}] * 7 + [{"a": 2}],
    "token by token": [{"a": 1}] * 37,
    "together": [{"a": 37, "b": 12, "c": 1, "a again": 37, "b again": 12}],
    "a prefill, then decodes": [{"b": 10}, {"b": 1, "c": 1}, {"b": 1}],
    "prefills with decodes": [
        {"b": 3},
        {"a": 20, "b": 1},
        {"a": 1, "b": 7, "c": 1},
        {"a": 9, "b": 1},
        {"a": 7},
    ],
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are not worth two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(name: str, ops: Ops = TORCH, dtype: torch.dtype = torch.float32) -> Paged:
    weights = {tensor: value.to(dtype) for tensor, value in weights_of(name).items()}
    return Paged(Model(config_of(name), weights.items(), ops))


def results(
    name: str, way: str, ops: Ops = TORCH, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """For each sequence the logits after each token, and those that transformers computes."""
    paged = tiny(name, ops, dtype)
    prompts = dict(zip("abc", PROMPTS, strict=True))
    left = {sequence: list(prompts[sequence[0]]) for step in WAYS[way] for sequence in step}
    got: dict[str, list[Tensor]] = {sequence: [] for sequence in left}
    for step in WAYS[way]:
        shares = {sequence: left[sequence][:count] for sequence, count in step.items()}
        for sequence, logits in zip(step, paged.compute(shares), strict=True):
            got[sequence].append(logits)
            del left[sequence][: step[sequence]]
    assert not any(left.values())
    with np.load(RECORDED) as recorded:
        return [
            (
                torch.cat(parts),
                torch.from_numpy(recorded[f"{name}/{len(prompts[sequence[0]])}"]),
            )
            for sequence, parts in got.items()
        ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, way: str):
    for got, expected in results(name, way):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_stays_close(name: str):
    for got, expected in results(name, "prefills with decodes", dtype=torch.bfloat16):
        assert got.dtype == torch.float32, "logits are wide whatever the weights are"
        assert (got - expected).std() < 0.03 * expected.std()


def test_triton_kernels_give_the_same_in_a_model():
    """In Triton's interpreter, which only a process that begins with it can use."""
    script = """
import torch
import worker.model
from kernels.triton import TRITON
from tests.worker.test_model import results
torch.set_num_threads(1)
worker.model.FEW_ROWS = 0  # as on a GPU
for name in ('llama-3', 'mistral', 'qwen2', 'qwen3'):
    for got, expected in results(name, "a prefill, then decodes", TRITON):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Attention on CPUs


def sequences(max_size: int = 5) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(queries, whole length) of some sequences: decodes, prefills, later chunks, padding."""
    decode = st.integers(1, 70).map(lambda length: (1, length))
    chunk = st.tuples(st.integers(1, 20), st.integers(0, 50)).map(lambda c: (c[0], c[0] + c[1]))
    padding = st.integers(0, 2).map(lambda queries: (queries, 0))
    return st.lists(decode | chunk | padding, min_size=1, max_size=max_size).filter(
        lambda lengths: any(queries for queries, _ in lengths)
    )


@settings(max_examples=150, deadline=None)
@given(
    lengths=sequences(),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 7]),
    head_dim=st.sampled_from([2, 6, 16]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare_rows=st.sampled_from([0, 0, 2]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_sequences_is_attended_as_defined(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    spare_rows: int,
    seed: int,
):
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for _, length in lengths]
    order = torch.randperm(sum(num_blocks) + 1, generator=generator).tolist()
    unused = order.pop()
    shape = (2, len(order) + 1, block_size, kv_heads, head_dim)
    caches = torch.randn(shape, generator=generator)
    tables = []
    for count, (_, length) in zip(num_blocks, lengths, strict=True):
        blocks = [order.pop() for _ in range(count)]
        tables.append(blocks + [unused] * (max(num_blocks) + 1 - count))
        if length % block_size:
            caches[:, blocks[-1], length % block_size :] = GARBAGE
    caches[:, unused] = GARBAGE
    queries = [queries for queries, _ in lengths]
    batch = AttentionBatch(
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_start=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        max_query_len=max(queries),
        max_seq_len=max(length for _, length in lengths),
    )
    rows = sum(queries)
    q = torch.randn(rows + spare_rows, group * kv_heads, head_dim, generator=generator)
    got = paged_attention_cpu(q, caches[0], caches[1], batch, head_dim**-0.5)
    expected = paged_attention_reference(q, caches[0], caches[1], batch, head_dim**-0.5)
    torch.testing.assert_close(got[:rows], expected[:rows], atol=1e-5, rtol=1e-5)
