"""The usual events of few blocks, one by one: without what each call of NumPy costs.

A pod that decodes tells of a block at a time. What is not usual (repeats, other groups, orphans,
hashes of other meanings) is left to `intake.py`, which can do all of it.
"""

from __future__ import annotations

import numpy as np

from picker.prefix.aliases import Aliases
from picker.prefix.events import Stored, Tier
from picker.prefix.keys import block_hash, next_key, root
from picker.prefix.rows import Blocks
from picker.prefix.sources import Source, Sources
from picker.prefix.table import Rows


class Few:
    """Does what Intake does, where it can."""

    def __init__(self, blocks: Blocks, aliases: Aliases, sources: Sources) -> None:
        self._blocks = blocks
        self._aliases = aliases
        self._sources = sources

    def store(self, source: Source, event: Stored) -> Rows | None:
        """The rows that the source holds now; None: nothing was done, as this is not usual."""
        if event.group != source.main or source.renamed or source.orphans:
            return None
        if event.extra_keys and any(event.extra_keys):
            return None
        blocks, aliases, tier, number = self._blocks, self._aliases, event.tier, source.word
        if min(blocks.table.room, aliases.table.room) < len(event.hashes):
            return None
        if event.parent is None:
            key, above = root(event.block_size, event.adapter), -1
        else:
            _, above = self._find(source, event.parent)
            if above < 0:
                return None
            key = blocks.table.keys.item(above)
        bit = int(source.bit)
        held = blocks.held[tier].word(number)
        size = event.block_size
        keys, entries, rows = [], [], []
        for place, name in enumerate(event.hashes):
            key = next_key(key, block_hash(event.tokens[place * size : (place + 1) * size]))
            row = blocks.table.find_one(key)
            entry = aliases.table.find_one(name)
            if (entry >= 0 and aliases.keys.item(entry) != key) or (
                row >= 0 and held.item(row) & bit
            ):
                return None
            keys.append(key)
            entries.append(entry)
            rows.append(row)
        means = aliases.masks.word(number)
        for place, (name, key, entry, row) in enumerate(
            zip(event.hashes, keys, entries, rows, strict=True)
        ):
            if entry < 0:
                entry = aliases.table.insert_one(name)
                aliases.keys[entry] = key
            means[entry] = means.item(entry) | bit
            if row < 0:
                row = rows[place] = blocks.table.insert_one(key)
                blocks.above[row] = 0
            if above >= 0 and not blocks.above.item(row):
                blocks.above[row] = above + 1
                blocks.below[above] += 1
            held[row] = held.item(row) | bit
            above = row
        self._sources.held[tier, source.number] += len(rows)
        return np.array(rows, np.intp)

    def remove(self, source: Source, tier: Tier, name: int) -> bool | None:
        """A holding of the main group ends. Returns whether there was one; None: not usual."""
        entry, row = self._find(source, name)
        blocks = self._blocks
        if row < 0:
            return None if source.orphans or source.renamed else False
        if blocks.odd.item(row):
            return None
        bit = int(source.bit)
        held = blocks.held[tier].word(source.word)
        if not held.item(row) & bit:
            return None if source.orphans else False
        held[row] = held.item(row) & ~bit
        self._sources.held[tier, source.number] -= 1
        if not self._holds(row, source.word, bit):
            means = self._aliases.masks.word(source.word)
            means[entry] = means.item(entry) & ~bit
            if not any(word.item(entry) for word in self._aliases.masks.words):
                self._aliases.table.delete_one(entry)
            blocks.release_one(row)
        return True

    def _find(self, source: Source, name: int) -> tuple[int, int]:
        """The entry of a hash, and the row of its block, if the source holds it; or -1."""
        entry = self._aliases.table.find_one(name)
        bit = int(source.bit)
        if entry < 0 or not self._aliases.masks.word(source.word).item(entry) & bit:
            return -1, -1
        row = self._blocks.table.find_one(self._aliases.keys.item(entry))
        if row < 0 or not self._holds(row, source.word, bit):
            return -1, -1
        return entry, row

    def _holds(self, row: int, number: int, bit: int) -> bool:
        return any(
            number < len(masks.words) and masks.words[number].item(row) & bit
            for masks in self._blocks.held.values()
        )
