"""The store as a picker sees it: asked while it answers, and in the end told all that happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from picker.quota.breaker import Breaker
from picker.quota.outage import Debts, Owed
from picker.quota.plan import FREE, Amounts, Denied, Granted, Plan, line_of
from picker.quota.policy import Policy
from picker.quota.store import Change, Changes, Conflict, Entry, Stale, Store, StoreDown

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


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
        self._reading: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None

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
            self.owe(Owed(id, FREE))
            raise
        self._breaker.succeeded()
        return answer

    async def read(self) -> None:
        """Take over what was written. Who comes while somebody reads waits for that.

        Raises:
            StoreDown: as `ask` does.
        """
        await self.ask(self._read)

    async def settle(self, owed: Owed) -> None:
        """Settle now, or when the store is back. Never raises."""
        if not self.up:
            self.owe(owed)
            return
        try:
            await self._pay_one(owed)
        except StoreDown as problem:
            self._failed(problem)
            self.owe(owed)
        except asyncio.CancelledError:
            self.owe(owed)
            raise
        else:
            self._breaker.succeeded()

    def owe(self, owed: Owed) -> None:
        """Settle when the store is back; what it may know nothing of does no harm."""
        self.debts.add(owed)
        self._recover_later()

    async def close(self) -> None:
        """Settle what can be, and close the store."""
        if self._recovering is not None:
            self._recovering.cancel()
        if not await self._pay():
            log.warning("%d settlements are lost with this picker", len(self.debts))
        await self.store.close()

    async def _pay_one(self, owed: Owed) -> None:
        if owed.reserved and await self.store.settle(owed.id, owed.spent) is not None:
            return
        if owed.plan is not None and owed.spent != FREE:
            lines = [line_of(check, owed.at) for check in owed.plan.checks]
            await self.store.charge(owed.id, owed.subject, owed.model, lines, owed.spent)

    async def _pay(self) -> bool:
        """Settle what the store is owed; False when it does not answer."""
        while (owed := self.debts.first) is not None:
            try:
                await self._pay_one(owed)
            except StoreDown as problem:
                self._failed(problem)
                return False
            self.debts.paid(owed)
        return True

    def _failed(self, problem: StoreDown) -> None:
        was_up = self.up
        self._breaker.failed()
        if was_up and not self.up:
            log.error("The quota store is down: %s", problem)
        self._recover_later()

    def _recover_later(self) -> None:
        if self._recovering is None or self._recovering.done():
            self._recovering = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        """Try the store until it answers and has all that it is owed."""
        while True:
            await asyncio.sleep(self._breaker.pause)
            was_up = self.up
            try:
                await self._read_once()
            except StoreDown as problem:
                self._failed(problem)
                continue
            self._breaker.succeeded()
            if not was_up:
                log.warning("The quota store is back; it is owed %d settlements", len(self.debts))
            if await self._pay():
                return

    async def _read(self) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read_once())
        await asyncio.shield(self._reading)

    async def _read_once(self) -> None:
        changes = await self.store.changes(self._policy.version)
        if not changes.version and self._policy.records:
            changes = await self._restored()
        if changes.whole:
            records = {name: record for name, record in changes.records.items() if record}
            self._policy.replace(changes.version, records)
        else:
            self._policy.update(changes.version, changes.records)
        self.known = True

    async def _restored(self) -> Changes:
        """The store has lost everything: write the limits again, unless somebody else does."""
        records = self._policy.records
        log.error("The quota store is empty: writing its %d subjects again", len(records))
        found = [Change(name, 0, record.subject) for name, record in records.items()]
        why = "the store was found empty"
        entry = Entry(self.store.wall(), "warmpath", "restore", "", "", "", why)
        with suppress(Conflict):
            await self.store.write(found, [entry])
        return await self.store.changes("")
