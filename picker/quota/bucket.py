"""A counter, and the leaking bucket in it, which gives back exactly.

A bucket's level rises by what is charged and leaks at a rate; it never falls below zero. When a
request used less than it reserved, the level becomes what it were had the true amount been
charged at first. That is less by min(surplus, least level since then): what leaked while only the
surplus was left would not have been there to leak. (The level without the surplus x is the
reflection at zero of the level minus x: Harrison, Brownian Motion and Stochastic Flow Systems, 2.)

So a bucket remembers its lows: the level before each charge, where no later one was lower.
"""

from __future__ import annotations

MAX_LOWS = 16  # beyond that the oldest are merged: an older reservation may get less back

Low = tuple[int, float]
"""The number of a charge, and the level just before it."""


class Counter:
    """What was charged to one limit in one window, or to a grant.

    value = settled + what open reservations hold, always. A bucket has its level beside that.
    """

    __slots__ = ("at", "level", "lows", "rate", "seq", "settled", "until", "value")

    def __init__(
        self,
        value: int = 0,
        settled: int = 0,
        rate: float = -1.0,
        level: float = 0.0,
        at: float = 0.0,
        seq: int = 0,
        lows: list[Low] | None = None,
        until: float = 0.0,
    ) -> None:
        self.value = value
        self.settled = settled
        self.rate = rate  # negative: no bucket
        self.level = level  # at the time `at`
        self.at = at
        self.seq = seq  # charges so far
        self.lows: list[Low] = lows or []  # both numbers rise
        self.until = until  # it may be forgotten then, unless reservations are open

    def leak(self, now: float) -> None:
        """Bring a bucket's level to a time; one before the last changes nothing."""
        elapsed = now - self.at
        if elapsed > 0:
            self.at = now
            level = self.level - elapsed * self.rate
            self.level = level if level > 0.0 else 0.0

    def charge(self, amount: float) -> int:
        """Raise a bucket's level; returns the number of this charge."""
        level = self.level
        lows = self.lows
        while lows and lows[-1][1] >= level:
            lows.pop()
        self.seq += 1
        lows.append((self.seq, level))
        if len(lows) > MAX_LOWS:
            lows[:2] = [(lows[1][0], lows[0][1])]
        self.level = level + amount
        return self.seq

    def give_back(self, surplus: float, seq: int) -> None:
        """Make a bucket's level what it were had charge `seq` been so much smaller."""
        lows = self.lows
        if not lows or lows[-1][0] <= seq:  # no charge came after this one
            self.level = self.level - surplus if surplus < self.level else 0.0
            return
        first = next(low for number, low in lows if number > seq)
        given = min(surplus, first, self.level)
        if given <= 0:
            return
        self.level -= given
        least, kept = self.level, []
        for number, low in reversed(lows):
            lowered = low - given if number > seq else low
            if lowered < least:
                least = lowered
                kept.append((number, lowered))
        self.lows = kept[::-1]

    def empty(self) -> None:
        """Forget what a bucket holds; earlier charges get nothing back."""
        self.level = 0.0
        self.seq += 1
        self.lows = [(self.seq, 0.0)]

    @property
    def open(self) -> int:
        """What open reservations hold."""
        return self.value - self.settled
