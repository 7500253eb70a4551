"""How much of a prompt each pod holds, for all pods at once."""

from __future__ import annotations

from collections.abc import Sequence
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
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """How many of these blocks each source holds, from the first on without a gap.

    Returns:
        This number, and the sum of the blocks' weights; both by the source's bit. None for the
        second where it is the same.
    """
    words = len(sources.live)
    rows = _known(blocks, keys[:_FIRST])
    if len(rows) == _FIRST < len(keys) and blocks.needed(rows[-1:])[0]:
        rows = np.concatenate((rows, _known(blocks, keys[_FIRST:])))
    if not len(rows):
        return np.zeros(words * BITS, np.float32), None
    blocks.touched[rows[-1]] = blocks.now
    fast = _holders([blocks.held[Tier.GPU], *blocks.fresh], words, rows)
    if not blocks.held[Tier.CPU].words and not blocks.held[Tier.STORAGE].words:
        return _totals(np.bitwise_and.accumulate(fast, axis=1)), None
    medium = fast | _holders([blocks.held[Tier.CPU]], words, rows)
    found = medium | _holders([blocks.held[Tier.STORAGE]], words, rows)
    np.bitwise_and.accumulate(found, axis=1, out=found)
    counts = _totals(found)
    best, good, least = (WEIGHTS[tier] for tier in Tier)
    weights = counts * np.float32(least)
    weights += _totals(found & medium) * np.float32(good - least)
    weights += _totals(found & fast) * np.float32(best - good)
    return counts, weights


def _known(blocks: Blocks, keys: Keys) -> Rows:
    """The rows of the first keys that have one."""
    rows = blocks.table.find(keys)
    missing = rows < 0
    return rows[: missing.argmax()] if missing.any() else rows


def _holders(sets: Sequence[Masks], words: int, rows: Rows) -> Words:
    """Who is in one of these sets: words by rows."""
    found = np.zeros((words, len(rows)), np.uint64)
    for masks in sets:
        for number, word in enumerate(masks.words):
            found[number] |= word.take(rows)
    return found


def _totals(words: Words) -> NDArray[np.float32]:
    """How often each bit is set, of words by rows. Fast where neighbours are mostly equal.

    The numbers are whole, below 2^24; as floats they are added up several times as fast.
    """
    changes = (words[:, 1:] != words[:, :-1]).any(axis=0).nonzero()[0]
    ends = np.empty(len(changes) + 1, np.int64)  # of runs of equal words
    ends[:-1] = changes
    ends[-1] = words.shape[1] - 1
    lengths = ends.astype(np.float32)
    lengths[1:] -= lengths[:-1].copy()
    lengths[0] += 1
    bits = bits_of(words.take(ends, axis=1).T).astype(np.float32)
    totals: NDArray[np.float32] = lengths @ bits
    return totals
