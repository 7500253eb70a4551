"""Sampling against formulas in NumPy.

A draw takes one random number u, and a token's share of all u is its probability. So most tests
draw once for each u of an even grid, and count: no chance is involved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from worker import sampler
from worker.sampler import HEAD, sample
from worker.sequence import Sample, SamplingParams, Sequence

DRAWS = 500
VOCAB = 40
LOGITS = np.random.RandomState(0).permutation(VOCAB) / 8.0  # distinct, so that order is clear


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Fixed(random.Random):
    """A generator of one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


def sequence(tokens: list[int] | None = None, output: list[int] | None = None, **params: Any):
    made = Sequence(0, list(tokens or [0]), SamplingParams(max_tokens=100, **params))
    made.token_ids += output or []
    return made


def choose(logits: np.ndarray, *sequences: Sequence) -> list[Sample]:
    rows = torch.from_numpy(np.tile(logits, (len(sequences), 1))).float()
    return sample(rows, list(sequences))


def shares(logits: np.ndarray, draws: int = DRAWS, **given: Any) -> np.ndarray:
    """Of all u, the share for which each token is drawn."""
    sequences = [sequence(**given) for _ in range(draws)]
    for i, each in enumerate(sequences):
        each.rng = Fixed((i + 0.5) / draws)
    drawn = [one.token_id for one in choose(logits, *sequences)]
    return np.bincount(drawn, minlength=len(logits)) / draws


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def truncated(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """What each token's probability should be; each rule renews the sum of those it leaves."""
    p = softmax(logits / temperature)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


def assert_shares(got: np.ndarray, expected: np.ndarray, draws: int = DRAWS) -> None:
    """Every interval of u may gain or lose a point of the grid at each end."""
    assert np.abs(got - expected).max() <= 2 / draws
    assert not got[expected == 0].any(), "drew what was ruled out"


# Choosing


def test_greedy_takes_the_most_likely():
    (chosen,) = choose(LOGITS, sequence(temperature=0.0))
    assert chosen == Sample(int(LOGITS.argmax()))


def test_greedy_and_drawn_mix_in_a_step():
    greedy, drawn = sequence(temperature=0.0), sequence(seed=1)
    alone = choose(LOGITS, sequence(seed=1))[0].token_id
    chosen = choose(LOGITS, greedy, drawn, greedy)
    assert [one.token_id for one in chosen] == [LOGITS.argmax(), alone, LOGITS.argmax()]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 4.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_each_token_is_drawn_as_often_as_it_should_be(params: dict[str, Any]):
    assert_shares(shares(LOGITS, **params), truncated(LOGITS, **params))


@pytest.mark.parametrize("params", [{}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("number", [0.0, float(np.nextafter(1, 0))])
def test_the_outermost_numbers_draw_nothing_ruled_out(number: float, params: dict[str, Any]):
    ends = {"stop_token_ids": frozenset({0, VOCAB - 1}), "min_tokens": 1}
    one = sequence(**params, **ends)
    one.rng = Fixed(number)
    (chosen,) = choose(LOGITS, one)
    assert chosen.token_id in np.argsort(-LOGITS)[: params.get("top_k", VOCAB)]
    assert chosen.token_id not in ends["stop_token_ids"]


def test_draws_of_seeded_sequences_follow_the_distribution():
    """Pearson's chi-square, over one sequence's own numbers."""
    params = {"temperature": 0.8, "top_k": 12, "top_p": 0.95}
    expected = truncated(LOGITS, **params)
    one, draws = sequence(seed=7, **params), 4000
    counts = np.zeros(VOCAB)
    for _ in range(draws // 100):
        for chosen in choose(LOGITS, *[one] * 100):
            counts[chosen.token_id] += 1
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - draws * expected)[kept] ** 2 / (draws * expected)[kept]).sum()
    degrees = kept.sum() - 1
    assert statistic < degrees + 3 * np.sqrt(2 * degrees)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-60, 60), min_size=1, max_size=30, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(0, 35),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    head=st.sampled_from([1, 4, 10, HEAD]),
)
def test_any_truncation_keeps_the_right_tokens(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, head: int
):
    """However few tokens are sorted before all are."""
    values = np.array(logits) / 10
    p = softmax(values / temperature)
    assume(np.abs(p / p.max() - min_p).min() > 1e-5)
    kept = np.sort(truncated(values, temperature, top_k, 1.0, min_p))[::-1]
    assume(top_p == 1.0 or np.abs(np.cumsum(kept) - top_p).min() > 1e-5)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    with patch.object(sampler, "HEAD", head):
        got = shares(values, draws=200, **params)
    assert_shares(got, truncated(values, **params), draws=200)


