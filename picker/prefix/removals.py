"""Blocks leave a pod's cache: many at once."""

from __future__ import annotations

import numpy as np

from picker.prefix.aliases import Aliases
from picker.prefix.batches import as_keys, by_place, repeated
from picker.prefix.counts import Counts
from picker.prefix.events import Removed, Tier
from picker.prefix.rows import Blocks, Flags
from picker.prefix.sources import Source, Sources
from picker.prefix.table import Rows


class Removals:
    """Takes holdings away."""

    def __init__(self, blocks: Blocks, aliases: Aliases, sources: Sources, counts: Counts) -> None:
        self._blocks = blocks
        self._aliases = aliases
        self._sources = sources
        self._counts = counts

    def remove(self, source: Source, events: list[Removed]) -> None:
        """One holding less of each of these blocks, for each time that it is told."""
        for (tier, group), names in by_place(events).items():
            self._remove_from(source, tier, group, names)

    def _remove_from(self, source: Source, tier: Tier, group: int, names: list[int]) -> None:
        """One holding less of each of these blocks."""
        blocks = self._blocks
        entries, rows = self._aliases.find(source, as_keys(names))
        word, bit = blocks.held[tier].word(source.word), source.bit
        held = (word.take(rows) & bit) != 0
        held &= rows >= 0
        again = repeated(rows[held])
        if again is not None or group != source.main or blocks.odd.take(rows[held]).any():
            gone, unknown = self._uncount(source, tier, group, rows, held)
        else:
            gone = np.flatnonzero(held)
            unknown = [] if len(gone) == len(held) else np.flatnonzero(~held).tolist()
        for position in unknown:
            if not source.orphans.cancel(names[position], tier, group):
                self._counts.unknown_removed += 1
        self._counts.removed += len(names) - len(unknown)
        if not len(gone):
            return
        entries, rows = entries[gone], rows[gone]
        word[rows] &= ~bit
        self._sources.held[tier, source.number] -= len(rows)
        left = blocks.holds(rows, source.word, bit)
        if left.any():
            entries, rows = entries[~left], rows[~left]
        if len(rows):
            self._aliases.forget(source, entries)
            blocks.release(rows)

    def _uncount(
        self, source: Source, tier: Tier, group: int, rows: Rows, held: Flags
    ) -> tuple[Rows, list[int]]:
        """Which positions end the last holding of a block, and which are of none."""
        gone: dict[int, int] = {}
        unknown: list[int] = []
        for position, (row, known) in enumerate(zip(rows.tolist(), held.tolist(), strict=True)):
            last = None
            if known and row not in gone and source.main is not None:
                last = self._blocks.uncount(row, tier, source.number, group, source.main)
            if last is None:
                unknown.append(position)
            elif last:
                gone[row] = position
        return np.array(list(gone.values()), np.intp), unknown
