"""What the index does in the background, in slices of about a millisecond."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from picker.prefix.aliases import Aliases
from picker.prefix.fresh import Fresh
from picker.prefix.rows import Blocks
from picker.prefix.sources import Sources
from picker.prefix.table import NO_ROWS, Rows

_SLICE = 4096  # rows looked at once
_CHUNK = 1024  # rows freed at once
FULL, ROOMY = 0.95, 0.85  # of the rows there may be: where eviction begins, and where it ends
_MANY = 256  # ends of chains that are worth going up from together
_AGES = 1024  # that are told apart


class Upkeep:
    """Frees what nobody needs: after sources, picks and parents are gone, and for want of room."""

    def __init__(self, blocks: Blocks, aliases: Aliases, sources: Sources, fresh: Fresh) -> None:
        self.evicted = 0  # blocks, ever
        self._blocks = blocks
        self._aliases = aliases
        self._sources = sources
        self._fresh = fresh
        self._job: Iterator[None] | None = None

    def tidy(self) -> bool:
        """Do one slice of work. Returns whether there may be more."""
        if self._fresh.busy:
            self._fresh.tidy()
            return True
        if self._blocks.unused:
            self._blocks.release(np.unique(self._blocks.unused.pop()))
            return True
        self._job = self._job or self._next_job()
        if self._job is None:
            return False
        if next(self._job, self) is self:
            self._job = None
        return True

    def _next_job(self) -> Iterator[None] | None:
        table, aliases = self._blocks.table, self._aliases.table
        if len(table) > FULL * table.max_rows or len(aliases) > FULL * aliases.max_rows:
            return self._evict()
        if self._sources.retired.any():
            return self._scrub()
        return None

    def _scrub(self) -> Iterator[None]:
        """Take bits that were given up out of all sets."""
        retired = self._sources.retired.copy()
        top = self._blocks.table.top
        for first in range(0, top, _SLICE):
            self._blocks.scrub(first, min(top, first + _SLICE), retired)
            yield
        yield from self._sweep()
        self._sources.recycle(retired)

    def _sweep(self) -> Iterator[None]:
        """Forget aliases of blocks that are gone."""
        top = self._aliases.table.top
        for first in range(0, top, _SLICE // 2):
            self._aliases.sweep(first, min(top, first + _SLICE // 2))
            yield

    def _evict(self) -> Iterator[None]:
        """Free the ends of the chains that were of no use for longest, until there is room.

        A block that leads to others counts as used when the last of these was.
        """
        blocks = self._blocks
        most = blocks.table.max_rows
        aliases = self._aliases.table
        goal = int(ROOMY * most)
        if len(aliases) > FULL * aliases.max_rows:
            goal = min(goal, int(len(blocks) * ROOMY))
        while len(blocks) > goal:
            ages = np.zeros(_AGES, np.int64)
            for rows in self._ends():
                ages += np.bincount(self._ages(rows), minlength=_AGES)
                yield
            wanted = ages.sum() * (len(blocks) - goal) / len(blocks)
            since = blocks.now - (_AGES - 1 - int(np.searchsorted(ages[::-1].cumsum(), wanted)))
            ends = NO_ROWS
            for rows in self._ends():
                ends = np.concatenate((ends, rows[blocks.touched.take(rows) <= since]))
                yield
                while len(ends) >= _MANY and len(blocks) > goal:
                    ends = self._evict_some(ends, since)
                    yield
            while len(ends) and len(blocks) > goal:
                ends = self._evict_some(ends, since)
                yield
        yield from self._sweep()

    def _evict_some(self, ends: Rows, since: int) -> Rows:
        """Free some of these ends of chains, and what leads to them; returns the ends left."""
        blocks = self._blocks
        before = len(blocks)
        some, rest = ends[:_CHUNK], ends[_CHUNK:]
        some = some[blocks.is_end(some) & (blocks.touched.take(some) <= since)]
        left = blocks.drop(blocks.tails(some, since, _CHUNK))
        self.evicted += before - len(blocks)
        left = left[blocks.touched.take(left) <= since]
        return np.concatenate((left, rest))

    def _ends(self) -> Iterator[Rows]:
        """The ends of chains, a slice at a time."""
        top = self._blocks.table.top
        for first in range(0, top, _SLICE):
            rows = np.arange(first, min(top, first + _SLICE))
            yield rows[self._blocks.is_end(rows)]

    def _ages(self, rows: Rows) -> Rows:
        """How long ago rows were of use."""
        ages = self._blocks.now - self._blocks.touched.take(rows).astype(np.intp)
        return np.minimum(ages, _AGES - 1)
