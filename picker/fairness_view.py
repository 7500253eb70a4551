"""Flow control for people: how fair it is, what waits, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from time import monotonic
from typing import Any

from picker.config import Flow as Settings
from picker.fairness import BandNumbers, FairnessWatch
from picker.flow import Flow, token_cost
from picker.flow_gauges import Waits
from picker.gate import Gate
from picker.load import Load
from picker.pool import Pool


class FairnessView:
    """Looks at the flow control of a gate."""

    def __init__(self, gate: Gate, flow: Flow, pool: Pool, load: Load, settings: Settings) -> None:
        self.flow = flow
        self._gate = gate
        self._pool = pool
        self._load = load
        self._watch = FairnessWatch(flow, token_cost(settings), monotonic)

    @property
    def waits(self) -> Waits:
        return self._gate.waits

    @property
    def saturation(self) -> float:
        """How busy the pods are on average; 1 is saturated."""
        saturation = self._gate.saturation
        return 1.0 if saturation is None else saturation.level

    def bands(self, most_tenants: int) -> list[BandNumbers]:
        """The highest priority first, each with so many of its tenants at most."""
        return self._watch.look(self._pod_tokens(), most_tenants)

    def page(self, most_tenants: int) -> dict[str, Any]:
        """All of it, to be written as JSON. `null`: not known."""
        return {
            "saturation": self.saturation,
            "running": self.flow.running,
            "passed": self.flow.passed,
            "dispatched": self.flow.dispatched,
            "priorities": [_band(band) for band in self.bands(most_tenants)],
        }

    @property
    def _longest_queue(self) -> int:
        saturation = self._gate.saturation
        return 0 if saturation is None else saturation.settings.waiting

    def _pod_tokens(self) -> float:
        """What the pods can hold of our requests at once: their KV caches, and their queues as long
        as they may be, of the longest prompts that came. NaN where a pod does not tell its cache.
        """
        caches = [self._load.describe(pod).kv_tokens for pod in self._pool.endpoints.values()]
        told = [cache for cache in caches if cache is not None]
        if len(told) < len(caches):
            return nan
        queued = len(caches) * self._longest_queue * self._gate.longest_prompt
        return float(sum(told) + queued)


def _band(band: BandNumbers) -> dict[str, Any]:
    return {
        "priority": band.priority,
        "waiting": band.waiting,
        "waitingBytes": band.waiting_bytes,
        "waitingTenants": band.waiting_tenants,
        "counterSpread": band.spread,
        "serviceBound": band.bound if isfinite(band.bound) else None,
        "serviceGap": band.gap,
        "jain": band.jain,
        "tenants": _tenants(band),
    }


def _tenants(band: BandNumbers) -> Sequence[dict[str, Any]]:
    return [
        {
            "tenant": each.tenant,
            "weight": each.weight,
            "waiting": each.waiting,
            "waitingBytes": each.waiting_bytes,
            "running": each.running,
            "counter": each.counter,
            "service": each.service,
            "lifts": each.lifts,
            "lifted": each.lifted,
        }
        for each in band.tenants
    ]
