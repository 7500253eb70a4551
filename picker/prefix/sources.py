"""Publishers of KV events, and the bit that each has in every set of holders."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from picker.prefix.events import Tier
from picker.prefix.orphans import Orphans

BITS = 64  # of one word
Words = NDArray[np.uint64]


def _new_salt() -> np.uint64:
    return np.uint64(secrets.randbits(64))


@dataclass(slots=True, eq=False)
class Source:
    """One publisher: a pod, or one rank of it."""

    slot: int  # of its pod
    number: int  # of its bit
    orphans: Orphans
    open: bool = True
    main: int | None = None  # the group whose single holdings need no count
    skipped: set[int] = field(default_factory=set)  # groups that are no full attention
    sizes: set[int] = field(default_factory=set)  # of its blocks, in tokens
    block_size: int = 0  # the one told of last for the first time; 0: none yet
    cleared: int = 0  # times that it was, by its own word or for want of certainty
    renamed: bool = False  # some of its hashes have another meaning than with others
    salt: np.uint64 = field(default_factory=_new_salt)  # of the names of these

    def begin_anew(self, number: int) -> None:
        """Another bit, of a publisher that holds nothing yet."""
        self.number = number
        self.main = None
        self.skipped.clear()
        self.sizes.clear()
        self.renamed = False
        self.salt = _new_salt()

    @property
    def word(self) -> int:
        return self.number // BITS

    @property
    def bit(self) -> np.uint64:
        return np.uint64(1 << self.number % BITS)


class Masks:
    """A set of sources for each row of a table: columns of 64 bits, made when they are needed."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.words: list[Words] = []

    def word(self, number: int) -> Words:
        """The column with the bits from 64 * number on."""
        while len(self.words) <= number:
            self.words.append(np.zeros(self._max_rows, np.uint64))
        return self.words[number]

    def any(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these rows have a set that is not empty."""
        found = np.zeros(len(rows), np.uint64)
        for word in self.words:
            found |= word.take(rows)
        some: NDArray[np.bool_] = found != 0
        return some


class Sources:
    """All publishers. A bit that was given up is used again once no set has it any more."""

    def __init__(self) -> None:
        self.by_slot: dict[int, list[Source]] = {}
        self.slots = np.full(BITS, -1, np.int32)  # of each bit's pod; -1: not in use
        self.live = np.zeros(1, np.uint64)  # bits in use, by word
        self.retired = np.zeros(1, np.uint64)  # bits that sets may still have
        self.held = np.zeros((len(Tier), BITS), np.int64)  # blocks, by tier and bit
        self.revision = 0  # grows when sources change, or what sizes their blocks have
        self._free: list[int] = list(range(BITS))  # a heap

    def __len__(self) -> int:
        return sum(map(len, self.by_slot.values()))

    def all(self) -> Iterator[Source]:
        """Every open source."""
        return chain.from_iterable(self.by_slot.values())

    def block_sizes(self) -> set[int]:
        """Tokens of a block, as sources have told."""
        sizes = {source.block_size for source in self.all()}
        return sizes.union(*(source.sizes for source in self.all())) - {0}

    def take(self) -> int:
        """A bit that no set has."""
        if not self._free:
            first = len(self.slots)
            self._free.extend(range(first, first + BITS))
            self.slots = np.concatenate((self.slots, np.full(BITS, -1, np.int32)))
            self.live = np.append(self.live, np.uint64(0))
            self.retired = np.append(self.retired, np.uint64(0))
            self.held = np.concatenate((self.held, np.zeros((len(Tier), BITS), np.int64)), axis=1)
        return heapq.heappop(self._free)

    def enter(self, source: Source) -> None:
        """This source's bit is in use."""
        self.revision += 1
        self.slots[source.number] = source.slot
        self.live[source.word] |= source.bit

    def retire(self, source: Source) -> None:
        """This source's bit counts no more, though sets still have it."""
        self.revision += 1
        self.slots[source.number] = -1
        self.live[source.word] &= ~source.bit
        self.retired[source.word] |= source.bit
        self.held[:, source.number] = 0

    def recycle(self, retired: Words) -> None:
        """No set has these bits any more."""
        self.retired[: len(retired)] &= ~retired
        for number in np.flatnonzero(bits_of(retired)).tolist():
            heapq.heappush(self._free, number)


def bits_of(words: Words) -> NDArray[np.uint8]:
    """The bits of words, lowest first, along a last axis that is 64 times as long."""
    return np.unpackbits(words.astype("<u8", "C").view(np.uint8), axis=-1, bitorder="little")
