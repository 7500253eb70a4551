"""What is read of flow control when a metrics page is asked for, and how long requests waited."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from picker.exposition import Histogram, Spec, write

if TYPE_CHECKING:
    from picker.fairness import BandNumbers
    from picker.fairness_view import FairnessView

MAX_PRIORITIES = 512  # the configuration has 201 at most, and Kubernetes any number
_PRIORITY = ("priority",)
_WAITS = ".005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 30 60 120 300 600"

BANDS = {  # by attribute of BandNumbers; priorities that were seen lately, which are few
    "waiting": Spec("gauge", "warmpath_flow_waiting_requests", _PRIORITY, "Requests that wait."),
    "waiting_bytes": Spec(
        "gauge", "warmpath_flow_waiting_bytes", _PRIORITY, "Bytes of their bodies."
    ),
    "waiting_tenants": Spec(
        "gauge", "warmpath_flow_waiting_tenants", _PRIORITY, "Tenants whose requests wait."
    ),
    "spread": Spec(
        "gauge",
        "warmpath_flow_counter_spread",
        _PRIORITY,
        "Greatest difference between virtual token counters of tenants that wait.",
    ),
    "bound": Spec(
        "gauge",
        "warmpath_flow_service_bound",
        _PRIORITY,
        "What that cannot exceed, nor the service gap twice; missing where a pod does not tell "
        "the size of its KV cache.",
    ),
    "gap": Spec(
        "gauge",
        "warmpath_flow_service_gap",
        _PRIORITY,
        "Greatest difference of service in the last minute, of tenants that waited all the time.",
    ),
    "jain": Spec(
        "gauge", "warmpath_flow_fairness_jain", _PRIORITY, "Jain's index of the same service."
    ),
}
LIFTS = Spec(
    "counter",
    "warmpath_flow_lifts_total",
    _PRIORITY,
    "Tenants that came back, and were lifted to the others.",
)
WAITED = Spec(
    "histogram",
    "warmpath_flow_wait_seconds",
    _PRIORITY,
    "Time in the queue of requests that went; 0 of those that did not have to wait.",
    _WAITS,
)
PASSED = Spec(
    "counter", "warmpath_flow_passed_total", (), "Requests that went without having to wait."
)
DISPATCHED = Spec("counter", "warmpath_flow_dispatched_total", (), "Requests that waited and went.")
RUNNING = Spec("gauge", "warmpath_flow_running_requests", (), "Requests that went and still run.")
SATURATION = Spec(
    "gauge", "warmpath_flow_saturation", (), "How busy the pods are on average; 1 is saturated."
)


class Waits:
    """How long requests waited, by priority; of these MAX_PRIORITIES at most are told."""

    def __init__(self) -> None:
        self.by_priority: dict[int, Histogram] = {}

    def observe(self, priority: int, seconds: float) -> None:
        histogram = self.by_priority.get(priority)
        if histogram is None:
            if len(self.by_priority) >= MAX_PRIORITIES:
                return
            histogram = self.by_priority[priority] = Histogram(WAITED.bounds)
        histogram.observe(seconds)


class FlowGauges:
    """Writes them; keeps nothing."""

    def __init__(self, view: FairnessView) -> None:
        self._view = view

    def page(self) -> Iterator[str]:
        """All of it as Prometheus' text, in small pieces."""
        flow = self._view.flow
        bands = self._view.bands(most_tenants=0)
        for attribute, spec in BANDS.items():
            rows = [((str(band.priority),), _value(band, attribute)) for band in bands]
            yield from write(spec, [row for row in rows if isfinite(row[1])])
        yield from write(LIFTS, [((str(band.priority),), band.vtc.lifts) for band in flow.bands])
        waits = sorted(self._view.waits.by_priority.items())
        yield from write(WAITED, [((str(priority),), histogram) for priority, histogram in waits])
        yield from write(PASSED, [((), flow.passed)])
        yield from write(DISPATCHED, [((), flow.dispatched)])
        yield from write(RUNNING, [((), flow.running)])
        yield from write(SATURATION, [((), self._view.saturation)])


def _value(band: BandNumbers, attribute: str) -> float:
    value: float = getattr(band, attribute)
    return value
