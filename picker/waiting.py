"""One band of the flow queue: requests of equal priority, waiting by tenant.

Which tenant is next is VTC's to say; which of its requests, its queue's. Every operation takes
O(log n), amortised, wherever in the queue a request is: one that leaves is only counted off, and
passed over when its turn comes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from picker.vtc import Account, VirtualTokenCounter

SLACK = 16  # entries for what is gone, which are borne before a list is made anew


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


class TenantQueue:
    """Requests of one tenant: first come first served, or the earliest deadline first."""

    __slots__ = ("_by_deadline", "_visits", "requests", "size", "tenant")

    def __init__(self, tenant: str, *, by_deadline: bool) -> None:
        self.tenant = tenant
        self.requests = 0
        self.size = 0  # bytes
        # Both with some that wait no longer.
        self._visits: deque[Visit] = deque()  # as they came
        self._by_deadline: list[tuple[float, int, Visit]] | None = [] if by_deadline else None

    def add(self, visit: Visit, number: int) -> None:
        """`number` rises from visit to visit."""
        self._visits.append(visit)
        self.requests += 1
        self.size += visit.size
        if self._by_deadline is not None:
            heapq.heappush(self._by_deadline, (visit.deadline, number, visit))

    def remove(self, visit: Visit) -> None:
        """One that no longer waits, as its stage says."""
        self.requests -= 1
        self.size -= visit.size
        visits = self._visits
        if visits[0] is visit:
            visits.popleft()
        if len(visits) > 2 * self.requests + SLACK:
            self._visits = deque(visit for visit in visits if visit.stage is Stage.WAITING)
        heap = self._by_deadline
        if heap is not None and len(heap) > 2 * self.requests + SLACK:
            heap[:] = [entry for entry in heap if entry[2].stage is Stage.WAITING]
            heapq.heapify(heap)

    def first(self) -> Visit:
        """The one to serve next."""
        heap = self._by_deadline
        if heap is not None:
            while heap[0][2].stage is not Stage.WAITING:
                heapq.heappop(heap)
            return heap[0][2]
        visits = self._visits
        while visits[0].stage is not Stage.WAITING:
            visits.popleft()
        return visits[0]

    def newest(self) -> Visit:
        visits = self._visits
        while visits[-1].stage is not Stage.WAITING:
            visits.pop()
        return visits[-1]


class Band:
    """All that waits at one priority, with the counters of its tenants."""

    def __init__(self, priority: int, vtc: VirtualTokenCounter, *, by_deadline: bool) -> None:
        self.priority = priority
        self.vtc = vtc
        self.queues: dict[str, TenantQueue] = {}  # of tenants that wait
        self.requests = 0
        self.size = 0  # bytes
        self._by_deadline = by_deadline
        # A heap of queues by a length that they had, each once or more with what it has now or
        # more. It is made when it is asked for, and kept as long as it is in use.
        self._longest: list[tuple[int, int, TenantQueue]] | None = None

    def add(self, visit: Visit, number: int) -> None:
        """A request begins to wait; `number` rises from one to the next."""
        queue = self.queues.get(visit.tenant)
        if queue is None:
            queue = TenantQueue(visit.tenant, by_deadline=self._by_deadline)
            self.queues[visit.tenant] = queue
            self.vtc.arrive(visit.tenant)
        queue.add(visit, number)
        self.requests += 1
        self.size += visit.size
        if self._longest is not None:
            heapq.heappush(self._longest, (-queue.requests, number, queue))
            if len(self._longest) > 2 * self.requests + SLACK:
                self._longest = None

    def first(self) -> Visit | None:
        """The one to serve next."""
        tenant = self.vtc.least()
        return None if tenant is None else self.queues[tenant].first()

    def charge(self, visit: Visit) -> None:
        """It is about to be removed, and goes to a pod: its tenant is charged."""
        visit.account = self.vtc.dispatch(visit.tenant, visit.prompt_tokens, visit.expected)

    def pass_by(self, visit: Visit) -> None:
        """A request that does not have to wait goes, and its tenant is charged."""
        self.vtc.arrive(visit.tenant)
        self.charge(visit)
        self.vtc.leave(visit.tenant)

    def remove(self, visit: Visit) -> None:
        """It waits no longer, as its stage says."""
        queue = self.queues[visit.tenant]
        queue.remove(visit)
        self.requests -= 1
        self.size -= visit.size
        if not queue.requests:
            del self.queues[visit.tenant]
            self.vtc.leave(visit.tenant)

    def longest(self) -> TenantQueue:
        """A queue than which no other has more requests."""
        heap = self._longest
        if heap is None:
            heap = self._longest = [
                (-queue.requests, -number, queue)
                for number, queue in enumerate(self.queues.values())
            ]
            heapq.heapify(heap)
        while True:
            length, number, queue = heap[0]
            if -length == queue.requests:
                return queue
            if queue.requests:
                heapq.heapreplace(heap, (-queue.requests, number, queue))
            else:
                heapq.heappop(heap)
