"""The precise prefix index: which pod holds which blocks, as pods tell by KV events.

Blocks have keys of our own, made of their tokens (`keys.py`), so that pods whose engines hash in
different ways are compared by content. A prompt is looked up for all pods at once (`lookup.py`).
All of it is NumPy columns over two hash tables (`table.py`): blocks by key with the set of their
holders (`rows.py`), and engine hashes with the keys they mean (`aliases.py`). Memory is bounded:
what was of no use for longest is evicted, from the ends of chains (`upkeep.py`).

Nothing here waits or locks. One event loop owns an index and calls `tidy` between other work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from picker.prefix.aliases import Aliases
from picker.prefix.events import Event, Tier
from picker.prefix.fresh import Fresh
from picker.prefix.intake import Intake
from picker.prefix.keys import TokenPrompt, prompt_keys
from picker.prefix.lookup import Lookup, depths
from picker.prefix.orphans import Nursery, Orphans
from picker.prefix.rows import Blocks
from picker.prefix.sources import Source, Sources
from picker.prefix.table import Keys, Rows
from picker.prefix.upkeep import FULL, Upkeep

BLOCK_SIZE = 16  # tokens: vLLM's default, assumed of pods until they tell
ALIASES_PER_BLOCK = 2  # at most, on average; engines that hash alike share them

N = TypeVar("N", np.int32, np.float32)

__all__ = ["BlockIndex", "Lookup", "Source", "Stats", "TokenPrompt"]


@dataclass(slots=True)
class Stats:
    """Sizes now, and counts ever; all but sizes are in blocks."""

    blocks: int  # different ones that are known
    max_blocks: int
    held: int  # by all sources together: what two of them hold counts twice
    tiers: dict[Tier, int]  # the same, by tier
    aliases: int  # engine hashes
    sources: int
    orphans: int
    num_bytes: int  # of memory
    stored: int
    removed: int
    unknown_removed: int  # of blocks that were not held: evicted here, or never told of
    refused: Counter[str]  # by reason
    skipped: int  # of groups without full attention
    unresolved: int  # stored without token ids, and not known by their hashes
    evicted: int
    dropped: int  # orphans, to make room for others


class BlockIndex:
    """Who holds what, told by events."""

    def __init__(self, capacity: int = 0, max_blocks: int = 1 << 22, *, fresh: float = 2.0) -> None:
        """
        Args:
            capacity: all slots are below it. It is the length of the columns of `match`.
            max_blocks: different blocks that are known at the same time.
            fresh: seconds that a pick counts at least, until events tell; 0: picks do not count.
        """
        self.capacity = capacity
        self._block_sizes = np.full(capacity, BLOCK_SIZE, np.int32)  # by slot
        self._view: _View | None = None
        self._sources = Sources()
        self._blocks = Blocks(max_blocks, self._sources)
        self._aliases = Aliases(ALIASES_PER_BLOCK * max_blocks, self._blocks, self._sources)
        self._nursery = Nursery()
        self._fresh = Fresh(self._blocks, fresh)
        self._intake = Intake(self._blocks, self._aliases, self._sources, self._stored, self.clear)
        self._upkeep = Upkeep(self._blocks, self._aliases, self._sources, self._fresh)
        # Told of the blocks that a pick lets us expect, as `expect_chain` takes them.
        self.on_expect: Callable[[int, Keys, bool], None] | None = None

    def __len__(self) -> int:
        """Different blocks that are known."""
        return len(self._blocks)

    def grow(self, capacity: int) -> None:
        """Make room for slots up to `capacity`."""
        if capacity > self.capacity:
            more = np.full(capacity - self.capacity, BLOCK_SIZE, np.int32)
            self._block_sizes = np.concatenate((self._block_sizes, more))
            self.capacity = capacity
            self._view = None

    def open(self, slot: int) -> Source:
        """A publisher of a pod, which holds nothing yet. A pod may have several, one for each rank.

        What a pod holds is the most that one of them does.

        Raises:
            IndexError: the slot is not below the capacity.
        """
        if not 0 <= slot < self.capacity:
            raise IndexError(f"slot {slot} of an index with {self.capacity}")
        source = Source(slot, self._sources.take(), Orphans(self._nursery))
        self._sources.by_slot.setdefault(slot, []).append(source)
        self._sources.enter(source)
        return source

    def close(self, source: Source) -> None:
        """A publisher is gone, with all that it held. What it says from now on is not heard."""
        if not source.open:
            return
        source.open = False
        source.orphans.clear()
        self._sources.retire(source)
        siblings = self._sources.by_slot[source.slot]
        siblings.remove(source)
        if not siblings:
            del self._sources.by_slot[source.slot]

    def clear(self, source: Source) -> None:
        """A publisher holds nothing any more."""
        if not source.open:
            return
        source.cleared += 1
        source.orphans.clear()
        self._sources.retire(source)
        source.begin_anew(self._sources.take())
        self._sources.enter(source)

    def apply(self, source: Source, events: Sequence[Event]) -> None:
        """What a publisher told, in order: one batch or several."""
        if source.open:
            self._intake.apply(source, events)

    def match(self, prompt: TokenPrompt) -> Lookup:
        """How much of a prompt each pod holds, from its beginning on."""
        view = self._view
        if view is None or view.revision != self._sources.revision:
            view = self._look()
        lookup = Lookup(
            np.zeros(self.capacity, np.int32),
            np.zeros(self.capacity, np.int32),
            np.zeros(self.capacity, np.float32),
            self._block_sizes.copy(),
            {},
        )
        for size in view.sizes:
            lookup.keys[size] = keys = prompt_keys(prompt, size)
            counts, weights = depths(self._blocks, self._sources, keys)
            blocks = view.by_slot(counts, np.zeros(self.capacity, np.int32))
            tokens = blocks * np.int32(size)
            if weights is None:
                weighted = tokens.astype(np.float32)
            else:
                weighted = view.by_slot(weights, np.zeros(self.capacity, np.float32))
                weighted *= size
            if len(view.sizes) == 1:
                lookup.blocks, lookup.tokens, lookup.weighted = blocks, tokens, weighted
                break
            better = tokens > lookup.tokens
            lookup.blocks[better] = blocks[better]
            lookup.tokens[better] = tokens[better]
            lookup.weighted[better] = weighted[better]
            lookup.block_sizes[better] = size
        return lookup

    def expect(self, slot: int, lookup: Lookup) -> None:
        """A pod was picked for a prompt, which counts as cached there for a while, or until it is.

        Nothing happens where the pod has no publisher, or there is no room.
        """
        keys = lookup.keys.get(int(lookup.block_sizes[slot]))
        if keys is not None and len(keys):
            start = int(lookup.blocks[slot])
            keys = keys[max(0, start - 1) :]
            self.expect_chain(slot, keys, tail=start > 0)
            if self.on_expect is not None and len(keys) > (start > 0):
                self.on_expect(slot, keys, start > 0)

    def expect_chain(self, slot: int, keys: Keys, *, tail: bool) -> None:
        """As `expect`, of these blocks; of a `tail` the pod is known to hold the first one."""
        sources = self._sources.by_slot.get(slot)
        if not sources or not self._fresh.seconds:
            return
        if len(self._blocks) > FULL * self._blocks.table.max_rows:
            return
        above = int(self._blocks.table.find(keys[:1])[0]) if tail else -1
        rows = self._blocks.chain(keys[int(tail) :], above)
        held = np.zeros(len(rows), np.bool_)
        for each in sources:
            held |= self._blocks.holds(rows, each.word, each.bit)
        self._fresh.expect(sources[0], rows[~held])

    def expire(self, now: float) -> None:
        """Let old picks count no more. `now`: seconds, of a clock that never goes back.

        To be called a few times a second; `tidy` does the work.
        """
        self._fresh.expire(now)

    def tidy(self) -> bool:
        """Do about a millisecond of work in the background. Returns whether there is more."""
        return self._upkeep.tidy()

    def held(self, source: Source) -> dict[Tier, int]:
        """Blocks that a publisher holds."""
        return {tier: int(self._sources.held[tier, source.number]) for tier in Tier}

    @property
    def adapters(self) -> Set[str]:
        """Names of LoRA adapters that publishers have told of."""
        return self._intake.adapters

    @property
    def stats(self) -> Stats:
        counts = self._intake.counts
        held = self._sources.held.sum(axis=1)
        return Stats(
            blocks=len(self._blocks),
            max_blocks=self._blocks.table.max_rows,
            held=int(held.sum()),
            tiers={tier: int(held[tier]) for tier in Tier},
            aliases=len(self._aliases),
            sources=len(self._sources),
            orphans=self._nursery.blocks,
            num_bytes=self._blocks.num_bytes + self._aliases.num_bytes,
            stored=counts.stored,
            removed=counts.removed,
            unknown_removed=counts.unknown_removed,
            refused=Counter(counts.refused),
            skipped=counts.skipped,
            unresolved=counts.unresolved,
            evicted=self._upkeep.evicted,
            dropped=self._nursery.dropped,
        )

    def _stored(self, source: Source, rows: Rows) -> None:
        self._fresh.stored(self._sources.by_slot[source.slot][0], rows)

    def _look(self) -> _View:
        """Make a view. Pods that have told nothing are taken to be as most others are."""
        told = Counter(source.block_size for source in self._sources.all())
        del told[0]
        usual = told.most_common(1)[0][0] if told else BLOCK_SIZE
        self._block_sizes[:] = usual
        for slot, sources in self._sources.by_slot.items():
            self._block_sizes[slot] = max(source.block_size for source in sources) or usual
        bits = np.flatnonzero(self._sources.slots >= 0)
        slots = self._sources.slots[bits]
        sizes = sorted(self._sources.block_sizes() | {usual})
        single = len(bits) == len(self._sources.by_slot)
        self._view = _View(self._sources.revision, sizes, bits, slots, single)
        return self._view


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """What every lookup needs to know of the sources."""

    revision: int  # of the sources
    sizes: list[int]  # of blocks in use, in tokens
    bits: Rows
    slots: NDArray[np.int32]  # of these bits
    single: bool  # no pod has two sources

    def by_slot(self, by_bit: NDArray[Any], column: NDArray[N]) -> NDArray[N]:
        """Write each pod's best value into a column of zeros, which is returned."""
        values = by_bit.take(self.bits).astype(column.dtype)
        if self.single:
            column[self.slots] = values
        else:
            np.maximum.at(column, self.slots, values)
        return column
