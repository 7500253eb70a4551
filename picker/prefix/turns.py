"""Turns on the event loop, so that many busy publishers never hold it for long together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

log = logging.getLogger(__name__)

PAUSE = 0.005  # seconds between the turns of one who had nothing left: what comes meanwhile waits
TOGETHER = 0.001  # seconds of the loop after which no further turn begins before others had theirs


class Client(Protocol):
    rested: float  # by time.monotonic: when its last turn ended with nothing left
    waiting: bool  # for a turn

    def turn(self) -> bool:
        """Work for a short while. True: there is more to do."""


class Turns:
    """Who has work, and whose turn it is. Made while the loop runs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Client] = deque()
        self._running = False

    def ask(self, client: Client) -> None:
        """Give a client a turn soon; once, however often it asks."""
        if client.waiting:
            return
        client.waiting = True
        delay = client.rested + PAUSE - time.monotonic()
        if delay > 0:
            self._loop.call_later(delay, self._add, client)
        else:
            self._add(client)

    def _add(self, client: Client) -> None:
        self._ready.append(client)
        if not self._running:
            self._running = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        began = time.monotonic()
        while self._ready and time.monotonic() - began < TOGETHER:
            client = self._ready.popleft()
            more = False
            try:
                more = client.turn()
            except Exception:  # the others go on
                log.exception("a turn failed")
            if more:
                self._ready.append(client)
            else:
                client.waiting = False
                client.rested = time.monotonic()
        self._running = bool(self._ready)
        if self._ready:
            self._loop.call_soon(self._run)
