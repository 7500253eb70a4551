"""What holds while the store is down, and what it is owed when it is back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import msgspec

from picker.quota.plan import Amounts, Check, Denied, Granted, Plan, Spent
from picker.quota.store import Stale
from picker.quota.store_memory import MemoryStore

MAX_OWED = 100_000  # settlements that are kept for it; the oldest go first, and are lost
MAX_SHARED = 100_000  # counters and lines of books of shares, before they begin anew
MAX_PLANS = 10_000  # of them that are kept ready
REST_SECONDS = 600.0  # without an outage, after which shares are forgotten


class Owed(msgspec.Struct, frozen=True):
    """A settlement that the store has not confirmed. To send it twice does no harm."""

    id: str
    spent: Spent
    reserved: bool = True  # whether the store may have a reservation of this id
    subject: str = ""
    model: str = ""
    plan: Plan | None = None  # of what to charge where there is no reservation
    at: float = 0.0  # when it was admitted, by the store's time


class Shares:
    """Limits kept here: each replica lets pass its part of them.

    A limit with `share` holds with its amount divided by the replicas, `open` not at all, and
    with `closed` nothing passes. Over all replicas no more than each limit passes beside what the
    store counts, and all of it is charged there later. That holds over outages that follow on each
    other within REST_SECONDS; after that, and when there are too many to count, shares are whole
    again.

    Args:
        replicas: how many pickers there are.
    """

    def __init__(
        self, replicas: int, wall: Callable[[], float], steady: Callable[[], float]
    ) -> None:
        self._replicas = replicas
        self._wall = wall
        self._steady = steady
        self._used_at: float | None = None  # None: nothing is remembered
        self._begin()

    @property
    def size(self) -> int:
        """What is remembered: counters, lines of books, plans."""
        return self._store.size + len(self._plans)

    def rest(self) -> None:
        """The store answers: forget all in the end."""
        if self._used_at is not None and self._steady() - self._used_at >= REST_SECONDS:
            self._used_at = None
            self._begin()

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | None:
        """As a store does; None when a limit that must hold cannot be checked."""
        if any(check.on_failure == "closed" and not check.shadow for check in plan.checks):
            return None
        self._used_at = self._steady()
        if self._store.size >= MAX_SHARED:
            self._begin()
        answer = await self._store.reserve(id, self._shared(plan), amounts, model, ttl)
        assert not isinstance(answer, Stale)
        return answer

    def settle(self, id: str, spent: Spent) -> None:
        self._store.settle_now(id, spent)

    def _begin(self) -> None:
        self._store = MemoryStore(self._wall, self._steady)
        self._plans: dict[Plan, Plan] = {}  # of one version

    def _shared(self, plan: Plan) -> Plan:
        found = self._plans.get(plan)
        if found is None:
            if self._plans and (
                len(self._plans) >= MAX_PLANS or next(iter(self._plans)).version != plan.version
            ):
                self._plans.clear()
            checks = tuple(
                self._share(check) for check in plan.checks if check.on_failure == "share"
            )
            found = self._plans[plan] = replace(plan, version="0", checks=checks)
        return found

    def _share(self, check: Check) -> Check:
        if not check.capacity:
            return check
        capacity = max(1, check.capacity // self._replicas)
        rate = check.rate * capacity / check.capacity if check.rate > 0 else check.rate
        limit = msgspec.structs.replace(check.limit, amount=capacity)
        return replace(check, capacity=capacity, rate=rate, grants=(), limit=limit)


class Debts:
    """What the store is owed, oldest first."""

    def __init__(self) -> None:
        self.lost = 0  # settlements that were given up
        self._owed: deque[Owed] = deque()
        self._sent: dict[str, float] = {}  # ids whose answer was not heard, and since when

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, owed: Owed) -> None:
        if len(self._owed) >= MAX_OWED:
            self._owed.popleft()
            self.lost += 1
        self._owed.append(owed)

    def first(self, most: int) -> list[Owed]:
        """The oldest, so many at most."""
        return list(islice(self._owed, most))

    def paid(self, batch: Sequence[Owed]) -> None:
        """These were the first, but for those that were given up meanwhile."""
        self._sent.clear()
        for owed in batch:
            if self._owed and self._owed[0] is owed:
                self._owed.popleft()

    def unheard(self, batch: Sequence[Owed], now: float) -> None:
        """These were sent at a time, and nobody knows what came of it."""
        self._sent = {owed.id: self._sent.get(owed.id, now) for owed in batch}

    def sent_for(self, owed: Owed, now: float) -> float:
        """Seconds since one was sent first; 0 when it was not yet."""
        return now - self._sent.get(owed.id, now)
