"""A circuit breaker: after some failures in a row nobody asks a store that is down."""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 3  # in a row
FIRST_PAUSE = 0.2  # seconds until it is tried again, then twice as long each time
LONGEST_PAUSE = 5.0


class Breaker:
    """Whether to ask, by what came of asking lately.

    Closed: everybody asks. Open, after `FAILURES` failures in a row: nobody does, but one probe
    after a pause, which closes it or makes the pause longer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # seconds that never jump
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._probe_at: float | None = None  # None: closed

    @property
    def open(self) -> bool:
        return self._probe_at is not None

    @property
    def failing(self) -> bool:
        """Whether the last that asked had no answer."""
        return self._failures > 0

    @property
    def pause(self) -> float:
        """Seconds until the next probe is due; 0 while closed."""
        return max(0.0, self._probe_at - self._clock()) if self._probe_at is not None else 0.0

    def succeeded(self) -> None:
        if not self._failures:
            return
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._probe_at = None

    def failed(self) -> None:
        self._failures += 1
        if self._probe_at is not None and self.pause == 0:  # the probe itself
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._probe_at = self._clock() + self._pause
        elif self._probe_at is None and self._failures >= FAILURES:
            self._probe_at = self._clock() + self._pause
