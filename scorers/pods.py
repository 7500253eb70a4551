"""The pods as columns: what a scorer reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float32]


class Request(Protocol):
    """What a scorer may ask of a request."""

    @property
    def model(self) -> str | None: ...

    @property
    def prompt_tokens(self) -> int:
        """Exact for prompts of token ids, else estimated from the bytes."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Lower-case names."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of a pod, as it last told."""

    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    limit: int = 0  # how many can be loaded at once; 0 where the pod has none


@dataclass(slots=True, eq=False)  # frozen, making one would take seven times as long
class Pods:
    """The candidates of one request, one row each.

    A number that a pod never told is NaN: a scorer leaves such a pod unscored, at 0, and out of
    its smallest and greatest.
    """

    addresses: Sequence[str]  # "ip:port", IPv6 in brackets
    labels: Sequence[Mapping[str, str]]
    adapters: Sequence[Adapters]
    fresh: NDArray[np.bool_]  # tells its load when it is asked
    waiting: Column  # requests in the pod's queue, with our unanswered picks since it told
    running: Column  # requests in its batch
    kv_usage: Column  # share of its KV blocks that running requests hold, 0 to 1
    inflight: Column  # our requests there that have not ended
    inflight_tokens: Column  # uncached prompt tokens of those whose first token has not come
    matched_tokens: Column  # leading prompt tokens of this request that its cache holds
    cold_at: NDArray[np.float64]  # seconds: when it was last given a prompt nobody held; 0 never
    session: NDArray[np.bool_]  # whether this request's session lives here

    def __len__(self) -> int:
        return len(self.addresses)

    def take(self, rows: NDArray[np.intp]) -> Pods:
        """The pods of some rows, in that order. Columns are copied."""
        return Pods(
            [self.addresses[row] for row in rows],
            [self.labels[row] for row in rows],
            [self.adapters[row] for row in rows],
            self.fresh[rows],
            self.waiting[rows],
            self.running[rows],
            self.kv_usage[rows],
            self.inflight[rows],
            self.inflight_tokens[rows],
            self.matched_tokens[rows],
            self.cold_at[rows],
            self.session[rows],
        )


class Scorer(Protocol):
    """Rates the candidates of one request."""

    def score(self, request: Request, pods: Pods) -> Column:
        """float32[n], each in 0 to 1, higher is better. Reads, and changes nothing."""
