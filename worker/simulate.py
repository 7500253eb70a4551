"""A model runner that costs time instead of FLOPs; everything around it is real.

A step takes what the roofline says the real model would need: weights are read once, or
the tokens are computed, whichever is slower; the KV of every context is read; and a fixed
overhead. Tokens are a hash of the seed, the last token and the length, so a
run can be repeated exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

from worker.profiles import Profile
from worker.scheduler import Scheduled
from worker.sequence import Sample, Sequence, TokenLogprobs

MASK64 = (1 << 64) - 1


class SimulatedRunner:
    """Takes a profile's time for each step and makes up the tokens."""

    def __init__(self, profile: Profile, alphabet: Tokens[int], seed: int = 0) -> None:
        self._profile = profile
        self._alphabet = alphabet  # token ids to answer with
        self._seed = seed

    def warm_up(self) -> None:
        """Nothing here gets faster by use."""

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        num_tokens = sum(num_tokens for _, num_tokens in batch)
        context = sum(sequence.num_computed_tokens for sequence, _ in batch)
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
        seed = self._seed if sequence.params.seed is None else sequence.params.seed
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
