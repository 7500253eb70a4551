"""Which pods hold which blocks, by what was used there most recently."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

_FEW = 4  # pods of a set that are written one by one; more are written at once


class RecentIndex:
    """Who holds what: block keys to pods, and a bounded cache of keys for each pod.

    A pod is known by its slot, and a set of pods is an int with one bit for each slot. Every key
    has at least one holder: a key leaves with its last one. Keys are ints from 0 to 2^64 - 1, and
    the keys of a prompt are chained: each stands for all that is before it, too.
    """

    def __init__(self, capacity: int = 0) -> None:
        """`capacity`: all slots are below it. It is the length of what `match` returns."""
        self.capacity = capacity
        self._holders: dict[int, int] = {}
        self._caches: dict[int, _Cache] = {}  # by slot

    def __len__(self) -> int:
        """Different blocks that are held."""
        return len(self._holders)

    @property
    def blocks(self) -> int:
        """Blocks that all pods hold together: one held by two pods counts twice."""
        return sum(len(cache.used) for cache in self._caches.values())

    def grow(self, capacity: int) -> None:
        """Make room for slots up to `capacity`."""
        self.capacity = max(self.capacity, capacity)

    def resize(self, slot: int, blocks: int) -> None:
        """A pod's cache has room for this many blocks, from now on; those over it are evicted.

        The first call for a slot starts an empty cache.
        """
        if not 0 <= slot < self.capacity:
            raise IndexError(f"slot {slot} of an index with {self.capacity}")
        cache = self._caches.setdefault(slot, _Cache())
        cache.room = max(0, blocks)
        self._drop(slot, cache.evict())

    def match(self, keys: Sequence[int]) -> NDArray[np.int32]:
        """How many of these blocks each pod holds, from the first on without a gap: int32, by slot.

        Looking is no use: it changes no order of eviction.
        """
        depths = np.zeros(self.capacity, np.int32)
        still = seen = self._holders.get(keys[0], 0) if keys else 0
        if not still:
            return depths
        for depth, holders in enumerate(map(self._holders.get, keys, repeat(0))):
            if holders is not seen:  # learn gives all blocks of a run the same int
                seen = holders
                left = still & ~holders
                if left:
                    self._fill(depths, left, depth)
                    still ^= left
                    if not still:
                        return depths
        self._fill(depths, still, len(keys))
        return depths

    def learn(self, slot: int, keys: Sequence[int]) -> bytes:
        """A pod holds these blocks of one prompt now, and used them just now.

        Returns this use of them, for `unlearn`: 8 bytes a block, which the index keeps too.

        The last block counts as used first and the first block last. So a prompt loses its tail
        before its head, and one that is longer than the cache keeps its head.
        """
        cache = self._caches[slot]
        if len(keys) > cache.room:
            keys = keys[: cache.room]
        if not keys:
            return b""
        new, use = cache.use(keys)
        bit = 1 << slot
        before, after = 0, bit
        holders = self._holders
        for key in reversed(keys):  # the new ones are at the end
            if not new:
                break
            held_by = holders.get(key, 0)
            if held_by is not before:
                before, after = held_by, held_by | bit
            if after != held_by:
                holders[key] = after
                new -= 1
        self._drop(slot, cache.evict())
        return use

    def unlearn(self, slot: int, use: bytes, held: int) -> None:
        """A pod was not given the blocks of this use after all, but for the `held` first ones.

        Those that were used again since stay.
        """
        self._drop(slot, self._caches[slot].take_back(use, held))

    def recent(self, slot: int, blocks: int) -> list[bytes]:
        """The last uses of a pod's cache, newest first, of about so many blocks together."""
        cache = self._caches.get(slot)
        return [] if cache is None else cache.newest(blocks)

    def still(self, slot: int, use: bytes) -> list[int]:
        """The keys of a use of `recent` that were not used again since, and are still held."""
        cache = self._caches.get(slot)
        return [] if cache is None else cache.still(use)

    def forget(self, slot: int) -> None:
        """A pod is gone, with all that it held."""
        cache = self._caches.pop(slot, None)
        if cache is not None:
            self._drop(slot, cache.used)

    def _drop(self, slot: int, keys: Iterable[int]) -> None:
        """A pod holds these blocks no more."""
        bit = 1 << slot
        before, after = bit, 0
        holders = self._holders
        for key in keys:
            held_by = holders[key]
            if held_by is not before:
                before, after = held_by, held_by ^ bit
            if after:
                holders[key] = after
            else:
                del holders[key]

    @staticmethod
    def _fill(depths: NDArray[np.int32], pods: int, depth: int) -> None:
        """Write a depth into the rows of these pods."""
        if pods.bit_count() > _FEW:
            depths[_rows(pods, len(depths))] = depth
            return
        while pods:
            slot = pods.bit_length() - 1
            depths[slot] = depth
            pods ^= 1 << slot


