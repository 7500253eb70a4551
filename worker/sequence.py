"""One sequence: what was asked, what was produced, and where its KV lives."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; defaults are vLLM's."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # alternatives per output token; 0: only the chosen one's
    prompt_logprobs: int | None = None  # the same for the prompt
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence ids included, unless ignored

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether only the head of the sorted distribution may be drawn from."""
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether single tokens are favoured, penalised or banned."""
        return self.penalised or self.min_tokens > 0 or bool(self.logit_bias)

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Adapter(NamedTuple):
    """One load of a LoRA adapter."""

    name: str
    load_id: int  # differs between loads of the same name


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the raw logits as in vLLM."""

    token_id: int
    logprob: float
    rank: int  # 1: it was the most likely
    top: list[tuple[int, float]]  # (token id, log-probability), most likely first


class Sample(NamedTuple):
    """The token chosen for a sequence whose known tokens are all computed."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Output(NamedTuple):
    """What one step gave one sequence."""

    token_id: int | None  # None: it ended without a new token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token that ended it
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first token, if asked
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first admitted


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence from submission to its end. The engine's thread owns every field."""

    id: int
    token_ids: list[int]  # prompt, then what was generated
    params: SamplingParams
    priority: int = 0  # lower is more important, as in vLLM
    adapter: Adapter | None = None
    cache_salt: str | None = None  # sequences share cached prefixes only with their own salt
    arrival: float = 0.0  # seconds, time.monotonic

    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0  # tokens whose KV is written once the running step ends
    num_cached_tokens: int = -1  # prompt tokens found cached at the first admission; -1: not yet
    block_ids: array[int] = field(default_factory=lambda: array("i"))  # the block table
    num_registered_blocks: int = 0  # leading blocks of the table that are known to the cache
    block_hashes: list[bytes] = field(default_factory=list)  # the chain, as far as computed
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_preemptions: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.rng = random.Random(self.params.seed)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether every prompt token must be computed, cached or not."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def importance(self) -> tuple[int, int]:
        """Sort key: priority, then order of submission; total, so preemption cannot cycle."""
        return (self.priority, self.id)
