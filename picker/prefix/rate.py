"""How often something happens, of late."""

from __future__ import annotations

import math

SPAN = 10.0  # seconds: what happened as long ago as this counts 1/e of what happens now


class Rate:
    """The change of a count that only grows, in a second."""

    def __init__(self, now: float) -> None:
        """`now`: seconds, of a clock that never goes back; the count is 0."""
        self.per_second = 0.0
        self._count = 0
        self._at = now

    def update(self, count: int, now: float) -> None:
        """What the count is; to be told regularly."""
        elapsed = now - self._at
        if elapsed <= 0:
            return
        latest = (count - self._count) / elapsed
        self.per_second += (latest - self.per_second) * -math.expm1(-elapsed / SPAN)
        self._count, self._at = count, now