def test_rows_of_a_batch_are_truncated_each_in_its_own_way():
    rows = [{}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 0.0}]
    sequences = [sequence(seed=5, **params) for params in rows]
    together = choose(LOGITS, *sequences)
    for params, got in zip(rows, together, strict=True):
        assert choose(LOGITS, sequence(seed=5, **params)) == [got]


def test_a_nucleus_wider_than_the_head_is_found():
    """Almost even odds: 99% of them need most of the vocabulary, and of the better two thirds."""
    vocab, draws = 3 * HEAD, 400
    logits = np.linspace(0, 0.1, vocab)
    for params in ({"top_p": 0.99}, {"top_k": 2 * HEAD, "top_p": 0.99}):
        kept = np.count_nonzero(truncated(logits, **params))
        drawn = np.nonzero(shares(logits, draws, **params))[0]
        assert drawn.min() in range(vocab - kept, vocab - kept + 8)
        assert kept > HEAD


def test_a_nucleus_is_one_of_the_top_k_only():
    """Even if the head would be enough for a nucleus of all tokens."""
    odds = np.array([0.40, 0.30, 0.05, 0.05, 0.02, *[0.01] * 18])
    params = {"top_k": 5, "top_p": 0.78}
    with patch.object(sampler, "HEAD", 4):
        got = shares(np.log(odds), **params)
    assert np.count_nonzero(got) == 2
    assert_shares(got, truncated(np.log(odds), **params))


# Seeds


def continuation(own: Sequence, neighbours: int, steps: int = 12) -> list[int]:
    """What a sequence draws step by step, the logits depending on its last token."""
    noise = np.random.RandomState(1).standard_normal((VOCAB, VOCAB))
    others = [sequence(seed=n, top_p=0.9 if n % 2 else 1.0) for n in range(neighbours)]
    batch = [*others, own, *others]
    for _ in range(steps):
        rows = torch.from_numpy(noise[[each.token_ids[-1] for each in batch]]).float()
        for each, chosen in zip(batch, sample(rows, batch), strict=True):
            each.token_ids.append(chosen.token_id)
    return own.token_ids[own.num_prompt_tokens :]


