"""As much of an asyncio loop as futures and timers need, in virtual time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any


class Timer:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[..., Any]) -> None:
        self.callback: Callable[..., Any] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualLoop:
    """Time passes only in `run`, which does all that is due in its order."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., Any]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> None:
        """For futures."""
        self._soon.append((callback, args))

    def get_debug(self) -> bool:
        """For futures."""
        return False

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Call what waits on futures that are done."""
        while self._soon:
            callback, args = self._soon.popleft()
            callback(*args)

    def run(self, until: float) -> None:
        """Let time pass."""
        self.settle()
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                self._now = max(self._now, when)
                timer.callback()
                self.settle()
        self._now = max(self._now, until)

    @property
    def num_timers(self) -> int:
        """Timers that are set."""
        return sum(timer.callback is not None for _, _, timer in self._timers)
