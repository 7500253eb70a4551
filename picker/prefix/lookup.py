"""How much of a prompt each pod holds, for all pods at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picker.prefix.events import Tier
from picker.prefix.rows import Blocks
from picker.prefix.sources import BITS, Masks, Sources, Words, bits_of
from picker.prefix.table import Keys, Rows

WEIGHTS = {Tier.GPU: 1.0, Tier.CPU: 0.8, Tier.STORAGE: 0.5}  # what a cached token counts there
_FIRST = 1024  # blocks looked up before it is known that the rest is needed


@dataclass(slots=True, eq=False)
class Lookup:
    """Where a prompt is cached. Columns are by slot, as long as the index's capacity was."""

    blocks: NDArray[np.int32]  # leading full blocks that a pod holds, in any tier, or is to hold
    tokens: NDArray[np.int32]  # the tokens of these
    weighted: NDArray[np.float32]  # the same, where those in slower tiers count less
    block_sizes: NDArray[np.int32]  # tokens of a block
    keys: dict[int, Keys]  # of all full blocks, by block size

    def num_blocks(self, slot: int) -> int:
        """The prompt's full blocks, of this pod's block size."""
        return len(self.keys.get(int(self.block_sizes[slot]), ()))


def depths(
    blocks: Blocks, sources: Sources, keys: Keys
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How many of these blocks each source holds, from the first on without a gap.

    Returns:
        This number, and the sum of the blocks' weights; both by the source's bit.
    """
    counts = np.zeros(len(sources.slots), np.int64)
    weights = np.zeros(len(sources.slots), np.float64)
    rows = _known(blocks, keys[:_FIRST])
    if len(rows) == _FIRST < len(keys) and blocks.needed(rows[-1:])[0]:
        rows = np.concatenate((rows, _known(blocks, keys[_FIRST:])))
    if not len(rows):
        return counts, weights
    blocks.touched[rows[-1]] = blocks.now
    for number in range(len(sources.live)):
        gpu, cpu, storage = (_holders([blocks.held[tier]], number, rows) for tier in Tier)
        expected = _holders(blocks.fresh, number, rows)
        fast = gpu if expected is None else expected if gpu is None else gpu | expected
        bits = slice(number * BITS, (number + 1) * BITS)
        if cpu is None and storage is None:
            if fast is not None:
                counts[bits] = weights[bits] = _totals(np.bitwise_and.accumulate(fast))
            continue
        none = np.zeros(len(rows), np.uint64)
        fast = none if fast is None else fast
        medium = fast if cpu is None else fast | cpu
        found = np.bitwise_and.accumulate(medium if storage is None else medium | storage)
        counts[bits] = _totals(found)
        best, good, least = (WEIGHTS[tier] for tier in Tier)
        weights[bits] = (
            least * counts[bits]
            + (good - least) * _totals(found & medium)
            + (best - good) * _totals(found & fast)
        )
    return counts, weights


def _known(blocks: Blocks, keys: Keys) -> Rows:
    """The rows of the first keys that have one."""
    rows = blocks.table.find(keys)
    missing = rows < 0
    return rows[: missing.argmax()] if missing.any() else rows


def _holders(sets: Iterable[Masks], number: int, rows: Rows) -> Words | None:
    """Who is in one of these sets, of the sources with this word; None: nobody ever was."""
    found = None
    for masks in sets:
        if number < len(masks.words):
            word = masks.words[number].take(rows)
            found = word if found is None else found | word
    return found


def _totals(words: Words) -> NDArray[np.int64]:
    """How often each bit is set. Fast where neighbours are mostly equal."""
    changes = np.flatnonzero(words[1:] != words[:-1])
    changes += 1
    ends: Rows = np.append(changes, len(words)).astype(np.intp, copy=False)
    lengths: NDArray[np.int64] = np.diff(ends, prepend=0)
    totals: NDArray[np.int64] = lengths @ bits_of(words[ends - 1][:, None])
    return totals
