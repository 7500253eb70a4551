"""All that waits in flow control: its bands, its bounds, and who gives way when it is full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from picker.config import Flow as Settings
from picker.cost import Cost
from picker.vtc import VirtualTokenCounter
from picker.waiting import Band, Stage, TenantQueue, Visit

MAX_BANDS = 32  # priorities whose counters are kept while nothing waits there


class Full(Exception):
    """There is no place for a visit, and nobody has to give way to it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FlowQueue:
    """Visits that wait. Operations are O(log n) in these, and O(n) in the few priorities."""

    def __init__(self, settings: Settings, cost: Cost, weight: Callable[[str], float]) -> None:
        self._settings = settings
        self._cost = cost
        self._weight = weight
        self._busy: list[Band] = []  # in which something waits, the lowest first
        self._number = 0  # of the last visit that came
        self.bands: dict[int, Band] = {}  # by priority, of which visits were seen lately
        self.requests = 0
        self.size = 0  # bytes
        # Told of each charge: the priority, the tenant, by how much its service grew, and whether
        # that is of a request that goes just now.
        self.on_charge: Callable[[int, str, float, bool], None] | None = None

    def reconfigure(self, settings: Settings) -> None:
        """Other limits hold for those who come; who waits already stays."""
        self._settings = settings

    def first(self) -> Visit | None:
        """The one to serve next."""
        return self._busy[-1].first() if self._busy else None

    def add(self, visit: Visit) -> None:
        """A visit begins to wait."""
        band = visit.band = self.band(visit.priority)
        if not band.requests:
            self._busy.append(band)
            self._busy.sort(key=_priority)
        visit.stage = Stage.WAITING
        self._number += 1
        band.add(visit, self._number)
        self.requests += 1
        self.size += visit.size

    def remove(self, visit: Visit, stage: Stage) -> None:
        """A visit waits no longer; if it is sent to a pod, its tenant is charged."""
        band = visit.band
        assert band is not None
        if stage is Stage.SENT:
            band.charge(visit)
        visit.stage = stage
        band.remove(visit)
        if not band.requests:
            self._busy.remove(band)
        self.requests -= 1
        self.size -= visit.size

    def band(self, priority: int) -> Band:
        """That of a priority, whether something waits there or not."""
        band = self.bands.get(priority)
        if band is None:
            if len(self.bands) >= MAX_BANDS:
                idle = (band for band in self.bands.values() if not band.requests)
                if (forgotten := next(idle, None)) is not None:
                    del self.bands[forgotten.priority]
            vtc = VirtualTokenCounter(self._cost, self._weight)
            if self.on_charge is not None:
                vtc.on_charge = partial(self.on_charge, priority)
            band = Band(priority, vtc, by_deadline=self._settings.order == "deadline")
            self.bands[priority] = band
        return band

    def victim(self, visit: Visit) -> Visit | None:
        """Who must give way, one after the other, before a visit can be added; None: nobody.

        It is the newest of the lowest priority below its own; or, at its own, the newest of the
        tenant that has most there, if that has more than its own tenant. Without that, one tenant
        could fill the queue and shut the others out.

        Raises:
            Full: that would not be enough.
        """
        of_all, of_tenant = self._victim_of_all(visit), self._victim_of_tenant(visit)
        return of_tenant or of_all  # both are known to do, so nobody gives way in vain

    def _victim_of_tenant(self, visit: Visit) -> Visit | None:
        settings, tenant = self._settings, visit.tenant
        if not (
            _over(self.requests + 1, settings.tenant_requests)
            or _over(self.size + visit.size, settings.tenant_bytes)
        ):
            return None  # not even if all that waits were this tenant's
        requests, size = 1, visit.size
        for band in self._busy:
            queue = band.queues.get(tenant)
            if queue is not None:
                requests += queue.requests
                size += queue.size
        requests = _over(requests, settings.tenant_requests)
        size = _over(size, settings.tenant_bytes)
        if not requests and not size:
            return None
        lower = [
            queue
            for band in self._busy
            if band.priority < visit.priority and (queue := band.queues.get(tenant)) is not None
        ]
        if _enough(requests, size, lower):
            return lower[0].newest()
        raise Full("tenant_queue_full", "too much of this tenant waits already")

    def _victim_of_all(self, visit: Visit) -> Visit | None:
        requests = _over(self.requests + 1, self._settings.max_requests)
        size = _over(self.size + visit.size, self._settings.max_bytes)
        if not requests and not size:
            return None
        lower = [band for band in self._busy if band.priority < visit.priority]
        if _enough(requests, size, lower):
            return lower[0].longest().newest()
        rival = self._newest_rival(visit)
        if rival is not None and requests <= 1 and size <= rival.size:
            return rival
        raise Full("queue_full", "too many requests wait")

    def _newest_rival(self, visit: Visit) -> Visit | None:
        """Of the longest queue at a visit's priority, if its own tenant's is shorter with it."""
        band = self.bands.get(visit.priority)
        if band is None or not band.requests:
            return None
        longest, own = band.longest(), band.queues.get(visit.tenant)
        mine = 0 if own is None else own.requests
        return longest.newest() if longest.requests > mine + 1 else None


def _priority(band: Band) -> int:
    return band.priority


def _over(amount: int, most: int) -> int:
    """By how much an amount is too large; a limit of 0 is none."""
    return amount - most if 0 < most < amount else 0


def _enough(requests: int, size: int, those: list[Band] | list[TenantQueue]) -> bool:
    """Whether these have so many requests and bytes."""
    for each in those:
        requests -= each.requests
        size -= each.size
    return requests <= 0 and size <= 0
