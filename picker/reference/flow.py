"""Flow control and admission of the reference picker in our terms.

Its saturation is the mean of all pods'; ours is each pod's own, so that no full pod hides behind
idle ones. Its queue limits are for each priority band; ours are for all together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from picker.document import Place
from picker.reference.others import DEADLINE, STRICT
from picker.reference.plugin import Data
from picker.reference.schema import Band, FlowControl

# The names that each group's picker reads, its own first.
HEADERS = {
    False: ("x-gateway-inference-fairness-id", "x-gateway-inference-objective", "x-slo-ttft-ms"),
    True: (
        "x-llm-d-inference-fairness-id,x-gateway-inference-fairness-id",
        "x-llm-d-inference-objective,x-gateway-inference-objective",
        "x-llm-d-slo-ttft-ms,x-slo-ttft-ms",
    ),
}
BAND_BYTES, BAND_REQUESTS = 10**9, 5000  # of one band, unless it says otherwise
LLM_D_TTL = 60.0
LONGEST = 168 * 3600.0
MOST_BYTES, MOST_REQUESTS = 1000 << 30, 1 << 30

Note = Callable[[Place, str], None]
"""Takes what is ignored, and where it stands."""

TypeOf = Callable[[str, Place], str]
"""A policy's name, or a type itself, and where it stands -> its type."""


class Told(Protocol):
    """What a saturation detector says."""

    def saturation(self) -> Data: ...


REWRITE_HEADERS = ["x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite"]
ADMISSION: Data = {
    "rewriteHeaders": REWRITE_HEADERS,
    "identity": {"header": HEADERS[False][0]},
    "flow": {"enabled": True, "queue": False, "objectiveHeader": HEADERS[False][1]},
}
"""The reference picker without its feature gate: nobody waits, and requests of a priority below 0
are refused while pods are busy."""


def admission(detector: Told, *, llm_d: bool) -> Data:
    """Without the gate."""
    fairness, objective, _ = HEADERS[llm_d]
    flow = {
        **ADMISSION["flow"],
        "objectiveHeader": objective,
        "saturation": detector.saturation(),
    }
    return {**ADMISSION, "identity": {"header": fairness}, "flow": flow}


def flow_control(
    told: FlowControl,
    detector: Told,
    note: Note,
    fairness: TypeOf,
    ordering: TypeOf,
    *,
    llm_d: bool,
) -> Data:
    """With the gate."""
    top: Place = ("flowControl",)
    bands: list[tuple[Place, Band]] = [
        ((*top, "defaultPriorityBand"), told.default_priority_band),
        ((*top, "defaultNegativePriorityBand"), told.default_negative_priority_band),
    ]
    bands += [((*top, "priorityBands", i), each) for i, each in enumerate(told.priority_bands)]
    fair = [fairness(band.fairness_policy_ref, (*p, "fairnessPolicyRef")) for p, band in bands]
    order = [ordering(band.ordering_policy_ref, (*p, "orderingPolicyRef")) for p, band in bands]
    named = {kind for kind in fair if kind}
    if STRICT in named and len(named) > 1:
        note(top, "tenants share by tokens at every priority, also where fairness is strict")
    by_deadline = DEADLINE in order
    if by_deadline and any(kind not in ("", DEADLINE) for kind in order):
        note(top, "requests are ordered by deadline at every priority")
    flow: Data = {
        "enabled": True,
        "sheddable": "queue",  # in a band of their own, the lowest
        "scaleFromZero": "queue",
        "order": "deadline" if by_deadline else "fcfs",
        "ttl": _ttl(told, note, llm_d=llm_d),
        "tenantRequests": 0,
        "tenantBytes": 0,
        "saturation": detector.saturation(),
        **_limits(told, bands, note),
    }
    if told.enable_eviction:
        note((*top, "enableEviction"), "a request that has gone to a pod is never taken back")
    # Strict fairness is none: the first that came goes, whoever it is from.
    tenant, objective, deadline = HEADERS[llm_d]
    flow |= {"objectiveHeader": objective, "deadlineHeader": deadline}
    header = "" if named == {STRICT} else tenant
    return {"rewriteHeaders": REWRITE_HEADERS, "identity": {"header": header}, "flow": flow}


def _ttl(told: FlowControl, note: Note, *, llm_d: bool) -> float:
    ttl: float = told.default_request_ttl
    if ttl < 0:
        ttl = LLM_D_TTL if llm_d else 0.0  # 0: until the client leaves
    if ttl > LONGEST:
        note(("flowControl", "defaultRequestTTL"), "no request waits for longer than 168h")
        ttl = LONGEST
    without = told.no_endpoint_request_ttl
    if without >= 0 and without != ttl:
        what = "requests wait as long as defaultRequestTTL, with pods and without"
        note(("flowControl", "noEndpointRequestTTL"), what)
    return ttl


def _limits(told: FlowControl, bands: list[tuple[Place, Band]], note: Note) -> Data:
    """Of the whole queue; without one, those of the band that allows most."""
    default = told.default_priority_band
    requests = int(told.max_requests) or int(default.max_requests) or BAND_REQUESTS
    size = int(told.max_bytes) or int(default.max_bytes) or BAND_BYTES
    for place, band in bands:
        for key, most, of_all in (
            ("maxRequests", int(band.max_requests), requests),
            ("maxBytes", int(band.max_bytes), size),
        ):
            if most and most != of_all:
                what = f"queue limits are for all priorities together: {of_all} holds"
                note((*place, key), what)
    return {"maxRequests": min(requests, MOST_REQUESTS), "maxBytes": min(size, MOST_BYTES)}
