"""How long to wait for Kubernetes' API, and before it is asked again."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds."""

    first_pause: float = 0.1  # after a first failure; it doubles with each that follows
    longest_pause: float = 30.0
    # A healthy API server sends bookmarks about once a minute: what is silent longer is dead.
    silence: float = 90.0
    watch: float = 300.0  # of one watch, after which the server ends it
    absent_pause: float = 60.0  # before a kind that the cluster does not know is looked for again
    # That a kind that was there has to be away: an API server that starts may not know it yet.
    absent_after: float = 15.0
    gather: float = 0.05  # between two changes of the pool: what comes in between is one change


class Backoff:
    """Pauses that double, each cut by chance so that pickers do not come back together."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._failures = 0

    def reset(self) -> None:
        """It works again."""
        self._failures = 0

    def pause(self) -> float:
        """Seconds until the next attempt."""
        doubled = self._pace.first_pause * 2.0 ** min(self._failures, 32)
        self._failures += 1
        return min(self._pace.longest_pause, doubled) * random.uniform(0.5, 1.0)
