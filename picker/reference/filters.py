"""The reference picker's filters, pickers and saturation detectors in our terms."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from picker.config import Section
from picker.reference.plugin import Data, FilterPlugin, Plugin, Refused, Role
from picker.reference.quantity import GoDuration
from picker.reference.scorers import Sessions

ROLE = "llm-d.ai/role"
DECODE = ("decode", "prefill-decode", "both", "encode-prefill-decode")
PREFILL = ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
ENCODE = ("encode", "encode-prefill", "encode-prefill-decode")
MOST_FALLBACKS = 16
DEFAULT_PENALTY_MS = 18_000.0
ANY_WAITING, ANY_KV = 1 << 20, 1.0  # limits that are none
ANY_SLACK = 1e12  # tokens; no pod has so many ahead


class PrefixAffinity(FilterPlugin, frozen=True):
    affinity_threshold: float = 0.8
    exploration_probability: float = 0.0
    max_ttft_penalty_ms: float | None = msgspec.field(name="maxTTFTPenaltyMs", default=None)
    max_tokens_in_flight_penalty: float | None = None
    peak_prefill_throughput: float = 15_928.0  # tokens/s
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = msgspec.field(
        name="ttftSource", default="prefillThroughput"
    )
    penalty_source: Literal["constant", "sessionCost"] = "constant"
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""

    def filter(self) -> Data:
        if not 0 < self.affinity_threshold <= 1:
            raise Refused("affinityThreshold: must be above 0 and at most 1")
        if self.ttft_source == "latencyPredictor":
            raise Refused(
                "ttftSource: latencyPredictor: latencies are not predicted here; leave it out, and "
                "set peakPrefillThroughput"
            )
        if self.penalty_source == "sessionCost":
            raise Refused("penaltySource: sessionCost is not known here; leave it out")
        return {
            "type": "warm",
            "share": self.affinity_threshold,
            "slack": self._slack(),
            "waitingTokens": 0,  # it knows of no request but its own
        }

    def _slack(self) -> float:
        """Tokens: the smaller limit of those that are set. 0 is none, as there."""
        milliseconds, tokens = self.max_ttft_penalty_ms, self.max_tokens_in_flight_penalty
        if milliseconds is None:
            milliseconds = 0.0 if tokens else DEFAULT_PENALTY_MS
        tokens = tokens or 0.0
        if not 0 < self.peak_prefill_throughput < ANY_SLACK:
            raise Refused("peakPrefillThroughput: must be above 0")
        slack = milliseconds / 1000 * self.peak_prefill_throughput
        if not 0 <= slack < ANY_SLACK:
            raise Refused("maxTTFTPenaltyMs: must be from 0 to some hours")
        if not 0 <= tokens < ANY_SLACK:
            raise Refused("maxTokensInFlightPenalty: must be from 0 to 10^12")
        return min(slack or ANY_SLACK, tokens or ANY_SLACK)

    def notes(self) -> list[str]:
        if not self.exploration_probability:
            return []
        return ["explorationProbability is ignored: no request is sent to a cold pod on purpose"]


class _Requirement(Section, frozen=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelector(FilterPlugin, frozen=True):
    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[_Requirement, ...] = ()

    def filter(self) -> Data:
        if not self.match_labels and not self.match_expressions:
            raise Refused("matchLabels: an empty selector keeps all pods; leave the filter out")
        expressions = [
            {"key": each.key, "operator": each.operator, "values": list(each.values)}
            for each in self.match_expressions
        ]
        return {
            "type": "label",
            "matchLabels": self.match_labels,
            "matchExpressions": expressions,
        }


class ByLabel(FilterPlugin, frozen=True):
    label: str
    valid_values: list[str]
    allows_no_label: bool = False

    def filter(self) -> Data:
        return _label_in(self.label, self.valid_values, self.allows_no_label)


class DecodeRole(FilterPlugin, frozen=True):
    def filter(self) -> Data:
        return _label_in(ROLE, DECODE, True)


class PrefillRole(FilterPlugin, frozen=True):
    def filter(self) -> Data:
        return _label_in(ROLE, PREFILL, False)


class EncodeRole(FilterPlugin, frozen=True):
    def filter(self) -> Data:
        return _label_in(ROLE, ENCODE, False)


def _label_in(label: str, values: list[str] | tuple[str, ...], missing: bool) -> Data:
    return {"type": "labelIn", "label": label, "values": list(values), "missing": missing}


class SessionAffinity(Sessions, frozen=True):
    roles: ClassVar = frozenset({Role.FILTER})

    def filter(self) -> Data:
        return {"type": "session"}


class HeaderBased(FilterPlugin, frozen=True):
    """Of the conformance suite."""

    def filter(self) -> Data:
        return {"type": "named"}


class Utilization(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.DETECTOR, Role.FILTER})
    queue_depth_threshold: int = 5
    kv_cache_util_threshold: float = 0.8
    metrics_staleness_threshold: GoDuration = GoDuration(-1)  # below 0: left out
    headroom: float = 0.0

    def filter(self) -> Data:
        more = 1 + _headroom(self.headroom)
        return {
            "type": "capacity",
            "waiting": self.queue_depth_threshold * more,
            "kvUsage": min(1.0, self.kv_cache_util_threshold * more),
        }

    def saturation(self) -> Data:
        """`flow.saturation`."""
        if not 1 <= self.queue_depth_threshold <= ANY_WAITING:
            raise Refused(f"queueDepthThreshold: must be from 1 to {ANY_WAITING}")
        if not 0.01 <= self.kv_cache_util_threshold <= 1:
            raise Refused("kvCacheUtilThreshold: must be from 0.01 to 1")
        return {"waiting": self.queue_depth_threshold, "kv": self.kv_cache_util_threshold}

    def notes(self) -> list[str]:
        if self.metrics_staleness_threshold < 0:
            return []
        return [
            "metricsStalenessThreshold is ignored: a pod is full while it does not answer for "
            "--metrics-staleness-threshold"
        ]


class Concurrency(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.DETECTOR, Role.FILTER})
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: int = 100
    max_token_concurrency: int = 1_000_000
    headroom: float = 0.0
    in_flight_load_producer_name: str = ""

    def filter(self) -> Data:
        return {"type": "capacity", "inflight": self._most() * (1 + _headroom(self.headroom))}

    def saturation(self) -> Data:
        """`flow.saturation`."""
        return {"waiting": ANY_WAITING, "kv": ANY_KV, "inflight": self._most()}

    def _most(self) -> int:
        if self.concurrency_mode != "requests" or self.mode != "requests":
            raise Refused(
                "concurrencyMode: tokens in flight are no limit here; use requests, or "
                "utilization-detector"
            )
        if not 1 <= self.max_concurrency <= 1 << 30:
            raise Refused("maxConcurrency: must be from 1 to 2^30")
        return self.max_concurrency


def _headroom(value: float) -> float:
    if not 0 <= value <= 1000:
        raise Refused("headroom: must be 0 or more")
    return value


class _Picker(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.PICKER})
    type: ClassVar[str]
    max_num_of_endpoints: int = 1

    def picker(self) -> Data:
        fallbacks = self.max_num_of_endpoints - 1
        if not 0 <= fallbacks <= MOST_FALLBACKS:
            raise Refused(f"maxNumOfEndpoints: must be from 1 to {MOST_FALLBACKS + 1}")
        return {"type": self.type, "fallbacks": fallbacks}


class MaxScore(_Picker, frozen=True):
    type: ClassVar = "maxScore"


class WeightedRandom(_Picker, frozen=True):
    type: ClassVar = "weightedRandom"


class Random(_Picker, frozen=True):
    type: ClassVar = "random"


FILTERS: dict[str, type[Plugin]] = {
    "prefix-cache-affinity-filter": PrefixAffinity,
    "label-selector-filter": LabelSelector,
    "by-label": ByLabel,
    "by-label-filter": ByLabel,
    "by-label-selector": LabelSelector,
    "decode-filter": DecodeRole,
    "prefill-filter": PrefillRole,
    "encode-filter": EncodeRole,
    "session-affinity-filter": SessionAffinity,
    "header-based-testing-filter": HeaderBased,
    "utilization-detector": Utilization,
    "concurrency-detector": Concurrency,
}
PICKERS: dict[str, type[Plugin]] = {
    "max-score-picker": MaxScore,
    "weighted-random-picker": WeightedRandom,
    "random-picker": Random,
}
