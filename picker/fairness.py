"""How fair the flow queue is, in numbers for people: what each tenant got, and the proved bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from picker.cost import TokenCost
from picker.flow import Flow
from picker.vtc import Counter
from picker.waiting import Band

WINDOW = 60.0  # seconds that service is compared over, at least


@dataclass(frozen=True, slots=True)
class TenantNumbers:
    """One tenant at one priority. Service is cost over weight."""

    tenant: str
    weight: float
    counter: float  # virtual tokens: whose is smallest goes next
    service: float  # in all
    lifts: int  # how often it came back and was lifted to the others
    lifted: float  # by so much in all
    running: int  # requests that went and have not ended
    waiting: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class BandNumbers:
    """One priority."""

    priority: int
    waiting: int  # requests
    waiting_bytes: int
    waiting_tenants: int
    spread: float  # greatest difference between counters of tenants that wait
    bound: float  # U: what the spread cannot exceed, and the gap not twice
    gap: float  # greatest difference of service, among tenants that waited all the time
    jain: float  # Jain's index of their service: 1 is equal, 1 / tenants is all for one
    tenants: Sequence[TenantNumbers]  # those who wait first, then by service


class FairnessWatch:
    """Looks at a flow now and then."""

    def __init__(self, flow: Flow, cost: TokenCost, clock: Callable[[], float]) -> None:
        self._flow = flow
        self._cost = cost
        self._clock = clock
        self._since = clock()
        # By priority and tenant, of those that waited at `_since`: which of its arrivals it was,
        # and its service until then.
        self._before: dict[tuple[int, str], tuple[int, float]] = {}

    def look(self, pod_tokens: float, most_tenants: int = 1000) -> list[BandNumbers]:
        """The numbers now, the highest priority first.

        O(tenants that wait) without tenants to tell, else O(tenants).

        Service is compared since a look that was at least `WINDOW` ago, where there was one.

        Args:
            pod_tokens: that the KV caches of all pods hold, and their queues; NaN: not known.
            most_tenants: of each priority, that are told.
        """
        bands = sorted(self._flow.bands, key=lambda band: -band.priority)
        numbers = [self._band(band, pod_tokens, most_tenants) for band in bands]
        now = self._clock()
        if now - self._since >= WINDOW or not self._before:
            self._since = now
            self._before = {
                (band.priority, counter.tenant): (counter.arrivals, counter.service)
                for band in bands
                for counter in _waiting(band)
            }
        return numbers

    def _band(self, band: Band, pod_tokens: float, most_tenants: int) -> BandNumbers:
        waiting = _waiting(band)
        least_weight = min((band.vtc.weight(counter.tenant) for counter in waiting), default=1.0)
        values = [counter.value for counter in waiting]
        got = []  # since the window began, by those that have waited since before that
        for counter in waiting:
            before = self._before.get((band.priority, counter.tenant))
            if before is not None and before[0] == counter.arrivals:
                got.append(counter.service - before[1])
        told = nlargest(most_tenants, band.vtc, _rank) if most_tenants else []
        tenants = []
        for counter in told:
            queue = band.queues.get(counter.tenant)
            tenants.append(
                TenantNumbers(
                    counter.tenant,
                    band.vtc.weight(counter.tenant),
                    counter.value,
                    counter.service,
                    counter.lifts,
                    counter.lifted,
                    counter.open,
                    0 if queue is None else queue.requests,
                    0 if queue is None else queue.size,
                )
            )
        return BandNumbers(
            band.priority,
            band.requests,
            band.size,
            len(waiting),
            max(values) - min(values) if values else 0.0,
            self._cost.most(pod_tokens, self._flow.running) / least_weight,
            max(got) - min(got) if got else 0.0,
            jain(got),
            tenants,
        )


def _waiting(band: Band) -> list[Counter]:
    """Counters of the tenants that wait."""
    return [counter for tenant in band.queues if (counter := band.vtc.find(tenant)) is not None]


def _rank(counter: Counter) -> tuple[bool, float]:
    return counter.waiting, counter.service


def jain(service: Sequence[float]) -> float:
    """Jain's index of fairness: (Σx)² / (n Σx²); 1 for nobody, and where nobody got anything.

    Source: Jain, Chiu and Hawe, DEC-TR-301 (1984).
    """
    squares = sum(each * each for each in service)
    return sum(service) ** 2 / (len(service) * squares) if squares else 1.0
