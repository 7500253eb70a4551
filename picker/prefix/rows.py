"""Blocks by their keys, and who holds each of them.

A row is a block. It points to the row of the block before it, and counts the rows that point to
it: a row that others need is kept, even if nobody holds it, so that rows are always freed from the
ends of chains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from picker.prefix.events import Tier
from picker.prefix.sources import Masks, Sources, bits_of
from picker.prefix.table import NO_ROWS, Keys, Rows, Table, column

Flags = NDArray[np.bool_]

np.unique(NO_ROWS)  # imports a lot when it is first called: now, not while requests wait

_FREE = -1  # in `above`
_ROUNDS = 6  # of freeing at once; what is left then is done in the background
_ROUNDS_OF_ONE = 32
_LEVELS = 48  # of a chain that are evicted at once
MAX_GROUPS = 64  # that are told apart in one holding


class Blocks:
    """Columns over the table of block keys.

    A bit in `held` means one holding of the source's main group. Holdings that are more, or of
    other groups, are counted in `counts`; rows that have such are `odd`.
    """

    def __init__(self, max_rows: int, sources: Sources) -> None:
        self.table = Table(max_rows)
        self._sources = sources
        self.held = {tier: Masks(max_rows) for tier in Tier}
        self.fresh = (Masks(max_rows), Masks(max_rows))  # expected of picks, in two generations
        self.above = column(max_rows, np.int32)  # 1 + the row of the block before; 0: none
        self.below = column(max_rows, np.int32)  # rows that have this one above them
        self.touched = column(max_rows, np.uint32)  # when it was of use last
        self.now = 1  # for `touched`: grows with use
        self.odd = column(max_rows, np.bool_)
        self.counts: dict[int, dict[tuple[Tier, int], dict[int, int]]] = {}  # row, bit, group
        self.unused: list[Rows] = []  # rows to be looked at again

    def __len__(self) -> int:
        return len(self.table)

    @property
    def _masks(self) -> list[Masks]:
        return [*self.held.values(), *self.fresh]

    @property
    def num_bytes(self) -> int:
        """What has been written of the columns, but for counts."""
        columns = sum(len(masks.words) for masks in self._masks)
        return self.table.num_bytes + self.table.top * (8 * columns + 13)

    def is_end(self, rows: Rows) -> Flags:
        """Which of these rows are in use, with none after them."""
        ends: Flags = self.below.take(rows) == 0
        ends &= self.above.take(rows) != _FREE
        return ends

    def new(self, keys: Keys) -> Rows:
        """Rows for these keys, all different, which have none; there must be room."""
        rows = self.table.insert(keys)
        self.above[rows] = 0
        self.touched[rows] = self.now
        return rows

    def chain(self, keys: Keys, above: int) -> Rows:
        """Rows for these blocks, each after the one before, and the first after a row or -1.

        They are fewer where there is not enough room.
        """
        rows = self.table.find(keys)
        missing = np.flatnonzero(rows < 0)
        room = self.table.room
        if len(missing) > room:
            rows = rows[: missing[room]]
            missing = missing[:room]
        if len(missing):
            rows[missing] = self.new(keys[missing])
        before = np.empty(len(rows), np.intp)
        before[:1] = above
        before[1:] = rows[:-1]
        self.join(rows, before)
        return rows

    def join(self, rows: Rows, before: Rows) -> None:
        """These rows, all different, come after those, or after nothing: -1."""
        loose = self.above.take(rows) == 0
        loose &= before >= 0
        rows, before = rows[loose], before[loose]
        self.above[rows] = before + 1
        np.add.at(self.below, before, 1)

    def holds(self, rows: Rows, number: int, bit: np.uint64) -> Flags:
        """Which of these rows a source holds, whatever the tier."""
        found = np.zeros(len(rows), np.uint64)
        for masks in self.held.values():
            if number < len(masks.words):
                found |= masks.words[number].take(rows)
        held: Flags = (found & bit) != 0
        return held

    def needed(self, rows: Rows) -> Flags:
        """Which of these rows somebody holds, or is expected to."""
        found = np.zeros(len(rows), np.uint64)
        for masks in self._masks:
            for word in masks.words:
                found |= word.take(rows)
        needed: Flags = found != 0
        return needed

    def count(self, row: int, tier: Tier, number: int, group: int, main: int, held: bool) -> None:
        """One holding that a bit cannot express. `held`: it is not the source's first there."""
        by_bit = self.counts.setdefault(row, {})
        by_group = by_bit.get((tier, number))
        if by_group is None:
            by_group = by_bit[tier, number] = {main: 1} if held else {}
        if group in by_group or len(by_group) < MAX_GROUPS:
            by_group[group] = by_group.get(group, 0) + 1
        self.odd[row] = True

    def uncount(self, row: int, tier: Tier, number: int, group: int, main: int) -> bool | None:
        """One holding less. Returns whether it was the last one, None if there is none such."""
        by_bit = self.counts.get(row, {})
        by_group = by_bit.get((tier, number))
        if by_group is None:
            return True if group == main else None
        if group not in by_group:
            return None
        by_group[group] -= 1
        if not by_group[group]:
            del by_group[group]
        if not by_group or by_group == {main: 1}:
            self._forget_counts(row, (tier, number))
        return not by_group

    def release(self, rows: Rows) -> None:
        """Free those of these rows, all different, that nobody needs, and what only they kept."""
        for _ in range(_ROUNDS):
            rows = rows[~self.needed(rows)]
            if not len(rows):
                return
            rows = self._free(rows)
        if len(rows):
            self.unused.append(rows)

    def release_one(self, row: int) -> None:
        """As `release`, for one row."""
        for _ in range(_ROUNDS_OF_ONE):
            if self.below.item(row) or any(
                word.item(row) for masks in self._masks for word in masks.words
            ):
                return
            above = self.above.item(row) - 1
            self.table.delete_one(row)
            self.above[row] = _FREE
            if above < 0:
                return
            self.below[above] -= 1
            row = above
        self.unused.append(np.array([row], np.intp))

    def tails(self, ends: Rows, since: int, most: int) -> Rows:
        """The ends of chains, all different, and what only leads to them: about `most` rows.

        Only rows that were of no use since a time; ends are taken to be such.
        """
        found, number = [ends], len(ends)
        for _ in range(_LEVELS):
            if not len(ends) or number >= most:
                break
            above = self.above.take(ends).astype(np.intp) - 1
            inner = above >= 0
            above = above[inner]
            np.maximum.at(self.touched, above, self.touched.take(ends[inner]))
            ends = above[(self.below.take(above) == 1) & (self.touched.take(above) <= since)]
            found.append(ends)
            number += len(ends)
        return np.concatenate(found)

    def drop(self, rows: Rows) -> Rows:
        """Free these tails of chains, whoever holds them; returns the ends that this leaves."""
        for tier, masks in self.held.items():
            for number, word in enumerate(masks.words):
                held = word.take(rows) & self._sources.live[number]
                first = number * 64
                self._sources.held[tier, first : first + 64] -= bits_of(held[:, None]).sum(
                    axis=0, dtype=np.int64
                )
                word[rows] = 0
        for masks in self.fresh:
            for word in masks.words:
                word[rows] = 0
        for row in rows[self.odd.take(rows)].tolist():
            del self.counts[row]
            self.odd[row] = False
        return self._free(rows)

    def scrub(self, first: int, last: int, retired: NDArray[np.uint64]) -> None:
        """Take bits out of all sets of the rows first to last - 1, and free what is not needed."""
        changed = np.zeros(last - first, np.uint64)
        for masks in self._masks:
            for word, bits in zip(masks.words, retired, strict=False):
                if bits:
                    part = word[first:last]
                    changed |= part & bits
                    part &= ~bits
        numbers = set(np.flatnonzero(bits_of(retired)).tolist())
        for row in (np.flatnonzero(self.odd[first:last]) + first).tolist():
            for place in [place for place in self.counts[row] if place[1] in numbers]:
                self._forget_counts(row, place)
        self.release(np.flatnonzero(changed) + first)

    def _forget_counts(self, row: int, place: tuple[Tier, int]) -> None:
        by_bit = self.counts[row]
        del by_bit[place]
        if not by_bit:
            del self.counts[row]
            self.odd[row] = False

    def _free(self, rows: Rows) -> Rows:
        """Free those of these rows, all different, that no others need.

        Returns the ends of chains that this leaves, all different; somebody may hold them.
        """
        rows = rows[self.above.take(rows) != _FREE]
        above = self.above.take(rows) - 1
        np.subtract.at(self.below, above[above >= 0], 1)
        for left in range(_ROUNDS - 1, -1, -1):
            kept = self.below.take(rows) != 0
            if not kept.any():
                break
            if not left:
                # A long way up from a row that stays; from the ends upwards it takes no search.
                self.unused.append(rows)
                kept[:] = True
            inner = above[kept]
            np.add.at(self.below, inner[inner >= 0], 1)
            rows, above = rows[~kept], above[~kept]
        self.table.delete(rows)
        self.above[rows] = _FREE
        ends = above[above >= 0].astype(np.intp)
        ends = ends[self.is_end(ends)]
        return np.unique(ends) if len(ends) > 1 else ends