@lru_cache(maxsize=512)  # most prompts begin with one of a few system prompts
def _rows(pods: int, capacity: int) -> NDArray[np.bool_]:
    """A set of pods as a column."""
    packed = np.frombuffer(pods.to_bytes((capacity + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=capacity, bitorder="little").view(np.bool_)


class _Cache:
    """What one pod holds, least recently used first.

    Blocks used together share one time. Each use of a chain waits in line, oldest first; a block
    whose time has changed since is in line again further on, and is passed over at the old place.
    An OrderedDict would take twice the memory, and a full garbage collection would walk all of it.
    """

    __slots__ = ("_line", "_now", "_swept", "_waiting", "room", "used")

    def __init__(self) -> None:
        self.room = 0
        self.used: dict[int, int] = {}  # key to the time of its last use
        self._now = 0
        self._line: deque[bytes] = deque()  # uses as _packed
        self._swept: deque[bytes] = deque()  # the same, older than all of the line
        self._waiting = 0  # keys in both

    def use(self, keys: Sequence[int]) -> tuple[int, bytes]:
        """Note the use of a chain; returns how many of its keys were not held before, and it."""
        used = self.used
        before = len(used)
        self._now = now = self._now + 1
        for key in keys:
            used[key] = now
        packed = _packed(now, keys)
        self._line.append(packed)
        self._waiting += len(keys)
        if self._waiting > 2 * len(used):
            self._sweep(2 * len(keys))
        return len(used) - before, packed

    def take_back(self, use: bytes, held: int) -> list[int]:
        """Give up the keys of a use, but for the first ones and those used since; returns them.

        They are passed over where they wait in line.
        """
        used = self.used
        time, *those = memoryview(use).cast("Q")
        given_up = []
        for key in those[held:]:
            if used.get(key) == time:
                del used[key]
                given_up.append(key)
        return given_up

    def newest(self, blocks: int) -> list[bytes]:
        """The last uses in line, newest first, until they have so many blocks."""
        found: list[bytes] = []
        for use in chain(reversed(self._line), reversed(self._swept)):
            if blocks <= 0:
                break
            blocks -= len(use) // 8 - 1
            found.append(use)
        return found

    def still(self, use: bytes) -> list[int]:
        """The keys of a use that were not used again since, and are held."""
        used = self.used
        time, *keys = memoryview(use).cast("Q")
        return [key for key in keys if used.get(key) == time]

    def evict(self) -> list[int]:
        """Give up what is over the room; returns the keys, the least recently used first."""
        used = self.used
        over = len(used) - self.room
        evicted: list[int] = []
        while len(evicted) < over:
            line = self._swept or self._line
            those = memoryview(line[0]).cast("Q")
            time, stays = those[0], len(those)
            for key in those[:0:-1]:
                stays -= 1
                if used.get(key) == time:
                    del used[key]
                    evicted.append(key)
                    if len(evicted) == over:
                        break
            self._waiting -= len(those) - stays
            if stays > 1:
                line[0] = those[:stays].tobytes()
            else:
                line.popleft()
        return evicted

    def _sweep(self, keys: int) -> None:
        """Take the next `keys` in line, or a few more, and leave out those used again since.

        A little at each use keeps the line short without ever holding up one request for long.
        """
        used, line, swept = self.used, self._line, self._swept
        while keys > 0 and line:
            time, *those = memoryview(line.popleft()).cast("Q")
            keys -= len(those)
            kept = [key for key in those if used.get(key) == time]
            self._waiting -= len(those) - len(kept)
            if kept:
                swept.append(_packed(time, kept))
        if not line:
            self._line, self._swept = swept, line


def keys_of(use: bytes) -> list[int]:
    """The keys of a use that `RecentIndex.learn` returned."""
    return memoryview(use).cast("Q")[1:].tolist()


def _packed(time: int, keys: Sequence[int]) -> bytes:
    """The use of a chain as 8 bytes each for its time and its keys."""
    return array("Q", (time, *keys)).tobytes()
