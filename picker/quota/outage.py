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
    with `closed` nothing passes. Over all replicas and outages no more than each limit passes
    beside what the store counts, and all of it is charged there later.

    Args:
        replicas: how many pickers there are.
    """

    def __init__(
        self, replicas: int, wall: Callable[[], float], steady: Callable[[], float]
    ) -> None:
        self._replicas = replicas
        self._store = MemoryStore(wall, steady)
        self._plans: dict[Plan, Plan] = {}  # of one version

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | None:
        """As a store does; None when a limit that must hold cannot be checked."""
        if any(check.on_failure == "closed" and not check.shadow for check in plan.checks):
            return None
        answer = await self._store.reserve(id, self._shared(plan), amounts, model, ttl)
        assert not isinstance(answer, Stale)
        return answer

    def settle(self, id: str, spent: Spent) -> None:
        self._store.settle_now(id, spent)

    def _shared(self, plan: Plan) -> Plan:
        found = self._plans.get(plan)
        if found is None:
            if self._plans and next(iter(self._plans)).version != plan.version:
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
        for owed in batch:
            if self._owed and self._owed[0] is owed:
                self._owed.popleft()
