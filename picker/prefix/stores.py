"""Blocks enter a pod's cache: many at once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from picker.prefix.aliases import Aliases
from picker.prefix.batches import as_keys, by_place, repeated
from picker.prefix.counts import Counts
from picker.prefix.events import Removed, Stored, Tier
from picker.prefix.keys import MASK, Extra, block_hashes, chain_keys, extra_hash, root
from picker.prefix.rows import Blocks, Flags
from picker.prefix.sources import Source, Sources
from picker.prefix.table import Keys, Rows

_ROUNDS = 4  # of storing what comes after an event that must be refused

Start = int | tuple[int, int]  # the key before a chain; or a chain before, and a position in it


class Stores:
    """Adds holdings."""

    def __init__(
        self,
        blocks: Blocks,
        aliases: Aliases,
        sources: Sources,
        counts: Counts,
        stored: Callable[[Source, Rows], None],
    ) -> None:
        """`stored` hears of rows that a source holds from now on."""
        self._blocks = blocks
        self._aliases = aliases
        self._sources = sources
        self._counts = counts
        self._on_stored = stored
        self._tick = 0  # blocks stored since the clock went on
        self._per_tick = max(1, blocks.table.max_rows >> 8)

    def store(
        self,
        source: Source,
        events: list[Stored],
        size: int,
        tier: Tier,
        group: int,
        repeats: bool,
    ) -> set[int]:
        """Store events that are alike in block size, tier and group.

        Returns:
            The hashes that are known now, if anything waits for such.
        """
        known: set[int] = set()
        orphans: list[Stored] = []
        for _ in range(_ROUNDS):
            events, starts, above = self._resolve(source, events, orphans)
            if not events:
                break
            firsts = np.cumsum([0, *(len(event.hashes) for event in events)])
            hashes, keys = self._keys(events, firsts[:-1], starts, size)
            names, entries, conflict = self._aliases.plan(source, hashes, keys)
            if repeats:
                conflict = _conflicts(hashes, keys, conflict)
            good = len(events)
            if conflict is not None:
                good = int(firsts.searchsorted(conflict.argmax(), "right")) - 1
                self._counts.refuse("conflict", len(events[good].hashes))
            end = int(firsts[good])
            if end:
                self._commit(
                    source,
                    tier,
                    group,
                    firsts[:good],
                    names[:end],
                    entries[:end],
                    keys[:end],
                    [
                        (start[1] if isinstance(start, tuple) else None, row)
                        for start, row in zip(starts[:good], above, strict=False)
                    ],
                )
                if source.orphans or orphans:
                    known.update(hashes[:end].tolist())
            events = events[good + 1 :]
        self._counts.refuse("conflict", sum(len(event.hashes) for event in events))
        for event in orphans:
            source.orphans.add(event)
        return known

    def _resolve(
        self, source: Source, events: list[Stored], orphans: list[Stored]
    ) -> tuple[list[Stored], list[Start], list[int]]:
        """Find what events begin after; those without it go to the orphans.

        Returns:
            The others, what each begins after, and the row of that: -1 for none, -2 for one of
            these events' own.
        """
        asked = {event.parent for event in events if event.parent is not None}
        known: dict[int | None, tuple[int, int]] = {}
        if asked:
            names = as_keys(asked)
            _, rows = self._aliases.find(source, names)
            keys = self._blocks.table.keys.take(rows)
            known = {
                name: (key, row)
                for name, key, row in zip(asked, keys.tolist(), rows.tolist(), strict=True)
                if row >= 0
            }
        found: list[Stored] = []
        starts: list[Start] = []
        above: list[int] = []
        lasts: dict[int, tuple[int, int]] = {}
        inner: dict[int, tuple[int, int]] | None = None
        position = 0
        for event in events:
            parent = event.parent
            start: Start | None
            if parent is None:
                start, row = root(event.block_size, event.adapter), -1
            elif parent in lasts:
                start, row = lasts[parent], -2
            elif parent in known:
                start, row = known[parent]
            else:
                if inner is None:
                    inner = _positions(found)
                start, row = inner.get(parent), -2
                if start is None:
                    orphans.append(event)
                    continue
            if inner is not None:
                inner.update(_positions([event], len(found), position))
            position += len(event.hashes)
            lasts[event.hashes[-1]] = (len(found), position - 1)
            found.append(event)
            starts.append(start)
            above.append(row)
        return found, starts, above

    def _keys(
        self, events: list[Stored], firsts: Rows, starts: list[Start], size: int
    ) -> tuple[Keys, Keys]:
        """The engine's hashes, and our keys."""
        names, tokens = array("Q"), array("I")
        for event in events:
            names.fromlist(event.hashes)
            tokens.fromlist(event.tokens)
        hashes = block_hashes(np.frombuffer(tokens, np.uint32), size)
        position = 0
        for event in events:
            if event.extra_keys and any(event.extra_keys):
                for place, extras in enumerate(event.extra_keys, position):
                    if extras:
                        added = _extra_hash(tuple(extras), event.lora_name)
                        hashes[place] = int(hashes[place]) + added & MASK
            position += len(event.hashes)
        return np.frombuffer(names, np.uint64), chain_keys(hashes, firsts, starts)

    def _commit(
        self,
        source: Source,
        tier: Tier,
        group: int,
        firsts: Rows,
        names: Keys,
        entries: Rows,
        keys: Keys,
        above: list[tuple[int | None, int]],
    ) -> None:
        """A source holds these blocks from now on.

        `firsts`: where each chain begins. `above`: what it begins after, either a position among
        these blocks or a row.
        """
        blocks = self._blocks
        rows = blocks.table.find(keys)
        missing = rows < 0
        end = _fitting(missing, blocks.table.room, len(keys))
        end = _fitting(entries < 0, self._aliases.table.room, end)
        if end < len(keys):
            self._counts.refuse("full", len(keys) - end)
            if not end:
                return
            names, entries, keys = names[:end], entries[:end], keys[:end]
            rows, missing, firsts = rows[:end], missing[:end], firsts[firsts < end]
        again = repeated(keys)
        if again is None:
            if missing.any():
                rows[missing] = blocks.new(keys[missing])
        else:
            new = missing & ~again
            rows[new] = blocks.new(keys[new])
            rows[again] = blocks.table.find(keys[again])
        before = np.empty(len(rows), np.intp)
        before[1:] = rows[:-1]
        before[firsts] = [
            row if position is None else int(rows[position])
            for position, row in above[: len(firsts)]
        ]
        if again is None:
            blocks.join(rows, before)
        else:
            blocks.join(rows[~again], before[~again])
        self._aliases.bind(source, names, entries, keys, again is None)
        self._hold(source, tier, group, rows, again)

    def _hold(
        self, source: Source, tier: Tier, group: int, rows: Rows, again: Flags | None
    ) -> None:
        """One holding more of each of these rows; `again`: of those that are here repeatedly."""
        blocks = self._blocks
        word, bit = blocks.held[tier].word(source.word), source.bit
        old = word.take(rows)
        word[rows] = old | bit
        held = (old & bit) != 0
        if again is not None:
            held |= again
        assert source.main is not None
        num_held = int(np.count_nonzero(held))
        if num_held or group != source.main:
            counted = np.flatnonzero(held) if group == source.main else range(len(rows))
            for position in counted:
                blocks.count(
                    int(rows[position]),
                    tier,
                    source.number,
                    group,
                    source.main,
                    bool(held[position]),
                )
        self._sources.held[tier, source.number] += len(rows) - num_held
        self.note(source, rows)

    def note(self, source: Source, rows: Rows) -> None:
        """What is the same for all that is stored."""
        blocks = self._blocks
        self._counts.stored += len(rows)
        blocks.touched[rows] = blocks.now
        self._tick += len(rows)
        if self._tick >= self._per_tick:
            self._tick = 0
            blocks.now += 1
        self._on_stored(source, rows)

    def adopt(self, source: Source, known: set[int]) -> list[Removed]:
        """These hashes are known now: store what waited for them, and what waited for that.

        Returns:
            What is to be removed of it, as it was told meanwhile.
        """
        removed: list[Removed] = []
        while found := source.orphans.of(known):
            known = set()
            places: dict[tuple[int, Tier, int], list[Stored]] = {}
            for orphan in found:
                removed += orphan.removed
                event = orphan.event
                places.setdefault((event.block_size, event.tier, event.group), []).append(event)
            for place, events in places.items():
                known |= self.store(source, events, *place, True)
        return removed

    def copy(self, source: Source, events: list[Stored]) -> None:
        """Blocks that are known by their hashes are somewhere else, too."""
        for (tier, group), names in by_place(events).items():
            _, rows = self._aliases.find(source, as_keys(names))
            known = rows >= 0
            self._counts.unresolved += len(rows) - int(np.count_nonzero(known))
            rows = rows[known]
            if len(rows):
                self._hold(source, tier, group, rows, repeated(rows))


def _conflicts(hashes: Keys, keys: Keys, known: Flags | None) -> Flags | None:
    """As `known`, and those whose hash has another meaning than an equal one before."""
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    conflict: Flags = keys[first[which]] != keys
    if known is not None:
        conflict |= known
    return conflict if conflict.any() else None


def _fitting(missing: Flags, room: int, end: int) -> int:
    """How many of the first ones fit where there is room for so many that are missing."""
    if len(missing) <= room:
        return end
    over = np.flatnonzero(missing)[room:]
    return min(end, int(over[0])) if len(over) else end


def _positions(
    events: list[Stored], chain: int = 0, position: int = 0
) -> dict[int, tuple[int, int]]:
    """Where each hash of these events is: the event's number, and the block's among all."""
    found = {}
    for number, event in enumerate(events, chain):
        for name in event.hashes:
            found[name] = (number, position)
            position += 1
    return found


@lru_cache(maxsize=512)
def _extra_hash(extras: tuple[Extra, ...], adapter: str | None) -> int:
    """As `extra_hash`; the adapter's name, which engines put there too, is in the root already."""
    if adapter is not None and adapter in extras:
        at = extras.index(adapter)
        extras = extras[:at] + extras[at + 1 :]
    return extra_hash(extras)
