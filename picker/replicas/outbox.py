"""What one follower has not been told yet, in bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_BYTES = 8 << 20  # about ten seconds of a busy picker's news
MAX_ENTRIES = 10_000  # of access logs


class Outbox:
    """Updates in order. If it becomes full, all of them are dropped: the follower has `lost` them,
    and is to be told anew what there is.

    Args:
        replica: the follower.
    """

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.lost = True  # it knows nothing yet
        self.entries: list[bytes] = []  # of its own picks, for the next update
        self._size = 0
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()

    def put(self, update: bytes) -> None:
        self._waiting.append(update)
        self._size += len(update)
        if self._size > MAX_BYTES:
            self._empty()
            self.lost = True
        self._news.set()

    def put_entry(self, entry: bytes) -> bool:
        """Returns whether there was room."""
        if len(self.entries) >= MAX_ENTRIES:
            return False
        self.entries.append(entry)
        return True

    def begin(self) -> None:
        """The follower is about to be told what there is; what comes from now on is kept."""
        self._empty()
        self.lost = False

    async def next(self) -> bytes | None:
        """The oldest update, once there is one; None when the follower has lost some."""
        while not self._waiting and not self.lost:
            self._news.clear()
            await self._news.wait()
        if self.lost:
            return None
        update = self._waiting.popleft()
        self._size -= len(update)
        return update

    def _empty(self) -> None:
        self._waiting.clear()
        self._size = 0
