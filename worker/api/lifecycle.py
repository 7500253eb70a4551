"""Where a server stands between its start and its end, and which requests it is busy with."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

log = logging.getLogger(__name__)


class Lifecycle:
    """Warming up, ready, draining, aborting what is left."""

    def __init__(self) -> None:
        self.warm = False
        self.draining = False
        self.aborting = False
        self._active: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.warm and not self.draining

    @property
    def num_active(self) -> int:
        """Requests being served."""
        return len(self._active)

    def enter(self, task: asyncio.Task[object]) -> None:
        self._active.add(task)
        self._idle.clear()

    def leave(self, task: asyncio.Task[object]) -> None:
        self._active.discard(task)
        if not self._active:
            self._idle.set()

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Take no new requests; wait for the running ones, then abort those that are left.

        The wait ends after `seconds`, or when `hurry` is set.
        """
        self.draining = True
        waits = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.aborting = True
        log.info("Drained; %d requests are cut off", len(self._active))
        for task in self._active:
            task.cancel()
        if self._active:
            await asyncio.wait(set(self._active), timeout=1.0)


LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
