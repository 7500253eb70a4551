"""Reservations live shortly, so that a picker that dies gives its places back, and are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, takewhile

from picker.quota.link import Link
from picker.quota.store import StoreDown

LIFE_SECONDS = 60.0  # of a reservation, from the last time that its picker was heard of it
RENEWALS = 3  # in one life: two may fail
AT_ONCE = 64  # renewed in one call
RETRY_SECONDS = 1.0  # while the store is down


class Renewals:
    """Renews one picker's open reservations.

    Args:
        life: seconds that one has from each renewal.
        most: seconds after which it is renewed no more: its request was forgotten.
        steady: seconds that never jump.
    """

    def __init__(
        self, link: Link, *, life: float, most: float, steady: Callable[[], float]
    ) -> None:
        self._link = link
        self._life = life
        self._most = most
        self._steady = steady
        # By id: when it is to be renewed, and until when; the first to be renewed comes first.
        self._open: dict[str, tuple[float, float]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, id: str) -> None:
        """It was reserved, for a life."""
        now = self._steady()
        self._open[id] = now + self._life / RENEWALS, now + self._most
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def drop(self, id: str) -> None:
        """It is settled."""
        self._open.pop(id, None)

    async def renew(self) -> None:
        """Renew those whose time has come.

        Raises:
            StoreDown: it does not answer; they are still to be renewed.
        """
        now = self._steady()
        while batch := self._due(now):
            ids = [id for id, (_, until) in batch.items() if now < until]
            await self._link.ask(self._link.store.renew, ids, self._life)
            for id, (_, until) in batch.items():
                if self._open.pop(id, None) is not None and now < until:
                    self._open[id] = now + self._life / RENEWALS, until

    def _due(self, now: float) -> dict[str, tuple[float, float]]:
        due = takewhile(lambda each: each[1][0] <= now, self._open.items())
        return dict(islice(due, AT_ONCE))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        pause = 0.0
        while self._open:
            at, _ = next(iter(self._open.values()))
            await asyncio.sleep(max(pause, at - self._steady()))
            pause = RETRY_SECONDS
            with suppress(StoreDown):
                await self.renew()
                pause = 0.0
