"""Flow control: requests wait here while all pods are busy, and go in an order fair to tenants.

Higher priorities go first. Within a priority VTC says which tenant is next, and within a tenant
the first that came, or the one with the earliest deadline. Nothing is polled: requests go when
one ends, or when a pod tells that it has room.

Whoever calls `wait` calls `left` in the end, whatever happened, also when the wait was cancelled;
and `picked` in between, as soon as the load counts the request on its pod.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from math import ceil
from typing import Protocol

from picker.config import Flow as Settings
from picker.cost import Cost, TokenCost
from picker.flow_queue import FlowQueue, Full
from picker.lengths import Lengths
from picker.objectives import Objectives
from picker.refusal import Refusal
from picker.vtc import VirtualTokenCounter
from picker.waiting import Band, Stage, Visit

MAX_RETRY_SECONDS = 60
NO_PODS_RETRY_SECONDS = 5
PACE = 0.1  # weight of the latest in the mean time between dispatches
SLACK = 64  # visits that wait no longer, which are borne before a list is made anew


class Room(Protocol):
    """What flow control asks of the pods; `saturation.Saturation` in full."""

    @property
    def num_pods(self) -> int: ...

    def room(self) -> int:
        """How many more requests they can take, without those that they do not know of yet."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Loop(Protocol):
    """What flow control asks of asyncio's loop, and of one that runs in virtual time."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...
    def create_future(self) -> asyncio.Future[None]: ...


class Flow:
    """Flow control of one pool."""

    def __init__(
        self,
        settings: Settings,
        pods: Room,
        *,
        cost: Cost | None = None,
        weight: Callable[[str], float] | None = None,
        loop: Callable[[], Loop] = asyncio.get_running_loop,
    ) -> None:
        """
        Args:
            cost: of a request; None: as set.
            weight: of a tenant, above 0; None: as set.

        Raises:
            ValueError: something set is out of range.
        """
        self._settings = settings
        self._pods = pods
        self._loop = loop
        self.objectives = Objectives(settings)
        self._lengths = Lengths() if settings.expect == "history" else None
        self._queue = FlowQueue(
            settings,
            token_cost(settings) if cost is None else cost,
            self.objectives.weight if weight is None else weight,
        )
        self._sending = 0  # visits that were let go, and that the load does not know of yet
        self._by_arrival: deque[Visit] = deque()  # those that wait, and some that do no longer
        self._timer: Timer | None = None  # of the first of them
        self._pace = 0.0  # seconds between dispatches from the queue; 0.0: not known
        self._last_dispatch = 0.0  # or the time since which something waits
        self._closed = False
        self.running = 0  # visits that were let go and have not ended
        self.passed = 0  # visits that did not have to wait
        self.dispatched = 0  # visits that had to, and went

    @property
    def bands(self) -> Collection[Band]:
        """Priorities that were seen lately, with what waits there and its tenants' counters."""
        return self._queue.bands.values()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.requests

    @property
    def waiting_bytes(self) -> int:
        return self._queue.size

    # Other pickers

    @property
    def on_charge(self) -> Callable[[int, str, float, bool], None] | None:
        """Told of each charge here: see FlowQueue. To be set before the first visit."""
        return self._queue.on_charge

    @on_charge.setter
    def on_charge(self, hears: Callable[[int, str, float, bool], None]) -> None:
        self._queue.on_charge = hears

    def counters(self, priority: int) -> VirtualTokenCounter:
        """What the tenants of a priority got."""
        return self._queue.band(priority).vtc

    # A visit

    def visit(
        self,
        tenant: str,
        headers: Mapping[str, str],
        *,
        prompt_tokens: int = 0,
        size: int = 0,
        most_output: int | None = None,
    ) -> Visit:
        """A request that is about to come.

        Args:
            headers: names in lower case.
            size: bytes that it holds while it waits.
            most_output: tokens, where the request limits them.
        """
        expected = 0
        if self._lengths is not None:
            expected = self._lengths.expected(tenant, most_output)
        return Visit(
            tenant,
            self.objectives.priority(headers),
            prompt_tokens,
            size,
            expected,
            most_output,
            self._loop().time() + self.objectives.patience(headers),
        )

    def go(self, visit: Visit) -> bool:
        """A request comes. Whether it may go at once; else it may `wait`."""
        visit.arrived = self._loop().time()
        if self._closed:
            return False
        waits = self._settings.queue or visit.priority < 0
        if waits and (self._queue.requests or not self._has_room()):
            return False
        self._pass(visit)
        return True

    def wait(self, visit: Visit) -> asyncio.Future[None] | None:
        """A request comes. None: it may go at once; else await the future.

        Raises:
            Refusal: 429 or 503, from here or from the future: the queue is full, or the request
                waited too long in it or gave way to another, or the picker ends.
        """
        if self._closed:
            raise _ending()
        if not self._pods.num_pods and self._settings.scale_from_zero == "reject":
            raise _no_pods()
        if self.go(visit):
            return None
        if visit.priority < 0 and self._settings.sheddable == "reject":
            raise self._refusal("saturated", "all pods are busy, and the priority is below 0")
        return self._enqueue(visit, visit.arrived, self._loop())

    def picked(self, visit: Visit) -> None:
        """The load counts the request on its pod from now on."""
        if visit.stage is Stage.SENT:
            visit.stage = Stage.PICKED
            self._sending -= 1

    def streamed(self, visit: Visit, tokens: int) -> None:
        """The answer has so many tokens by now, as counted or estimated."""
        if visit.stage is Stage.PICKED and visit.band is not None and visit.account is not None:
            if visit.most_output is not None:
                tokens = min(tokens, visit.most_output)
            visit.band.vtc.output(visit.account, tokens)

    def left(
        self, visit: Visit, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> None:
        """The request is over, wherever it was. Only the first call counts.

        Tokens are those that the pod told; None: those that are known.
        """
        stage = visit.stage
        if stage is Stage.WAITING:
            self._queue.remove(visit, Stage.OVER)
            return
        visit.stage = Stage.OVER
        if stage is Stage.SENT or stage is Stage.PICKED:
            assert visit.band is not None and visit.account is not None
            self.running -= 1
            if stage is Stage.PICKED:
                visit.band.vtc.settle(visit.account, prompt_tokens, output_tokens)
                if self._lengths is not None and output_tokens is not None:
                    self._lengths.learn(visit.tenant, output_tokens)
            else:
                self._sending -= 1
                visit.band.vtc.cancel(visit.account)
            if self._queue.requests:
                self._serve()

    # What happens elsewhere

    def wake(self) -> None:
        """There may be more room, or less: a pod told its load."""
        if self._queue.requests:
            self._serve()

    def _serve(self) -> None:
        """Let go whom there is room for."""
        now = self._loop().time()
        while self._has_room() and (visit := self._queue.first()) is not None:
            future = visit.future
            assert future is not None
            if future.cancelled():  # its client left, and `left` is about to say so
                self._drop(visit)
                continue
            self._queue.remove(visit, Stage.SENT)
            self._let_go()
            visit.waited = now - visit.arrived
            self.dispatched += 1
            gap, self._last_dispatch = now - self._last_dispatch, now
            self._pace += (PACE if self._pace else 1.0) * (gap - self._pace)
            future.set_result(None)

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings from now on; order, cost and expectation stay.

        Raises:
            ValueError: something set is out of range; nothing has changed then.
        """
        self.objectives.reconfigure(settings)
        self._settings = settings
        self._queue.reconfigure(settings)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if settings.ttl:
            self._expire()
        else:
            self._by_arrival.clear()
        self.wake()

    def close(self) -> None:
        """Refuse all that waits, and all that comes."""
        self._closed = True
        while (visit := self._queue.first()) is not None:
            self._drop(visit, _ending())
        if self._timer is not None:
            self._timer.cancel()

    # Going

    def _has_room(self) -> bool:
        return self._pods.room() > self._sending

    def _pass(self, visit: Visit) -> None:
        """Go without having waited."""
        band = visit.band = self._queue.band(visit.priority)
        band.pass_by(visit)
        visit.stage = Stage.SENT
        self._let_go()
        visit.waited = 0.0
        self.passed += 1

    def _let_go(self) -> None:
        self._sending += 1
        self.running += 1

    # Waiting

    def _enqueue(self, visit: Visit, now: float, loop: Loop) -> asyncio.Future[None]:
        try:
            while (victim := self._queue.victim(visit)) is not None:
                why = "requests of higher priority, or of tenants with fewer, took its place"
                self._drop(victim, self._refusal("displaced", why))
        except Full as full:
            raise self._refusal(full.reason, str(full)) from None
        if not self._queue.requests:
            self._last_dispatch = now
        self._queue.add(visit)
        visit.future = loop.create_future()
        if self._settings.ttl:
            waiting = self._by_arrival
            waiting.append(visit)
            if len(waiting) > 2 * self._queue.requests + SLACK:
                self._by_arrival = deque(v for v in waiting if v.stage is Stage.WAITING)
            if self._timer is None:
                self._timer = loop.call_at(now + self._settings.ttl, self._expire)
        return visit.future

    def _drop(self, visit: Visit, why: Refusal | None = None) -> None:
        """A waiting visit goes nowhere; None: nobody listens any more."""
        self._queue.remove(visit, Stage.OVER)
        if why is not None and visit.future is not None and not visit.future.done():
            visit.future.set_exception(why)

    def _refusal(self, reason: str, message: str) -> Refusal:
        """Of a request for which there is no room; without pods that is not for others' sake."""
        if not self._pods.num_pods:
            return _no_pods()
        seconds = ceil(self._pace * max(1, self._queue.requests))
        return Refusal(429, reason, message, retry_after=min(max(1, seconds), MAX_RETRY_SECONDS))

    def _expire(self) -> None:
        """End what has waited too long, and set the timer for the next."""
        loop, ttl = self._loop(), self._settings.ttl
        now = loop.time()
        waiting = self._by_arrival
        while waiting and (
            waiting[0].stage is not Stage.WAITING or waiting[0].arrived + ttl <= now
        ):
            visit = waiting.popleft()
            if visit.stage is Stage.WAITING:
                why = f"no pod had room for the request within {ttl:g} s"
                self._drop(visit, self._refusal("queue_timeout", why))
        self._timer = loop.call_at(waiting[0].arrived + ttl, self._expire) if waiting else None


def token_cost(settings: Settings) -> TokenCost:
    """The cost that is set."""
    cost = settings.cost
    return TokenCost(cost.input, cost.output, cost.product, cost.output_squared, cost.request)


def _no_pods() -> Refusal:
    why = "the pool has no endpoint"
    return Refusal(503, "no_endpoints", why, retry_after=NO_PODS_RETRY_SECONDS)


def _ending() -> Refusal:
    return Refusal(503, "draining", "the picker is ending", retry_after=1)
