"""The store as a picker sees it: asked while it answers, and in the end told all that happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from picker.quota.breaker import Breaker
from picker.quota.outage import Debts, Owed
from picker.quota.plan import FREE, Amounts, Denied, Granted, Plan, line_of
from picker.quota.policy import Policy
from picker.quota.reader import Reader
from picker.quota.store import (
    SETTLED_SECONDS,
    Change,
    Conflict,
    Entry,
    Stale,
    Store,
    StoreDown,
)

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 64  # settlements that go to the store together
SURE_SECONDS = 0.9 * SETTLED_SECONDS  # since a call was not heard, that its ids are known for sure
PAUSE_SECONDS = 0.05  # between two tries, of a store that reads but does not write too


class Link:
    """Keeps a policy up to date with a store, and settlements until the store has them.

    Args:
        policy: changed by nobody else.
        steady: seconds that never jump.
    """

    def __init__(self, store: Store, policy: Policy, steady: Callable[[], float]) -> None:
        self.store = store
        self.known = False  # whether the policy was ever read
        self.debts = Debts()
        self._policy = policy
        self._breaker = Breaker(steady)
        self._steady = steady
        self._reader = Reader(store, policy, self._restore)
        self._catching_up: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()  # nothing is being settled
        self._quiet.set()

    @property
    def up(self) -> bool:
        """Whether the store answers."""
        return not self._breaker.open

    async def ask(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the store says, unless it said nothing lately.

        Raises:
            StoreDown: it does not answer, or did not lately.
        """
        if self._breaker.open:
            raise StoreDown("it did not answer lately")
        try:
            answer = await work(*args, **kwargs)
        except StoreDown as problem:
            self._failed(problem)
            raise
        self._breaker.succeeded()
        return answer

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | Stale:
        """As the store does. What it may have done unheard is given back when it is heard again.

        Raises:
            StoreDown: as `ask` does.
        """
        if not self.up:
            raise StoreDown("it did not answer lately")
        try:
            answer = await self.store.reserve(id, plan, amounts, model, ttl)
        except (StoreDown, asyncio.CancelledError) as problem:
            if isinstance(problem, StoreDown):
                self._failed(problem)
            self.settle(Owed(id, FREE))
            raise
        self._breaker.succeeded()
        return answer

    async def read(self) -> None:
        """Take over what was written before this call.

        Raises:
            StoreDown: as `ask` does.
        """
        await self.ask(self._reader.read)
        self.known = True

    def settle(self, owed: Owed) -> None:
        """Settle soon, or when the store is back; what it may know nothing of does no harm.

        Nobody waits for it, so that what ends together is settled together.
        """
        self.debts.add(owed)
        self._catch_up_later()

    async def settled(self) -> None:
        """Wait until the store has been told of all that ended, or does not answer."""
        await self._quiet.wait()

    async def close(self) -> None:
        """Settle what can be, and close the store."""
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
        try:
            await self._pay()
        except StoreDown as problem:
            lost = len(self.debts)
            log.warning("%d settlements are lost with this picker: %s", lost, problem)
        await self.store.close()

    async def _pay(self) -> None:
        """Settle all that the store is owed.

        Raises:
            StoreDown: it does not answer. What it did unheard does no harm when it is sent again.
        """
        while batch := self.debts.first(AT_ONCE):
            now = self._steady()
            try:
                await self._send(batch, now)
            except StoreDown:
                self.debts.unheard(batch, now)
                raise
            self.debts.paid(batch)
            self._breaker.succeeded()

    async def _send(self, batch: Sequence[Owed], now: float) -> None:
        ends = [(owed.id, owed.spent) for owed in batch if owed.reserved]
        found = iter(await self.store.settle_all(ends) if ends else ())
        for owed in batch:
            if owed.reserved and next(found) is not None:
                continue
            if owed.plan is None or owed.spent == FREE:
                continue
            if self.debts.sent_for(owed, now) >= SURE_SECONDS:
                self.debts.lost += 1  # it may be charged already, and is not to be charged twice
                continue
            lines = [line_of(check, owed.at) for check in owed.plan.checks]
            await self.store.charge(owed.id, owed.subject, owed.model, lines, owed.spent)

    def _failed(self, problem: StoreDown) -> None:
        was_up = self.up
        self._breaker.failed()
        if was_up and not self.up:
            log.error("The quota store is down: %s", problem)
        self._catch_up_later()

    def _catch_up_later(self) -> None:
        if self._catching_up is None or self._catching_up.done():
            self._quiet.clear()
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Pay what is owed. A store that failed is tried, by reading it, until it answers."""
        while True:
            try:
                if self._breaker.failing:
                    self._quiet.set()
                    await self._try_again()
                await self._pay()
            except StoreDown as problem:
                self._failed(problem)
                self._quiet.set()
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._quiet.set()
                return

    async def _try_again(self) -> None:
        await asyncio.sleep(self._breaker.pause)
        was_up = self.up
        await self._reader.read()
        self.known = True
        self._breaker.succeeded()
        if not was_up:
            log.warning("The quota store is back; it is owed %d settlements", len(self.debts))

    async def _restore(self) -> None:
        """The store has lost everything: write the limits again, unless somebody else does."""
        records = self._policy.records
        log.error("The quota store is empty: writing its %d subjects again", len(records))
        found = [Change(name, 0, record.subject) for name, record in records.items()]
        why = "the store was found empty"
        entry = Entry(self.store.wall(), "warmpath", "restore", "", "", "", why)
        with suppress(Conflict):
            await self.store.write(found, [entry])
