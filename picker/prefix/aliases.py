"""What engines call blocks: their hashes, and the keys that these stand for.

Engines that hash alike share one entry for a block. Where a source means another block by a hash
than others do, it has an entry of its own, under another name.
"""

from __future__ import annotations

import numpy as np

from picker.prefix.rows import Blocks, Flags
from picker.prefix.sources import Masks, Source, Sources
from picker.prefix.table import Keys, Rows, Table


class Aliases:
    """Hashes to keys. Each entry has the set of sources that mean it; it is never empty.

    That a source has an entry does not say that it still holds the block.
    """

    def __init__(self, max_entries: int, blocks: Blocks, sources: Sources) -> None:
        self.table = Table(max_entries)
        self.keys: Keys = np.zeros(max_entries, np.uint64)
        self.masks = Masks(max_entries)  # who means an entry
        self._blocks = blocks
        self._sources = sources

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        """What has been written of its columns."""
        return self.table.num_bytes + self.table.top * 8 * (1 + len(self.masks.words))

    def find(self, source: Source, hashes: Keys) -> tuple[Rows, Rows]:
        """The entry of each hash, and the row of its block, for blocks that the source holds.

        Both are -1 for others.
        """
        entries = self._entries(source, hashes)
        rows = self._blocks.table.find(self.keys.take(entries))
        unknown = entries < 0
        if unknown.any():
            rows[unknown] = -1
        held = self._blocks.holds(rows, source.word, source.bit)
        held &= rows >= 0
        if not held.all():
            entries[~held] = -1
            rows[~held] = -1
        return entries, rows

    def plan(self, source: Source, hashes: Keys, keys: Keys) -> tuple[Keys, Rows, Flags | None]:
        """What it takes to let these hashes, for a source, stand for these keys.

        Returns:
            The name of each, its entry or -1, and which are in conflict with what the source
            said before; None: none.
        """
        entries = self.table.find(hashes)
        other = self.keys.take(entries) != keys
        other &= entries >= 0
        if not source.renamed and not other.any():
            return hashes, entries, None
        names = hashes.copy()
        conflict = np.zeros(len(hashes), np.bool_)
        mine = self._mine(source, entries)
        foreign = np.flatnonzero(~mine & (other | source.renamed))
        if len(foreign):
            salted = self._salted(source, hashes[foreign])
            own = self.table.find(salted)
            use = (own >= 0) | other[foreign]
            names[foreign[use]] = salted[use]
            entries[foreign[use]] = own[use]
            source.renamed = True
        mine = self._mine(source, entries)
        other = mine & (self.keys.take(entries) != keys)
        if other.any():
            at = np.flatnonzero(other)
            rows = self._blocks.table.find(self.keys.take(entries[at]))
            held = (rows >= 0) & self._blocks.holds(rows, source.word, source.bit)
            conflict[at[held]] = True
            self.forget(source, np.unique(entries[at[~held]]))
            return self.plan(source, hashes, keys) if not held.all() else (names, entries, conflict)
        return names, entries, None

    def bind(self, source: Source, names: Keys, entries: Rows, keys: Keys, unique: bool) -> None:
        """Do what was planned; there must be room. `unique`: no name is there twice."""
        missing = np.flatnonzero(entries < 0)
        if len(missing):
            if unique:
                new = self.table.insert(names[missing])
                self.keys[new] = keys[missing]
                entries[missing] = new
            else:
                different, first, which = np.unique(
                    names[missing], return_index=True, return_inverse=True
                )
                new = self.table.insert(different)
                self.keys[new] = keys[missing[first]]
                entries[missing] = new[which]
        self.masks.word(source.word)[entries] |= source.bit

    def forget(self, source: Source, entries: Rows) -> None:
        """A source means these entries, all different, no more."""
        self.masks.word(source.word)[entries] &= ~source.bit
        self.table.delete(entries[~self.masks.any(entries)])

    def sweep(self, first: int, last: int) -> None:
        """Forget, among the entries first to last - 1, what sources do not hold any more."""
        entries = np.arange(first, last)
        entries = entries[self.masks.any(entries)]
        rows = self._blocks.table.find(self.keys.take(entries))
        gone = rows < 0
        for number, word in enumerate(self.masks.words):
            holders = np.zeros(len(rows), np.uint64)
            for masks in self._blocks.held.values():
                if number < len(masks.words):
                    holders |= masks.words[number].take(rows)
            holders &= self._sources.live[number]
            holders[gone] = 0
            word[entries] &= holders
        self.table.delete(entries[~self.masks.any(entries)])

    def _entries(self, source: Source, hashes: Keys) -> Rows:
        """The entry of each hash that the source has, or -1."""
        entries = self.table.find(hashes)
        mine = self._mine(source, entries)
        if mine.all():
            return entries
        entries[~mine] = -1
        if source.renamed:
            rest = np.flatnonzero(~mine)
            own = self.table.find(self._salted(source, hashes[rest]))
            own[~self._mine(source, own)] = -1
            entries[rest] = own
        return entries

    def _mine(self, source: Source, entries: Rows) -> Flags:
        mine: Flags = (self.masks.word(source.word).take(entries) & source.bit) != 0
        mine &= entries >= 0
        return mine

    @staticmethod
    def _salted(source: Source, hashes: Keys) -> Keys:
        """Other names for these hashes: different for different hashes, and for each source."""
        return (hashes ^ source.salt) * np.uint64(0x9E3779B97F4A7C15)
