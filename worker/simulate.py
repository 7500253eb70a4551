"""A model runner that costs time instead of FLOPs; everything around it is real.

A step takes what the roofline says the real model would need: weights are read once, or
the tokens are computed, whichever is slower; the KV of every context is read; and a fixed
overhead. Tokens are a hash of seed and context, so a run can be repeated exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from worker.engine import Sample
from worker.scheduler import Scheduled
from worker.sequence import Sequence, TokenLogprobs

MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model costs on a machine. Times in seconds."""

    overhead: float  # per step: launches, scheduling, sampling
    weights: float  # per step: reading all weights once
    token: float  # per token computed, prefill or decode
    context_token: float  # per token of context read by attention
    num_blocks: int  # of 16 tokens, that fit beside the weights
    max_model_len: int
    max_num_batched_tokens: int
    mean_output_tokens: int = 256  # an answer ends by itself after so many, on average

    def step_seconds(self, num_tokens: int, context: int) -> float:
        """Time for a step that computes `num_tokens` and reads `context` tokens of KV."""
        return (
            self.overhead
            + max(self.weights, num_tokens * self.token)
            + context * self.context_token
        )


# H100 rows from its data sheet (3.35 TB/s, about half of 990 bf16 TFLOP/s reached) and the
# models' published shapes; cpu-smol measured with bench/engine.py on two server cores.
PROFILES = {
    "llama-8b-h100": Profile(
        overhead=1.2e-3,
        weights=4.8e-3,
        token=33e-6,
        context_token=39e-9,
        num_blocks=27_000,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ),
    "qwen-32b-2xh100": Profile(
        overhead=2.0e-3,
        weights=9.8e-3,
        token=70e-6,
        context_token=40e-9,
        num_blocks=19_000,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ),
    "cpu-smol": Profile(
        overhead=8e-3,
        weights=30e-3,
        token=1.7e-3,
        context_token=2.5e-6,
        num_blocks=2048,
        max_model_len=2048,
        max_num_batched_tokens=512,
    ),
    "instant": Profile(
        overhead=0.0,
        weights=0.0,
        token=0.0,
        context_token=0.0,
        num_blocks=4096,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ),
}


class SimulatedRunner:
    """Takes a profile's time for each step and makes up the tokens."""

    def __init__(self, profile: Profile, alphabet: Tokens[int], seed: int = 0) -> None:
        self._profile = profile
        self._alphabet = alphabet  # token ids to answer with
        self._seed = seed

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        num_tokens = sum(scheduled.num_tokens for scheduled in batch)
        context = sum(scheduled.sequence.num_computed_tokens for scheduled in batch)
        deadline = time.perf_counter() + self._profile.step_seconds(num_tokens, context)
        samples = [
            self._sample(sequence)
            for sequence, _ in batch
            if sequence.num_computed_tokens == len(sequence.token_ids)
        ]
        time.sleep(max(0.0, deadline - time.perf_counter()))
        return samples

    def _sample(self, sequence: Sequence) -> Sample:
        token_ids = sequence.token_ids
        seed = sequence.params.seed or self._seed
        random = _mix(seed ^ (token_ids[-1] << 32) ^ (len(token_ids) * 0x9E3779B97F4A7C15))
        token_id = self._alphabet[random % len(self._alphabet)]
        stop_ids = sequence.params.stop_token_ids
        may_end = stop_ids and sequence.num_output_tokens >= max(1, sequence.params.min_tokens)
        if may_end and (random >> 32) % self._profile.mean_output_tokens == 0:
            token_id = min(stop_ids)
        if sequence.needs_prompt_logits:
            sequence.prompt_logprobs = [None, *map(_certain, token_ids[1:])]
        wants_logprobs = sequence.params.logprobs is not None
        return Sample(token_id, _certain(token_id) if wants_logprobs else None)


def _certain(token_id: int) -> TokenLogprobs:
    """The log-probabilities of a model that never doubts."""
    return TokenLogprobs(token_id, 0.0, 1, [(token_id, 0.0)])


def _mix(x: int) -> int:
    """splitmix64's finaliser: spreads 64 bits evenly."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
