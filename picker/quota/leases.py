"""Leases: a hot subject's requests pass without asking the store for each.

A picker reserves a part of all limits of a subject at once, admits from it, and gives back what is
left when its time is over. The store counts the whole lease as used from the start, so no number
of pickers with leases lets more pass than a limit allows. Only when a picker dies, or cannot reach
the store, does its lease expire before its requests end: they may then use at most the lease
beside what others are granted. So over-admission is at most one lease, `share` of a limit, for
each picker that failed, and it becomes debt when they settle.

The price: what others hold in leases is not there for the rest, up to `share` of a limit for each
picker; and a written limit or block is seen when the next lease is taken, `period` later at most.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from picker.quota.plan import (
    CONCURRENCY,
    FREE,
    NOTHING,
    REQUESTS,
    Amounts,
    Granted,
    Plan,
    Spent,
    Standing,
)
from picker.quota.store import Store, StoreDown

HOT = 8  # requests in one period: a lease of fewer saves little
LIVES = 3.0  # periods that a lease lives in the store, unless it is renewed there
MAX_SUBJECTS = 10_000  # whose heat is known

Key = tuple[str, str]
"""Subject and model."""


@dataclass(slots=True)
class Heat:
    """What a subject asks for in one period, and did in the one before."""

    since: float
    now: Amounts = NOTHING
    before: Amounts = NOTHING
    asking: bool = False  # for a lease, at the moment


@dataclass(slots=True, eq=False)
class Lease:
    """Amounts that are ours to give."""

    id: str
    plan: Plan
    model: str
    granted: Granted  # for the whole of it
    at: float  # when it was taken, by the store's time
    until: float  # steady seconds
    size: Amounts
    left: list[int]
    open: dict[str, Amounts] = field(default_factory=dict)  # of requests that it let pass, by id
    spent: Spent = FREE
    ended: bool = False


Finish = Callable[[Lease], None]


class Leases:
    """Leases over one store, for one picker.

    Args:
        finish: settles a lease's reservation with what was spent, whatever happens to the store.
        keep: renews a lease's reservation until then, of a lease that is over but for its requests.
        name: of this picker, unlike all others.
        period: seconds that a lease is given from.
        share: of each limit that one lease takes at most.
        ttl: seconds that a reservation lives.
        steady: seconds that never jump.
    """

    def __init__(
        self,
        store: Store,
        finish: Finish,
        keep: Callable[[str], None],
        *,
        name: str,
        period: float,
        share: float,
        ttl: float,
        steady: Callable[[], float],
    ) -> None:
        self._store = store
        self._finish = finish
        self._keep = keep
        self._ids = (f"{name}-lease-{number}" for number in count())
        self._period = period
        self._share = share
        self._ttl = ttl
        self._steady = steady
        self._leases: dict[Key, Lease] = {}
        self._heats: dict[Key, Heat] = {}
        self._by_request: dict[str, Lease] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, id: str, plan: Plan, amounts: Amounts, model: str) -> Granted | None:
        """Let a request pass by a lease that is there; None where there is none for it."""
        lease = self._leases.get((plan.subject, model))
        if lease is None:
            return None
        if lease.plan is not plan or self._steady() >= lease.until:
            self._end(lease)
            return None
        left = lease.left
        for what in range(CONCURRENCY):
            if amounts[what] > left[what]:
                self._end(lease)
                return None
        for what in range(CONCURRENCY):
            left[what] -= amounts[what]
        lease.open[id] = amounts
        self._by_request[id] = lease
        return Granted(_standings(lease))

    async def make(self, plan: Plan, amounts: Amounts, model: str) -> None:
        """Take a lease where it is worth it: called for each request that found none.

        Raises:
            StoreDown: it may have been taken; it expires then.
        """
        key = plan.subject, model
        heat = self._heats.get(key)
        now = self._steady()
        if heat is None:
            if len(self._heats) >= MAX_SUBJECTS:
                self._heats.clear()
            heat = self._heats[key] = Heat(now)
        elif now - heat.since >= self._period:
            heat.before = heat.now if now - heat.since < 2 * self._period else NOTHING
            heat.since, heat.now = now, NOTHING
        heat.now = _plus(heat.now, amounts)
        size = self._size(plan, heat)
        if size is None or heat.asking or key in self._leases:
            return
        heat.asking = True
        try:
            id, at = next(self._ids), self._store.wall()
            lives = LIVES * self._period
            answer = await self._store.reserve(id, plan, size, model, lives)
        finally:
            heat.asking = False
        if isinstance(answer, Granted):
            until = now + self._period  # from before it was asked for
            lease = Lease(id, plan, model, answer, at, until, size, list(size))
            self._leases[key] = lease
            asyncio.get_running_loop().call_later(self._period, self._end, lease)

    def settle(self, id: str, spent: Spent) -> bool:
        """Settle a request that a lease let pass; False for any other."""
        lease = self._by_request.pop(id, None)
        if lease is None:
            return False
        held = lease.open.pop(id)
        left = lease.left
        for what in range(CONCURRENCY):
            left[what] += held[what] - spent.amounts[what]
        old = lease.spent
        lease.spent = Spent(
            _plus(old.amounts, spent.amounts),
            old.prompt_tokens + spent.prompt_tokens,
            old.cached_tokens + spent.cached_tokens,
            old.completion_tokens + spent.completion_tokens,
        )
        if lease.ended and not lease.open:
            self._finish(lease)
        return True

    async def close(self) -> None:
        """Give back what is left of all leases. Requests that run settle them when they end."""
        for lease in list(self._leases.values()):
            self._end(lease)
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _size(self, plan: Plan, heat: Heat) -> Amounts | None:
        """What a lease should hold: a period's worth; None when that is not worth it."""
        wanted = tuple(max(pair) for pair in zip(heat.now, heat.before, strict=True))
        part = 1.0
        for check in plan.checks:
            if check.what == CONCURRENCY:
                return None  # a place is taken until the request ends, not until the lease does
            if wanted[check.what]:
                part = min(part, self._share * check.capacity / wanted[check.what])
        if wanted[REQUESTS] * part < HOT:
            return None
        requests, prompt, output, _, _ = (math.floor(part * amount) for amount in wanted)
        return (requests, prompt, output, prompt + output, 0)

    def _end(self, lease: Lease) -> None:
        """Give nothing more from a lease, and what is left of it back. Once."""
        if lease.ended:
            return
        lease.ended = True
        key = lease.plan.subject, lease.model
        if self._leases.get(key) is lease:
            del self._leases[key]
        if lease.open:
            self._keep(lease.id)
            self._later(self._shrink(lease))
        else:
            self._finish(lease)

    async def _shrink(self, lease: Lease) -> None:
        held = lease.spent.amounts
        for amounts in lease.open.values():
            held = _plus(held, amounts)
        try:
            await self._store.shrink(lease.id, held, self._ttl)
        except StoreDown:
            return  # it expires there; what was used is charged when the requests end

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _plus(one: Amounts, other: Amounts) -> Amounts:
    return (
        one[0] + other[0],
        one[1] + other[1],
        one[2] + other[2],
        one[3] + other[3],
        one[4] + other[4],
    )


def _standings(lease: Lease) -> tuple[Standing, ...]:
    """How limits stand, without what is left of the lease."""
    pairs = zip(lease.plan.checks, lease.granted.standings, strict=True)
    return tuple((used - lease.left[check.what], reset) for check, (used, reset) in pairs)
