"""Stored blocks whose parents are not known yet: kept for a while, as they may still be told of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from picker.prefix.events import Removed, Stored, Tier

MAX_BLOCKS = 8192  # of one source
MAX_ALL_BLOCKS = 1 << 15  # 20 MB

Place = tuple[int, Tier, int]  # hash, tier, group


@dataclass(slots=True, eq=False)
class Orphan:
    """An event that waits for its parent, and what was removed of its blocks meanwhile."""

    event: Stored
    owner: Orphans
    removed: list[Removed] = field(default_factory=list)
    waits: bool = True


class Nursery:
    """All orphans, oldest first."""

    def __init__(self) -> None:
        self.blocks = 0
        self.dropped = 0  # blocks, ever
        self.line: deque[Orphan] = deque()

    def make_room(self) -> None:
        """Drop the oldest while there are too many."""
        while self.blocks > MAX_ALL_BLOCKS:
            orphan = self.line.popleft()
            if orphan.waits:
                orphan.owner.drop(orphan)
        while self.line and not self.line[0].waits:
            self.line.popleft()


class Orphans:
    """Those of one source."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._line: deque[Orphan] = deque()
        self._by_parent: dict[int, list[Orphan]] = {}
        self._by_place: dict[Place, list[Orphan]] = {}  # as often as it is stored there
        self.blocks = 0

    def __bool__(self) -> bool:
        return self.blocks > 0

    def has(self, event: Removed) -> bool:
        """Whether a block that waits is among these."""
        tier, group = event.tier, event.group
        return any((name, tier, group) in self._by_place for name in event.hashes)

    def add(self, event: Stored) -> None:
        """Keep an event; older ones are dropped for it, if need be."""
        orphan = Orphan(event, self)
        assert event.parent is not None
        self._line.append(orphan)
        self._nursery.line.append(orphan)
        self._by_parent.setdefault(event.parent, []).append(orphan)
        tier, group = event.tier, event.group
        for name in event.hashes:
            self._by_place.setdefault((name, tier, group), []).append(orphan)
        self.blocks += len(event.hashes)
        self._nursery.blocks += len(event.hashes)
        while self.blocks > MAX_BLOCKS:
            oldest = self._line.popleft()
            if oldest.waits:
                self.drop(oldest)
        while self._line and not self._line[0].waits:
            self._line.popleft()
        self._nursery.make_room()

    def cancel(self, name: int, tier: Tier, group: int) -> bool:
        """A block was removed. Returns whether one that waits is meant."""
        waiting = self._by_place.get((name, tier, group))
        if not waiting:
            return False
        orphan = waiting.pop(0)
        if not waiting:
            del self._by_place[name, tier, group]
        orphan.removed.append(Removed([name], orphan.event.medium, group))
        return True

    def of(self, names: set[int]) -> list[Orphan]:
        """Take out those whose parent is one of these, oldest first."""
        found = [
            orphan
            for parent in self._by_parent.keys() & names
            for orphan in self._by_parent[parent]
        ]
        if len(found) > 1:
            order = {id(orphan): place for place, orphan in enumerate(self._line)}
            found.sort(key=lambda orphan: order[id(orphan)])
        for orphan in found:
            self._leave(orphan)
        return found

    def drop(self, orphan: Orphan) -> None:
        """Give one up."""
        self._nursery.dropped += len(orphan.event.hashes)
        self._leave(orphan)

    def clear(self) -> None:
        """Forget all: the source holds nothing any more."""
        for orphan in self._line:
            if orphan.waits:
                self._leave(orphan)
        self._line.clear()

    def _leave(self, orphan: Orphan) -> None:
        event = orphan.event
        orphan.waits = False
        assert event.parent is not None
        siblings = self._by_parent[event.parent]
        siblings.remove(orphan)
        if not siblings:
            del self._by_parent[event.parent]
        tier, group = event.tier, event.group
        for name in event.hashes:
            place = (name, tier, group)
            waiting = self._by_place.get(place, [])
            if orphan in waiting:
                waiting.remove(orphan)
                if not waiting:
                    del self._by_place[place]
        self.blocks -= len(event.hashes)
        self._nursery.blocks -= len(event.hashes)
