"""Applies KV events to the index: many blocks at a time, as far as their order allows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from picker.prefix.aliases import Aliases
from picker.prefix.events import Cleared, Event, Removed, Stored, Tier
from picker.prefix.few import Few
from picker.prefix.keys import MASK, Extra, block_hashes, chain_keys, extra_hash, root
from picker.prefix.rows import Blocks, Flags
from picker.prefix.sources import Source, Sources
from picker.prefix.table import Keys, Rows

# Kinds of attention whose blocks are good for any prompt that begins with them. Others (sliding
# windows, Mamba states) hold only what the end of a prompt needs.
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
FEW = 16  # blocks that are faster one by one
MAX_SIZES = 8  # block sizes in use at the same time: a prompt is looked up once for each
MAX_SKIPPED = 64  # groups of a source that are known to be no full attention
MAX_ADAPTERS = 4096  # whose names are kept
_ROUNDS = 16  # of storing what comes after an event that must be refused

Start = int | tuple[int, int]  # the key before a chain; or a chain before, and a position in it


@dataclass(slots=True)
class Counts:
    """What became of events, in blocks, ever."""

    stored: int = 0
    removed: int = 0
    unknown_removed: int = 0  # not held: told of before we listened, evicted here, or never
    skipped: int = 0  # of groups without full attention
    unresolved: int = 0  # stored without token ids, under hashes that are not known
    refused: Counter[str] = field(default_factory=Counter)  # by reason


@dataclass(slots=True)
class _Window:
    """Events that may be applied kind by kind: removals, then stores, then copies."""

    removed: list[Removed] = field(default_factory=list)
    stored: dict[tuple[int, Tier, int], list[Stored]] = field(default_factory=dict)
    copies: list[Stored] = field(default_factory=list)
    names: set[int] = field(default_factory=set)  # stored
    parents: set[int | None] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    repeats: bool = False  # a name is stored twice

    def concerns(self, source: Source, event: Removed) -> bool:
        """Whether this removal must not come before what is here."""
        if not self.names and not self.copied:
            return False
        for name in event.hashes:
            if name in self.names or name in self.parents or name in self.copied:
                return True
        return bool(source.orphans) and source.orphans.has(event)


class Intake:
    """Changes blocks and aliases as events tell."""

    def __init__(
        self,
        blocks: Blocks,
        aliases: Aliases,
        sources: Sources,
        stored: Callable[[Source, Rows], None],
        clear: Callable[[Source], None],
    ) -> None:
        """`stored` hears of rows that a source holds from now on, `clear` of events to clear it."""
        self.counts = Counts()
        self.adapters: set[str] = set()  # that blocks were told of
        self._blocks = blocks
        self._aliases = aliases
        self._sources = sources
        self._on_stored = stored
        self._on_clear = clear
        self._few = Few(blocks, aliases, sources)
        self._tick = 0  # blocks stored since the clock went on
        self._per_tick = max(1, blocks.table.max_rows >> 8)

    def apply(self, source: Source, events: Sequence[Event]) -> None:
        """Apply a source's events, in order."""
        if len(events) <= FEW and sum(map(_size, events)) <= FEW:
            for event in events:
                self._apply_few(source, event)
        else:
            self._apply_many(source, events)

    def _apply_few(self, source: Source, event: Event) -> None:
        """Apply an event of few blocks."""
        if isinstance(event, Removed) and event.group == source.main not in source.skipped:
            for name in event.hashes:
                known = self._few.remove(source, event.tier, name)
                if known is None:
                    self._apply_many(source, [Removed([name], event.medium, event.group)])
                elif known:
                    self.counts.removed += 1
                else:
                    self.counts.unknown_removed += 1
        elif isinstance(event, Stored) and event.tokens and self._accepts(source, event):
            rows = self._few.store(source, event)
            if rows is None:
                place = (event.block_size, event.tier, event.group)
                self._flush(source, _Window(stored={place: [event]}))
            else:
                self._note(source, rows)
        elif not (isinstance(event, Stored) and event.tokens):
            self._apply_many(source, [event])

    def _apply_many(self, source: Source, events: Sequence[Event]) -> None:
        window = _Window()
        for event in events:
            if isinstance(event, Stored):
                if not self._accepts(source, event):
                    continue
                if not event.tokens:
                    window.copied.update(event.hashes)
                    window.copies.append(event)
                    continue
                if window.copied and (source.orphans or not window.copied.isdisjoint(event.hashes)):
                    self._flush(source, window)
                    window = _Window()
                before = len(window.names)
                window.names.update(event.hashes)
                if len(window.names) - before != len(event.hashes):
                    window.repeats = True
                window.parents.add(event.parent)
                place = (event.block_size, event.tier, event.group)
                window.stored.setdefault(place, []).append(event)
            elif isinstance(event, Removed):
                if event.group in source.skipped:
                    self.counts.skipped += len(event.hashes)
                    continue
                if window.concerns(source, event):
                    self._flush(source, window)
                    window = _Window()
                window.removed.append(event)
            else:
                self._flush(source, window)
                window = _Window()
                self._on_clear(source)
        self._flush(source, window)

    def _flush(self, source: Source, window: _Window) -> None:
        if window.removed:
            self._remove(source, window.removed)
        for place, events in window.stored.items():
            known = self._store(source, events, *place, window.repeats)
            if known and source.orphans:
                self._adopt(source, known)
        if window.copies:
            self._copy(source, window.copies)

    # What can be said of an event alone

    def _accepts(self, source: Source, event: Stored) -> bool:
        hashes, parent, size = event.hashes, event.parent, event.block_size
        count = len(hashes)
        if event.kind not in FULL_ATTENTION:
            self.counts.skipped += count
            if len(source.skipped) < MAX_SKIPPED:
                source.skipped.add(event.group)
            return False
        reason = None
        if (event.tokens and len(event.tokens) != count * size) or (
            event.extra_keys and len(event.extra_keys) != count
        ):
            reason = "misaligned"
        elif count == 1:
            if hashes[0] == parent:
                reason = "self-parent"
        else:
            different = set(hashes)
            if len(different) != count:
                reason = "repeated"
            elif parent in different:
                reason = "self-parent"
        if reason is None and event.tokens and size not in source.sizes:
            sizes = self._sources.block_sizes()
            if size not in sizes and len(sizes) >= MAX_SIZES:
                reason = "block size"
            else:
                source.sizes.add(size)
                source.block_size = size
                self._sources.revision += 1
        if reason is not None:
            self._refuse(reason, count)
            return False
        if event.lora_name is not None and len(self.adapters) < MAX_ADAPTERS:
            self.adapters.add(event.lora_name)
        if source.main is None:
            source.main = event.group
        return count > 0

    def _refuse(self, reason: str, blocks: int) -> None:
        if blocks:
            self.counts.refused[reason] += blocks

    # Stored

    def _store(
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
                self._refuse("conflict", len(events[good].hashes))
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
        self._refuse("conflict", sum(len(event.hashes) for event in events))
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
            names = _as_keys(asked)
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
            self._refuse("full", len(keys) - end)
            if not end:
                return
            names, entries, keys = names[:end], entries[:end], keys[:end]
            rows, missing, firsts = rows[:end], missing[:end], firsts[firsts < end]
        again = _again(keys)
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
        self._note(source, rows)

    def _note(self, source: Source, rows: Rows) -> None:
        """What is the same for all that is stored."""
        blocks = self._blocks
        self.counts.stored += len(rows)
        blocks.touched[rows] = blocks.now
        self._tick += len(rows)
        if self._tick >= self._per_tick:
            self._tick = 0
            blocks.now += 1
        self._on_stored(source, rows)

    def _adopt(self, source: Source, known: set[int]) -> None:
        """These hashes are known now: store what waited for them, and what waited for that."""
        removed: list[Removed] = []
        while found := source.orphans.of(known):
            known = set()
            places: dict[tuple[int, Tier, int], list[Stored]] = {}
            for orphan in found:
                removed += orphan.removed
                event = orphan.event
                places.setdefault((event.block_size, event.tier, event.group), []).append(event)
            for place, events in places.items():
                known |= self._store(source, events, *place, True)
        if removed:
            self._remove(source, removed)

    # Copies: stored without tokens

    def _copy(self, source: Source, events: list[Stored]) -> None:
        """Blocks that are known by their hashes are somewhere else, too."""
        for (tier, group), names in _by_place(events).items():
            _, rows = self._aliases.find(source, _as_keys(names))
            known = rows >= 0
            self.counts.unresolved += len(rows) - int(np.count_nonzero(known))
            rows = rows[known]
            if len(rows):
                self._hold(source, tier, group, rows, _again(rows))

    # Removed

    def _remove(self, source: Source, events: list[Removed]) -> None:
        for (tier, group), names in _by_place(events).items():
            self._remove_from(source, tier, group, names)

    def _remove_from(self, source: Source, tier: Tier, group: int, names: list[int]) -> None:
        """One holding less of each of these blocks."""
        blocks = self._blocks
        entries, rows = self._aliases.find(source, _as_keys(names))
        word, bit = blocks.held[tier].word(source.word), source.bit
        held = (word.take(rows) & bit) != 0
        held &= rows >= 0
        again = _again(rows[held])
        if again is not None or group != source.main or blocks.odd.take(rows[held]).any():
            gone, unknown = self._uncount(source, tier, group, rows, held)
        else:
            gone = np.flatnonzero(held)
            unknown = [] if len(gone) == len(held) else np.flatnonzero(~held).tolist()
        for position in unknown:
            if not source.orphans.cancel(names[position], tier, group):
                self.counts.unknown_removed += 1
        self.counts.removed += len(names) - len(unknown)
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


def _size(event: Event) -> int:
    return 0 if isinstance(event, Cleared) else len(event.hashes)


def _as_keys(names: Iterable[int]) -> Keys:
    return np.frombuffer(array("Q", names), np.uint64) if names else np.empty(0, np.uint64)


def _by_place(events: Iterable[Stored | Removed]) -> dict[tuple[Tier, int], list[int]]:
    """The hashes of events by tier and group, in order."""
    places: dict[tuple[Tier, int], list[int]] = {}
    for event in events:
        places.setdefault((event.tier, event.group), []).extend(event.hashes)
    return places


def _again(values: Keys | Rows) -> Flags | None:
    """Which of these are equal to an earlier one; None: none."""
    ordered = np.sort(values)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    again = np.ones(len(values), np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again


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


@lru_cache(maxsize=4096)
def _extra_hash(extras: tuple[Extra, ...], adapter: str | None) -> int:
    """As `extra_hash`; the adapter's name, which engines put there too, is in the root already."""
    if adapter is not None and adapter in extras:
        at = extras.index(adapter)
        extras = extras[:at] + extras[at + 1 :]
    return extra_hash(extras)
