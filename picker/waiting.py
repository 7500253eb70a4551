"""One band of the flow queue: requests of equal priority, waiting by tenant.

Which tenant is next is VTC's to say; which of its requests, its queue's. Every operation takes
O(log n), wherever in the queue a request is.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from picker.vtc import Account, VirtualTokenCounter

SLACK = 16  # entries of a heap for requests that left, which are borne before it is made anew


class Stage(Enum):
    """How far a visit has come. It only goes on, and skips stages."""

    NEW = auto()
    WAITING = auto()
    SENT = auto()  # it may go to a pod, and counts there before the load knows of it
    PICKED = auto()  # its pod is known, and credited
    OVER = auto()


@dataclass(slots=True, eq=False)
class Visit:
    """One request in flow control, from its arrival to its end."""

    tenant: str
    priority: int = 0  # higher ones go first
    prompt_tokens: int = 0
    size: int = 0  # bytes that it holds while it waits
    expected: int = 0  # output tokens, charged when it is dispatched
    most_output: int | None = None  # tokens, if the request limits them
    deadline: float = inf  # by the flow's clock: orders a tenant's requests
    arrived: float = 0.0
    waited: float | None = None  # seconds, once it was dispatched; 0.0 when it did not have to
    stage: Stage = Stage.NEW
    account: Account | None = None  # once it was dispatched
    future: asyncio.Future[None] | None = None  # while it waits
    band: Band | None = None


@dataclass(slots=True)
class Amount:
    """So many requests that wait, of so many bytes."""

    requests: int = 0
    size: int = 0

    def add(self, visit: Visit) -> None:
        self.requests += 1
        self.size += visit.size

    def take(self, visit: Visit) -> None:
        self.requests -= 1
        self.size -= visit.size


class TenantQueue:
    """Requests of one tenant: first come first served, or the earliest deadline first."""

    __slots__ = ("_by_deadline", "_visits", "amount")

    def __init__(self, *, by_deadline: bool) -> None:
        self._visits: OrderedDict[Visit, None] = OrderedDict()  # as they came
        # (deadline, arrival) of each, and of some that have left.
        self._by_deadline: list[tuple[float, int, Visit]] | None = [] if by_deadline else None
        self.amount = Amount()

    def add(self, visit: Visit, number: int) -> None:
        """`number` rises from visit to visit."""
        self._visits[visit] = None
        self.amount.add(visit)
        heap = self._by_deadline
        if heap is not None:
            heapq.heappush(heap, (visit.deadline, number, visit))
            if len(heap) > 2 * len(self._visits) + SLACK:
                heap[:] = [entry for entry in heap if entry[2] in self._visits]
                heapq.heapify(heap)

    def remove(self, visit: Visit) -> None:
        del self._visits[visit]
        self.amount.take(visit)

    def first(self) -> Visit:
        """The one to serve next."""
        heap = self._by_deadline
        if heap is None:
            return next(iter(self._visits))
        while heap[0][2] not in self._visits:
            heapq.heappop(heap)
        return heap[0][2]

    def newest(self) -> Visit:
        return next(reversed(self._visits))


@dataclass(slots=True, eq=False)
class Band:
    """All that waits at one priority, with the counters of its tenants."""

    priority: int
    vtc: VirtualTokenCounter
    by_deadline: bool = False
    queues: dict[str, TenantQueue] = field(default_factory=dict)  # of tenants that wait
    amount: Amount = field(default_factory=Amount)
    # Tenants by how many of their requests wait. These change by one, and so does their maximum.
    _tenants: dict[int, OrderedDict[str, None]] = field(default_factory=dict)
    _most: int = 0

    def add(self, visit: Visit, number: int) -> None:
        """A request begins to wait; `number` rises from one to the next."""
        tenant = visit.tenant
        queue = self.queues.get(tenant)
        if queue is None:
            queue = self.queues[tenant] = TenantQueue(by_deadline=self.by_deadline)
            self.vtc.arrive(tenant)
        queue.add(visit, number)
        self.amount.add(visit)
        self._moved(tenant, queue.amount.requests - 1, queue.amount.requests)

    def first(self) -> Visit | None:
        """The one to serve next."""
        tenant = self.vtc.least()
        return None if tenant is None else self.queues[tenant].first()

    def dispatch(self, visit: Visit) -> None:
        """It goes, and its tenant is charged."""
        visit.account = self.vtc.dispatch(visit.tenant, visit.prompt_tokens, visit.expected)
        self.remove(visit)

    def pass_by(self, visit: Visit) -> None:
        """A request that does not have to wait goes, and its tenant is charged."""
        self.vtc.arrive(visit.tenant)
        visit.account = self.vtc.dispatch(visit.tenant, visit.prompt_tokens, visit.expected)
        self.vtc.leave(visit.tenant)

    def remove(self, visit: Visit) -> None:
        """It waits no longer."""
        tenant = visit.tenant
        queue = self.queues[tenant]
        queue.remove(visit)
        self.amount.take(visit)
        left = queue.amount.requests
        self._moved(tenant, left + 1, left)
        if not left:
            del self.queues[tenant]
            self.vtc.leave(tenant)

    def longest(self) -> TenantQueue:
        """A queue than which no other is longer."""
        return self.queues[next(iter(self._tenants[self._most]))]

    def _moved(self, tenant: str, before: int, after: int) -> None:
        tenants = self._tenants
        if before:
            peers = tenants[before]
            del peers[tenant]
            if not peers:
                del tenants[before]
        if after:
            others = tenants.get(after)
            if others is None:
                others = tenants[after] = OrderedDict()
            others[tenant] = None
        if after > self._most or (before == self._most and before not in tenants):
            self._most = after
