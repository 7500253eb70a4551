"""Picks that count before events confirm them, so that a burst of equal prompts does not scatter.

There are two generations. What is expected in one vanishes when the next one is over: between
`seconds` and twice that after the pick.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from picker.prefix.rows import Blocks
from picker.prefix.sources import Source
from picker.prefix.table import Rows

_SLICE = 4096  # rows forgotten at once


class Fresh:
    """Which blocks are expected where."""

    def __init__(self, blocks: Blocks, seconds: float) -> None:
        self.seconds = seconds
        self._blocks = blocks
        self._young = 0  # the generation that picks go to
        self._since = -np.inf  # when it began
        self._over = False  # the old one is being forgotten
        self._rows: tuple[deque[Rows], deque[Rows]] = (deque(), deque())
        self._lives: dict[int, int] = {}  # by bit: generations in which it may be

    def expect(self, source: Source, rows: Rows) -> None:
        """A source is to hold these rows soon."""
        self._blocks.fresh[self._young].word(source.word)[rows] |= source.bit
        self._rows[self._young].append(rows)
        self._lives[source.number] = 2

    def stored(self, source: Source, rows: Rows) -> None:
        """A source holds these rows now, whatever was expected of it."""
        if source.number in self._lives:
            for masks in self._blocks.fresh:
                if source.word < len(masks.words):
                    masks.words[source.word][rows] &= ~source.bit

    def expire(self, now: float) -> None:
        """Begin a new generation if it is time. `now`: seconds, of a clock that never goes back.

        The work is left to `tidy`.
        """
        if not self._over and now - self._since >= self.seconds:
            self._since = now
            self._over = True

    @property
    def busy(self) -> bool:
        return self._over

    def tidy(self) -> None:
        """Forget a slice of the old generation, and in the end begin a new one."""
        old = 1 - self._young
        waiting = self._rows[old]
        found: list[Rows] = []
        while waiting and sum(map(len, found)) < _SLICE:
            found.append(waiting.popleft())
        if found:
            rows = np.unique(np.concatenate(found))
            for word in self._blocks.fresh[old].words:
                word[rows] = 0
            self._blocks.release(rows)
        if not waiting:
            self._over = False
            self._young = old
            self._lives = {number: left - 1 for number, left in self._lives.items() if left > 1}