@pytest.mark.parametrize("params", [{}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_seed_repeats_an_answer_whoever_else_is_there(params: dict[str, Any]):
    alone = continuation(sequence(seed=3, **params), neighbours=0)
    assert continuation(sequence(seed=3, **params), neighbours=4) == alone
    assert continuation(sequence(seed=4, **params), neighbours=0) != alone


def test_without_a_seed_answers_differ():
    assert len({tuple(continuation(sequence(), 0)) for _ in range(5)}) > 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_is_a_seed(seed: int):
    assert continuation(sequence(seed=seed), 0) == continuation(sequence(seed=seed), 0)


# Single tokens


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    output=st.lists(st.integers(5, 14), max_size=12),
    repetition=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalties_follow_their_formulas(
    prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
):
    logits = np.random.RandomState(2).permutation(np.linspace(-1.5, 1.5, 15))
    expected = logits.copy()
    for token in set(prompt + output):
        expected[token] *= repetition if expected[token] < 0 else 1 / repetition
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    got = shares(
        logits,
        draws=400,
        tokens=prompt,
        output=output,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    assert_shares(got, softmax(expected), draws=400)


def test_penalties_change_what_greedy_takes():
    best, second = np.argsort(-LOGITS)[:2]
    given = {"temperature": 0.0, "tokens": [int(best)]}
    assert choose(LOGITS, sequence(**given, presence_penalty=2.0))[0].token_id == best
    assert choose(LOGITS, sequence(**given, repetition_penalty=2.0))[0].token_id == second


def test_a_bias_adds_to_the_logit():
    best, second = np.argsort(-LOGITS)[:2].tolist()
    expected = LOGITS.copy()
    expected[[best, second]] += [-0.5, 1.5]
    assert_shares(shares(LOGITS, logit_bias={best: -0.5, second: 1.5}), softmax(expected))


def test_a_bias_of_100_decides():
    worst, best = int(LOGITS.argmin()), int(LOGITS.argmax())
    assert shares(LOGITS, logit_bias={worst: 100})[worst] == 1
    assert shares(LOGITS, logit_bias={best: -100})[best] == 0
    forbidden = {token: -100.0 for token in range(VOCAB) if token != worst}
    assert shares(LOGITS, logit_bias=forbidden)[worst] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_banned_until_min_tokens(temperature: float):
    best = int(LOGITS.argmax())
    params = {
        "temperature": temperature,
        "min_tokens": 2,
        "stop_token_ids": frozenset({best, 3}),
        "logit_bias": {3: 100.0},
    }
    for output in ([], [1]):
        banned = shares(LOGITS, output=output, **params)
        assert banned[best] == banned[3] == 0
    assert shares(LOGITS, output=[1, 1], **params)[3] == 1


# Asked for within the rules, though nobody should: one request must not fail the whole step


def test_a_nucleus_may_be_smaller_than_float32_can_tell():
    assert shares(LOGITS, top_p=1e-60)[LOGITS.argmax()] == 1


def test_a_temperature_may_be_larger_than_float32_can_tell():
    params = {"temperature": 1e300, "min_tokens": 1, "stop_token_ids": frozenset({3})}
    even = np.ones(VOCAB) / (VOCAB - 1)
    even[3] = 0
    assert_shares(shares(LOGITS, **params), even)


def test_stop_tokens_need_not_exist():
    best_from_the_end = int(LOGITS.argmax()) - VOCAB
    strange = frozenset({best_from_the_end, 3, VOCAB, 10**12})
    params = {"min_tokens": 1, "stop_token_ids": strange}
    expected = LOGITS.copy()
    expected[3] = -np.inf
    assert_shares(shares(LOGITS, **params), softmax(expected))


def test_logits_that_are_no_numbers_harm_nobody_else():
    logits = torch.from_numpy(np.tile(LOGITS, (3, 1))).float()
    logits[1] = torch.nan
    sequences = [sequence(seed=1), sequence(seed=1), sequence(seed=1)]
    first, broken, last = (one.token_id for one in sample(logits, sequences))
    assert first == last == choose(LOGITS, sequence(seed=1))[0].token_id
    assert broken in range(VOCAB), "an embedding exists"


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits():
    logprobs = np.log(softmax(LOGITS))
    biased = {"logit_bias": {5: 100.0}, "temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0}
    (chosen,) = choose(LOGITS, sequence(logprobs=3, **biased))
    entry = chosen.logprobs
    assert entry is not None
    assert chosen.token_id == entry.token_id == 5
    assert entry.logprob == pytest.approx(logprobs[5], abs=1e-5)
    assert entry.rank == 1 + list(np.argsort(-LOGITS)).index(5)
    best = np.argsort(-LOGITS)[:3]
    assert [token for token, _ in entry.top] == list(best)
    assert [value for _, value in entry.top] == pytest.approx(logprobs[best], abs=1e-5)


def test_each_gets_as_many_alternatives_as_it_asked_for():
    wanted = [None, 0, 2, 1, VOCAB, VOCAB + 5]
    chosen = choose(LOGITS, *(sequence(temperature=0.0, logprobs=n) for n in wanted))
    assert chosen[0].logprobs is None
    assert [len(one.logprobs.top) for one in chosen[1:] if one.logprobs] == [0, 2, 1, VOCAB, VOCAB]
    assert all(one.logprobs.rank == 1 for one in chosen[1:] if one.logprobs)
