"""Plugins that need no equivalent, and those that have none."""

from __future__ import annotations

from typing import Any, ClassVar

from picker.reference.plugin import Plugin, Refused, Role


class _Handler(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.HANDLER})


class _Producer(Plugin, frozen=True):
    """Counts or knows what is counted and known here anyway; parameters do not matter."""

    roles: ClassVar = frozenset({Role.PRODUCER})
    any_parameters: ClassVar[bool] = True


class _Tokens(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.PRODUCER})
    any_parameters: ClassVar[bool] = True

    def notes(self) -> list[str]:
        return ["its parameters are ignored: with KV events, pods are asked for their tokens"]


class _Fairness(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.FAIRNESS})
    any_parameters: ClassVar[bool] = True


class _Ordering(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.ORDERING})
    any_parameters: ClassVar[bool] = True


class _StaticLimit(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.USAGE_LIMIT})
    threshold: Any = 1.0

    def settings(self) -> dict[str, Any]:
        if self.threshold != 1:
            raise Refused("threshold: lower the saturation detector's thresholds instead")
        return {}


class _Parser(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.PARSER})
    any_parameters: ClassVar[bool] = True


class _Passthrough(_Parser, frozen=True):
    def notes(self) -> list[str]:
        return ["requests of APIs that are known here are read all the same, and sent as they came"]


class _Eviction(Plugin, frozen=True):
    roles: ClassVar = frozenset()
    any_parameters: ClassVar[bool] = True

    def notes(self) -> list[str]:
        return ["it is ignored: a request that has gone to a pod is never taken back"]


STRICT, ROUND_ROBIN = "global-strict-fairness-policy", "round-robin-fairness-policy"
DEADLINE = "slo-deadline-ordering-policy"

OTHERS: dict[str, type[Plugin]] = {
    "single-profile-handler": _Handler,
    "inflight-load-producer": _Producer,
    "burst-prefix-cache-producer": _Producer,
    "token-producer": _Tokens,
    "tokenizer": _Tokens,  # its older name
    STRICT: _Fairness,
    ROUND_ROBIN: _Fairness,
    "program-aware-fairness-policy": _Fairness,
    "fcfs-ordering-policy": _Ordering,
    "edf-ordering-policy": _Ordering,
    DEADLINE: _Ordering,
    "static-usage-limit-policy": _StaticLimit,
    "eviction-sheddable-filter": _Eviction,
    "eviction-priority-then-time-ordering": _Eviction,
    "openai-parser": _Parser,
    "anthropic-parser": _Parser,
    "vllm-http-parser": _Parser,
    "passthrough-parser": _Passthrough,
}

_DISAGGREGATED = (
    "prefill and decode on different pods are not supported: keep one profile, with decode-filter "
    "where pods are labelled by role"
)
_PREDICTED = (
    "latencies are not predicted here: use prefix-cache-affinity-filter with token-load-scorer, "
    "or leave the file out for Warmpath's own policy"
)
_OWN_FILTER = "use label-selector-filter, or a filter of your own in warmpath.yaml"
_OWN_SCORER = "use header-label-affinity-scorer, or a scorer of your own in warmpath.yaml"

REFUSED: dict[str, str] = {  # type -> why, and what to do
    **dict.fromkeys(
        (
            "disagg-profile-handler",
            "pd-profile-handler",
            "prefix-based-pd-decider",
            "always-disagg-pd-decider",
            "always-disagg-multimodal-decider",
            "disagg-headers-handler",
            "prefill-header-handler",
        ),
        _DISAGGREGATED,
    ),
    **dict.fromkeys(
        (
            "predicted-latency-producer",
            "latency-scorer",
            "latency-slo-admitter",
            "slo-headroom-tier-filter",
            "slo-aware-routing",
            "slo-aware-profile-handler",
        ),
        _PREDICTED,
    ),
    "data-parallel-profile-handler": (
        "each rank is an endpoint of its own: leave it out and list the ranks' ports as "
        "targetPorts of the pool"
    ),
    "header-profile-handler": "there is one profile: keep the one that these pods need",
    "utilization-filter": "refer to a utilization-detector in the profile instead",
    "endpoint-attribute-filter": _OWN_FILTER,
    "topology-affinity-filter": _OWN_FILTER,
    "endpoint-attribute-scorer": _OWN_SCORER,
    "topology-affinity-scorer": _OWN_SCORER,
    "mm-embeddings-cache-scorer": "encoders' caches are not known here: leave it out",
    "mm-embeddings-cache-producer": "encoders' caches are not known here: leave it out",
    "p2p-source-producer": "pods are not told of each other's caches: leave it out",
    "agent-identity": "use a header or a JWT's claim for `identity` in warmpath.yaml",
    "session-id-producer": "name the header in the session plugin's sessionIdConfig instead",
    "probabilistic-admitter": "use the feature gate flowControl, which queues instead of refusing",
    "request-attribute-reporter": (
        "nothing is written into dynamic metadata: leave it out; token usage is in the metrics and "
        "in quotas"
    ),
    "destination-endpoint-served-verifier": (
        "no response header is written: leave it out; `warmpath explain` tells who served"
    ),
    "vllmgrpc-parser": "requests come as JSON over HTTP: leave it out and use openai-parser",
    "sglanggrpc-parser": "requests come as JSON over HTTP: leave it out and use openai-parser",
    "priority-holdback-policy": "no capacity is held back: leave it out",
    "priority-holdback-usage-limit-policy": "no capacity is held back: leave it out",
    "soft-reflective-ceiling-policy": "no capacity is held back: leave it out",
    "soft-reflective-ceiling-usage-limit-policy": "no capacity is held back: leave it out",
    "file-discovery": "list the pods in warmpath.yaml, as pool.endpoints",
}
