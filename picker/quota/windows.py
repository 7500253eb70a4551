"""Days and months of a time zone, as spans of Unix seconds."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from picker.quota.model import QuotaError

Span = tuple[int, int]  # Unix seconds: its first, and the first of the next


class Calendar:
    """The day or month that a time is in. Remembers the last one that was asked for."""

    def __init__(self, window: str, zone: str) -> None:
        self._months = window == "month"
        self._zone = load_zone(zone)
        self._span: Span = (0, 0)

    def span(self, now: float) -> Span:
        """The window around `now`; 23 to 25 hours where clocks change."""
        start, end = self._span
        if not start <= now < end:
            self._span = start, end = self._find(now)
        return start, end

    def _find(self, now: float) -> Span:
        first = datetime.fromtimestamp(now, self._zone).replace(
            hour=0, minute=0, second=0, microsecond=0, fold=0
        )
        if self._months:
            first = first.replace(day=1)
            following = (first + timedelta(days=32)).replace(day=1)
        else:
            following = first + timedelta(days=1)  # of the wall clock, not 24 hours
        return int(first.timestamp()), int(following.timestamp())


@lru_cache(maxsize=64)
def load_zone(name: str) -> ZoneInfo:
    """A time zone by its IANA name.

    Raises:
        QuotaError: there is none of that name.
    """
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise QuotaError(f"{name!r} is no time zone: write one like Europe/Berlin") from None
