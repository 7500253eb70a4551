"""Applies KV events to the index: many blocks at a time, as far as their order allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from picker.prefix.aliases import Aliases
from picker.prefix.checks import Checks
from picker.prefix.counts import Counts
from picker.prefix.events import Event, Removed, Stored, num_blocks, tier_of
from picker.prefix.few import Few
from picker.prefix.removals import Removals
from picker.prefix.rows import Blocks
from picker.prefix.sources import Source, Sources
from picker.prefix.stores import Stores
from picker.prefix.table import Rows

FEW = 16  # blocks that are faster one by one


@dataclass(slots=True)
class _Window:
    """Events that may be applied kind by kind: removals, then stores, then copies."""

    removed: list[Removed] = field(default_factory=list)
    # By block size, medium and group.
    stored: dict[tuple[int, str | None, int], list[Stored]] = field(default_factory=dict)
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
        self._checks = Checks(sources, self.counts)
        self._stores = Stores(blocks, aliases, sources, self.counts, stored)
        self._removals = Removals(blocks, aliases, sources, self.counts)
        self._few = Few(blocks, aliases, sources)
        self._on_clear = clear

    @property
    def adapters(self) -> Set[str]:
        """Names of LoRA adapters that blocks were told of."""
        return self._checks.adapters

    def apply(self, source: Source, events: Sequence[Event]) -> None:
        """Apply a source's events, in order."""
        if len(events) <= FEW and sum(map(num_blocks, events)) <= FEW:
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
        elif isinstance(event, Stored) and event.tokens and self._checks.accepts(source, event):
            rows = self._few.store(source, event)
            if rows is None:
                place = (event.block_size, event.medium, event.group)
                self._flush(source, _Window(stored={place: [event]}))
            else:
                self._stores.note(source, rows)
        elif not (isinstance(event, Stored) and event.tokens):
            self._apply_many(source, [event])

    def _apply_many(self, source: Source, events: Sequence[Event]) -> None:
        window = _Window()
        for event in events:
            if isinstance(event, Stored):
                if not self._checks.accepts(source, event):
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
                place = (event.block_size, event.medium, event.group)
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
            self._removals.remove(source, window.removed)
        for (size, medium, group), events in window.stored.items():
            tier = tier_of(medium)
            known = self._stores.store(source, events, size, tier, group, window.repeats)
            if known and source.orphans:
                removed = self._stores.adopt(source, known)
                if removed:
                    self._removals.remove(source, removed)
        if window.copies:
            self._stores.copy(source, window.copies)
