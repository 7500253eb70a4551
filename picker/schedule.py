"""LLMRequest and Pods in, Decision out: filters, weighted scorers, a chooser, fallbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picker.choosers import chooser, max_score
from picker.config import Scheduling
from picker.document import nearest
from picker.filters import FILTERS, Filter
from picker.plugins import build
from picker.refusal import Refusal
from scorers import SCORERS
from scorers.pods import Column, Pods, Request
from scorers.scale import ONE, ZERO

DEFAULT_SCORERS: Mapping[str, float | dict[str, Any]] = {
    "uncached": 1.0,
    "inflight": 0.25,
    "noHitLru": 0.01,
}
"""Stick to the warm pod until it is saturated, then spread by uncached tokens.

By the scorers' spans, one request more in flight weighs as much as 256 uncached tokens ahead, and
taking cold prompts in turn decides only among pods within 655 tokens. bench/policies.py shows what
the numbers are worth: half the patience gives up warm pods too early, twice of it lets a prefix
that everybody shares overload its pod; so does half the weight of a request in flight.
"""

FRESH = "fresh"  # the preference that always comes first
RETRY_SECONDS = 1  # for a request that no pod may serve just now
EXPLAINED = 100  # candidates that a decision keeps, the best: decisions are kept by the thousand


@dataclass(slots=True, eq=False)
class Decision:
    """Where a request goes, and why. Columns have a row per candidate, in `candidates`' order."""

    endpoints: tuple[str, ...]  # the chosen one, then those to fall back to
    candidates: Sequence[str]  # that were scored; of many, the best and the chosen
    considered: int  # how many were scored
    dropped: tuple[tuple[str, int], ...]  # each filter that dropped any, and how many
    weights: tuple[tuple[str, float], ...]  # each scorer that is on, and its weight
    _columns: NDArray[np.float32]  # one for each scorer, then the total, then matched tokens

    @property
    def scores(self) -> dict[str, Column]:
        """By scorer, each in 0 to 1, before its weight."""
        return {name: self._columns[row] for row, (name, _) in enumerate(self.weights)}

    @property
    def total(self) -> Column:
        """Weighted sum of the scores."""
        total: Column = self._columns[-2]
        return total

    @property
    def matched(self) -> Column:
        """Leading tokens of the prompt that each candidate holds."""
        matched: Column = self._columns[-1]
        return matched


