"""Filters say which pods may serve a request, before they are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from scorers.pods import Pods, Request
from scorers.uncached import backlog

Mask = NDArray[np.bool_]
MAX_NAMES = 4096  # characters of a header that names pods


class Filter(Protocol):
    """Keeps some candidates of one request."""

    required: ClassVar[bool]
    """What to do with those it drops. Required: never picked, and a request that keeps none is
    refused. Otherwise a preference: they serve as fallbacks, and a filter that keeps none is
    ignored."""

    def keep(self, request: Request, pods: Pods) -> Mask:
        """bool[n]. Reads, and changes nothing."""


@dataclass(frozen=True, slots=True)
class Warm:
    """Stick to warm pods until they are saturated.

    Keeps the pods that hold at least `share` of the prompt, unless even the one with the fewest
    uncached tokens ahead has `slack` tokens more of them than the pod with the fewest of all.

    Source: prefix-cache-affinity-filter of the reference picker and of llm-d, which turn the
    tokens into seconds by a configured peak throughput.
    """

    required: ClassVar[bool] = False
    share: float = 0.8
    slack: float = 8192.0
    waiting_tokens: float = 256.0  # that a request in a pod's queue counts at least

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("share must be above 0 and at most 1")
        if self.slack < 0 or self.waiting_tokens < 0:
            raise ValueError("slack and waitingTokens must not be negative")

    def keep(self, request: Request, pods: Pods) -> Mask:
        least = max(1.0, self.share * request.prompt_tokens)
        warm: Mask = pods.matched_tokens >= np.float32(least)
        if warm.any():
            ahead = backlog(pods, self.waiting_tokens)
            if ahead[warm].min() - ahead.min() > self.slack:
                return np.ones(len(pods), np.bool_)
        return warm


@dataclass(frozen=True, slots=True)
class Capacity:
    """Keeps the pods below each limit that is set; a pod that never told a number is below it.

    Source: utilization-filter of llm-d.
    """

    required: ClassVar[bool] = False
    waiting: float = np.inf  # requests in the pod's queue
    running: float = np.inf  # requests in its batch
    kv_usage: float = np.inf  # share of KV blocks in use, 0 to 1
    inflight: float = np.inf  # requests of our own

    def keep(self, request: Request, pods: Pods) -> Mask:
        full: Mask = pods.waiting >= self.waiting
        full |= pods.running >= self.running
        full |= pods.kv_usage >= self.kv_usage
        full |= pods.inflight >= self.inflight
        return ~full


@dataclass(frozen=True, slots=True)
class Session:
    """Keeps the pod that last served the request's session, if it is among the candidates.

    Source: session-affinity-filter of llm-d, with a table by session id.
    """

    required: ClassVar[bool] = False
    uses_sessions: ClassVar[bool] = True

    def keep(self, request: Request, pods: Pods) -> Mask:
        return pods.session


@dataclass(frozen=True, slots=True)
class Expression:
    """One requirement of a label selector, as Kubernetes writes it."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def fits(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None


@dataclass(frozen=True, slots=True)
class Label:
    """Keeps the pods that have every label of `match_labels` with its value, and fit every
    expression.

    Source: label-selector-filter of llm-d.
    """

    required: ClassVar[bool] = True
    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: list[Expression] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.match_labels and not self.match_expressions:
            raise ValueError("one of matchLabels and matchExpressions must say something")

    def keep(self, request: Request, pods: Pods) -> Mask:
        wanted, expressions = self.match_labels.items(), self.match_expressions
        return np.array(
            [
                wanted <= labels.items() and all(each.fits(labels) for each in expressions)
                for labels in pods.labels
            ],
            np.bool_,
        )


@dataclass(frozen=True, slots=True)
class LabelIn:
    """Keeps the pods whose label has one of some values.

    Source: decode-filter, prefill-filter and by-label of llm-d.
    """

    required: ClassVar[bool] = True
    label: str
    values: tuple[str, ...]
    missing: bool = False  # also those without the label

    def keep(self, request: Request, pods: Pods) -> Mask:
        name, values, missing = self.label, self.values, self.missing
        return np.array(
            [labels[name] in values if name in labels else missing for labels in pods.labels],
            np.bool_,
        )


@dataclass(frozen=True, slots=True)
class Named:
    """Keeps the pods that a request's header names, by IP or ip:port; all without the header.

    For tests: whoever may send the header chooses the pod.

    Source: header-based-testing-filter of the reference picker.
    """

    required: ClassVar[bool] = True
    header: str = "test-epp-endpoint-selection"

    def keep(self, request: Request, pods: Pods) -> Mask:
        told = request.headers.get(self.header.lower())
        if not told:
            return np.ones(len(pods), np.bool_)
        names = {name.strip() for name in told[:MAX_NAMES].split(",")}
        return np.array(
            [
                address in names or address.rpartition(":")[0].strip("[]") in names
                for address in pods.addresses
            ],
            np.bool_,
        )


FILTERS: dict[str, type[Filter]] = {
    "warm": Warm,
    "capacity": Capacity,
    "session": Session,
    "label": Label,
    "labelIn": LabelIn,
    "named": Named,
}
