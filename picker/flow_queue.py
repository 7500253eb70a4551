"""All that waits in flow control: its bands, its bounds, and who gives way when it is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from picker.config import Flow as Settings
from picker.cost import Cost
from picker.vtc import VirtualTokenCounter
from picker.waiting import Amount, Band, TenantQueue, Visit

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
        self._by_tenant: dict[str, Amount] = {}
        self._number = 0  # of the last visit that came
        self.bands: dict[int, Band] = {}  # by priority, of which visits were seen lately
        self.amount = Amount()

    def first(self) -> Visit | None:
        """The one to serve next."""
        return self._busy[-1].first() if self._busy else None

    def add(self, visit: Visit) -> int:
        """A visit begins to wait. Returns its number, which rises from one to the next."""
        band = visit.band = self.band(visit.priority)
        if not band.amount.requests:
            self._busy.append(band)
            self._busy.sort(key=_priority)
        self._number += 1
        band.add(visit, self._number)
        self.amount.add(visit)
        held = self._by_tenant.get(visit.tenant)
        if held is None:
            held = self._by_tenant[visit.tenant] = Amount()
        held.add(visit)
        return self._number

    def remove(self, visit: Visit, *, dispatch: bool) -> None:
        """A visit waits no longer; `dispatch`: it goes, and its tenant is charged."""
        band = visit.band
        assert band is not None
        if dispatch:
            band.dispatch(visit)
        else:
            band.remove(visit)
        if not band.amount.requests:
            self._busy.remove(band)
        self.amount.take(visit)
        held = self._by_tenant[visit.tenant]
        held.take(visit)
        if not held.requests:
            del self._by_tenant[visit.tenant]

    def band(self, priority: int) -> Band:
        """That of a priority, whether something waits there or not."""
        band = self.bands.get(priority)
        if band is None:
            if len(self.bands) >= MAX_BANDS:
                idle = (band for band in self.bands.values() if not band.amount.requests)
                if (forgotten := next(idle, None)) is not None:
                    del self.bands[forgotten.priority]
            vtc = VirtualTokenCounter(self._cost, self._weight)
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
        settings = self._settings
        held = self._by_tenant.get(visit.tenant, _NOTHING)
        lack = _lack(held, visit, settings.tenant_requests, settings.tenant_bytes)
        if lack is None:
            return None
        lower = [
            queue
            for band in self._busy
            if band.priority < visit.priority
            and (queue := band.queues.get(visit.tenant)) is not None
        ]
        if _enough(lack, (queue.amount for queue in lower)):
            return lower[0].newest()
        raise Full("tenant_queue_full", "too much of this tenant waits already")

    def _victim_of_all(self, visit: Visit) -> Visit | None:
        settings = self._settings
        lack = _lack(self.amount, visit, settings.max_requests, settings.max_bytes)
        if lack is None:
            return None
        lower = [band for band in self._busy if band.priority < visit.priority]
        if _enough(lack, (band.amount for band in lower)):
            return lower[0].longest().newest()
        rival = self._longest_rival(visit)
        if rival is not None:
            newest = rival.newest()
            if _enough(lack, [Amount(1, newest.size)]):
                return newest
        raise Full("queue_full", "too many requests wait")

    def _longest_rival(self, visit: Visit) -> TenantQueue | None:
        """The longest queue at a visit's priority, if its own tenant's is shorter with it."""
        band = self.bands.get(visit.priority)
        if band is None or not band.amount.requests:
            return None
        longest, own = band.longest(), band.queues.get(visit.tenant)
        mine = 0 if own is None else own.amount.requests
        return longest if longest.amount.requests > mine + 1 else None


_NOTHING = Amount()


def _priority(band: Band) -> int:
    return band.priority


def _lack(held: Amount, visit: Visit, requests: int, size: int) -> Amount | None:
    """How much of what is held is too much for a visit to come; a limit of 0 is none."""
    lacking = held.requests + 1 - requests if requests else 0
    too_large = held.size + visit.size - size if size else 0
    if lacking <= 0 and too_large <= 0:
        return None
    return Amount(max(0, lacking), max(0, too_large))


def _enough(lack: Amount, amounts: Iterable[Amount]) -> bool:
    """Whether these would make up for what lacks."""
    requests = size = 0
    for amount in amounts:
        requests += amount.requests
        size += amount.size
    return requests >= lack.requests and size >= lack.size