class Scheduler:
    """Ranks the candidates of one request after another.

    Raises:
        ValueError: for a scorer, filter or parameter that is unknown or out of range.
    """

    def __init__(self, settings: Scheduling, *, random: np.random.Generator | None = None) -> None:
        weighted = [_scorer(*entry) for entry in (settings.scorers or DEFAULT_SCORERS).items()]
        on = [entry for entry in weighted if entry[1] > 0]
        self._scorers = [scorer for _, _, scorer in on]
        self._weights = tuple((name, weight) for name, weight, _ in on)
        self._weight_column = np.array([weight for _, weight, _ in on], np.float32)[:, np.newaxis]
        filters = [_filter(entry) for entry in settings.filters if entry != FRESH]
        self._required = [entry for entry in filters if entry[1].required]
        self._preferences = [entry for entry in filters if not entry[1].required]
        self._choose = chooser(settings.picker)
        self._fallbacks = settings.picker.fallbacks
        self._random = random or np.random.default_rng()

    @property
    def uses_sessions(self) -> bool:
        """Whether any scorer or filter reads where a session lives."""
        filters = (preference for _, preference in self._required + self._preferences)
        return any(getattr(part, "uses_sessions", False) for part in (*self._scorers, *filters))

    def schedule(self, request: Request, pods: Pods) -> Decision:
        """The endpoint for a request among `pods`, and those to fall back to.

        Raises:
            Refusal: 503 when there is no pod, or a required filter keeps none.
        """
        if not len(pods):
            raise Refusal(503, "no_endpoints", "there is no endpoint to choose from")
        dropped: list[tuple[str, int]] = []
        for name, required in self._required:
            kept = _narrow(name, required.keep(request, pods), pods, dropped)
            if kept is None:
                why = f"no endpoint passes the filter {name!r}"
                raise Refusal(503, "no_endpoints", why, retry_after=RETRY_SECONDS)
            pods = kept
        if np.count_nonzero(pods.fresh) < len(pods):
            # A pod that was never scraped, is dead or hangs has no load to be compared by.
            pods = _narrow(FRESH, pods.fresh, pods, dropped) or pods
        eligible = pods
        for name, preference in self._preferences:
            pods = _narrow(name, preference.keep(request, pods), pods, dropped) or pods
        columns = self._score(request, pods)
        chosen = self._order(columns[-2])
        endpoints = [pods.addresses[row] for row in chosen]
        if len(endpoints) <= self._fallbacks and len(eligible) > len(pods):
            self._fall_back_beyond(endpoints, request, eligible)
        considered, candidates = len(pods), pods.addresses
        if considered > EXPLAINED:
            rows = _best(columns[-2], chosen)
            candidates, columns = [candidates[row] for row in rows], columns[:, rows]
        return Decision(
            tuple(endpoints), candidates, considered, tuple(dropped), self._weights, columns
        )

    def _score(self, request: Request, pods: Pods) -> NDArray[np.float32]:
        """A row per scorer, the total, and the matched tokens."""
        count = len(self._scorers)
        columns = np.empty((count + 2, len(pods)), np.float32)
        scores = columns[:count]
        for row, scorer in enumerate(self._scorers):
            scores[row] = scorer.score(request, pods)
        np.fmax(scores, ZERO, out=scores)  # NaN as well
        np.minimum(scores, ONE, out=scores)
        # Not a matrix product: that may round equal pods differently, and ties would have a winner.
        np.add.reduce(scores * self._weight_column, axis=0, out=columns[-2])
        columns[-1] = pods.matched_tokens
        return columns

    def _order(self, totals: Column) -> list[int]:
        """Rows: the chosen one, then the best of the others."""
        rows = [self._choose(totals, self._random)]
        left = min(self._fallbacks, len(totals) - 1)
        if left:
            others = totals.copy()
            for _ in range(left):
                others[rows[-1]] = -np.inf
                rows.append(max_score(others, self._random))
        return rows

    def _fall_back_beyond(self, endpoints: list[str], request: Request, eligible: Pods) -> None:
        """Fill up with pods that were not preferred: a retry that reaches one beats none."""
        totals = self._score(request, eligible)[-2]
        for row in np.argsort(-totals, kind="stable"):
            if len(endpoints) > self._fallbacks:
                return
            if eligible.addresses[row] not in endpoints:
                endpoints.append(eligible.addresses[row])


def _narrow(
    name: str, kept: NDArray[np.bool_], pods: Pods, dropped: list[tuple[str, int]]
) -> Pods | None:
    """The pods that a filter keeps; None when those are none."""
    count = int(np.count_nonzero(kept))
    if not count:
        return None
    if count == len(pods):
        return pods
    dropped.append((name, len(pods) - count))
    return pods.take(kept.nonzero()[0])


def _best(totals: Column, chosen: list[int]) -> NDArray[np.intp]:
    """Rows of the best `EXPLAINED` candidates, with the chosen ones whatever their total."""
    order = totals.copy()
    order[chosen] = np.inf
    return np.argpartition(order, -EXPLAINED)[-EXPLAINED:]


def _scorer(name: str, value: float | dict[str, Any]) -> tuple[str, float, Any]:
    """Name, weight and scorer of an entry `name: weight` or `name: {weight: 2, parameter: ...}`.

    With a `type` among the parameters, the name may be any.
    """
    parameters = dict(value) if isinstance(value, dict) else {"weight": value}
    weight = parameters.pop("weight", 1.0)
    kind = parameters.pop("type", name)
    if not isinstance(kind, str):
        raise ValueError(f"scorer {name!r}: type must be a scorer's name, not {kind!r}")
    scorer = build("scorer", kind, SCORERS, parameters)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"scorer {name!r}: weight must be a number, not {weight!r}")
    if not 0 <= weight < math.inf:
        raise ValueError(f"scorer {name!r}: weight must be 0 or more, not {weight}")
    return name, float(weight), scorer


def _filter(entry: str | dict[str, Any]) -> tuple[str, Filter]:
    """Name and filter of an entry `name` or `{type: name, parameter: ...}`."""
    parameters = {"type": entry} if isinstance(entry, str) else dict(entry)
    name = parameters.pop("type", None)
    if not isinstance(name, str):
        raise ValueError(f"filter {entry!r} needs a type; {nearest('', FILTERS)}")
    return name, build("filter", name, FILTERS, parameters)
