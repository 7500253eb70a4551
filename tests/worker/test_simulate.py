"""A simulated model: the same answers every time, in the time that its profile says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.worker.engines import add, make_engine, run, token_ids
from worker.config import EngineConfig
from worker.profiles import PROFILES, Profile
from worker.scheduler import Scheduled
from worker.sequence import Sample, SamplingParams, Sequence, TokenLogprobs
from worker.simulate import SimulatedRunner

INSTANT = PROFILES["instant"]
LETTERS = range(100, 200)


def answer(runner: SimulatedRunner, max_tokens: int = 12, **params: Any) -> list[int | None]:
    engine = make_engine(runner, max_model_len=256)
    add(engine, 0, [1, 2, 3], max_tokens, **params)
    return token_ids(run(engine)[0])


# Answers


def test_the_same_seed_gives_the_same_answers():
    first, again, other = (answer(SimulatedRunner(INSTANT, LETTERS, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert set(first) <= set(LETTERS)


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_a_seed_of_the_request_counts_more(seed: int):
    runners = [SimulatedRunner(INSTANT, LETTERS, own) for own in (1, 2)]
    first, second = (answer(runner, seed=seed) for runner in runners)
    assert first == second
    assert first != answer(runners[0], seed=seed + 1)


def test_answers_end_by_themselves_after_so_many_tokens_on_average():
    runner = SimulatedRunner(replace(INSTANT, mean_output_tokens=20), LETTERS)
    stops = frozenset({5, 6})
    answers = [answer(runner, 240, seed=seed, stop_token_ids=stops) for seed in range(200)]
    lengths = [len(tokens) for tokens in answers]
    assert 15 < sum(lengths) / len(lengths) < 25
    assert min(lengths) >= 2, "an empty answer is no use"
    assert all(tokens[-1] in stops for tokens in answers if len(tokens) < 240)


def test_answers_do_not_end_before_min_tokens_nor_without_a_stop_token():
    runner = SimulatedRunner(replace(INSTANT, mean_output_tokens=1), LETTERS)
    assert len(answer(runner, 30)) == 30
    stops = frozenset({5})
    assert len(answer(runner, 30, stop_token_ids=stops)) == 2
    longer = answer(runner, 30, min_tokens=9, stop_token_ids=stops)
    assert [token == 5 for token in longer] == [False] * 9 + [True]


def test_it_never_doubts():
    engine = make_engine(SimulatedRunner(INSTANT, LETTERS))
    add(engine, 0, [1, 2, 3], logprobs=1, prompt_logprobs=1)
    first, second, *_ = run(engine)[0]
    certain = [TokenLogprobs(token, 0.0, 1, [(token, 0.0)]) for token in (2, 3)]
    assert first.prompt_logprobs == [None, *certain]
    assert second.logprobs == TokenLogprobs(second.token_id, 0.0, 1, [(second.token_id, 0.0)])


# Time


def test_a_step_reads_weights_or_computes_whichever_is_slower():
    profile = replace(INSTANT, overhead=1.0, weights=8.0, token=0.5, context_token=0.001)
    assert profile.step_seconds(1, 0) == 9.0
    assert profile.step_seconds(16, 0) == 9.0
    assert profile.step_seconds(32, 0) == 17.0
    assert profile.step_seconds(1, 2000) == 11.0


@dataclass(frozen=True)
class Recording(Profile):
    """A profile that costs nothing and knows what it was asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def step_seconds(self, num_tokens: int, context: int) -> float:
        self.asked.append((num_tokens, context))
        return 0.0


def test_a_step_costs_its_tokens_and_the_context_they_look_at():
    profile = Recording(0.0, 0.0, 0.0, 0.0, 64, 64, 64)
    engine = make_engine(SimulatedRunner(profile, LETTERS), max_num_batched_tokens=16)
    add(engine, 0, [1] * 10, max_tokens=3)
    engine.step()
    add(engine, 1, [2] * 20, max_tokens=1)
    run(engine)
    assert profile.asked == [(10, 10), (16, 11 + 15), (6, 12 + 20)]


def test_a_step_takes_the_time_of_its_profile(monkeypatch: pytest.MonkeyPatch):
    """As far as the clock's own time does not count: an hour, but for what choosing took."""
    slept: list[float] = []
    monkeypatch.setattr("worker.simulate.time.sleep", slept.append)
    answer(SimulatedRunner(replace(INSTANT, overhead=3600.0), LETTERS), max_tokens=2)
    assert len(slept) == 2
    assert all(1800 < seconds <= 3600 for seconds in slept)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_describe_workers_that_can_run(name: str):
    profile = PROFILES[name]
    EngineConfig(
        num_blocks=profile.num_blocks,
        max_model_len=profile.max_model_len,
        max_num_batched_tokens=profile.max_num_batched_tokens,
    )
    decode, prefill = profile.step_seconds(1, 1000), profile.step_seconds(2000, 2000)
    assert 0 <= decode <= prefill
    assert (decode == 0) == (name == "instant")


def test_only_sequences_that_are_all_computed_get_a_token():
    runner = SimulatedRunner(INSTANT, LETTERS)
    sequences = [Sequence(id, [1] * 9, SamplingParams(max_tokens=4)) for id in range(3)]
    for sequence, computed in zip(sequences, (9, 5, 9), strict=True):
        sequence.num_computed_tokens = computed
    batch: list[Scheduled] = [(sequence, 5) for sequence in sequences]
    assert all(isinstance(one, Sample) for one in runner.run(batch))
    assert len(runner.run(batch)) == 2
