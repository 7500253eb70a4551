"""What the index does to stay small: eviction, bounds, and what is left of pods that are gone."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from picker.prefix.events import Removed, Stored, Tier
from picker.prefix.index import BlockIndex, Source, TokenPrompt
from picker.prefix.orphans import MAX_ALL_BLOCKS, MAX_BLOCKS

SIZE = 4


class Chain:
    """A prompt of whole blocks, and the hashes that engines give these."""

    _names = count(1)

    def __init__(self, number: int, blocks: int) -> None:
        self.tokens = [number * 10_000 + place // SIZE for place in range(blocks * SIZE)]
        self.names = [next(self._names) * 7_919 for _ in range(blocks)]

    def stored(self, first: int = 0, last: int | None = None, medium: str | None = None) -> Stored:
        names = self.names[first:last]
        parent = self.names[first - 1] if first else None
        tokens = self.tokens[first * SIZE : (first + len(names)) * SIZE]
        return Stored(names, parent, tokens, SIZE, medium=medium)

    @property
    def prompt(self) -> TokenPrompt:
        return TokenPrompt(np.array(self.tokens, np.uint32))


def depth(index: BlockIndex, chain: Chain, slot: int = 0) -> int:
    return int(index.match(chain.prompt).blocks[slot])


def tidy(index: BlockIndex) -> None:
    for _ in range(100_000):
        if not index.tidy():
            return
    raise AssertionError("never done")


def filled(
    chains: int, blocks: int, max_blocks: int, step: int = 1000
) -> tuple[BlockIndex, Source, list[Chain]]:
    """An index that was told of so many chains, `step` blocks at a time."""
    index = BlockIndex(2, max_blocks)
    source = index.open(0)
    made = [Chain(number, blocks) for number in range(chains)]
    for chain in made:
        for first in range(0, blocks, step):
            index.apply(source, [chain.stored(first, first + step)])
        tidy(index)
    return index, source, made


@pytest.mark.parametrize("step", [1, 10, 50])
def test_the_oldest_prompts_leave_for_new_ones(step: int) -> None:
    index, source, chains = filled(200, 50, 2000, step)
    stats = index.stats
    assert 1_700 <= stats.blocks <= 1_900
    assert stats.blocks + stats.evicted == stats.stored == 10_000
    assert stats.held == stats.blocks == index.held(source)[Tier.GPU]
    assert stats.refused == {}
    depths = [depth(index, chain) for chain in chains]
    assert depths[:140] == [0] * 140
    assert depths[-20:] == [50] * 20
    assert sum(depths) == stats.blocks  # what is left of a prompt is its beginning


def test_what_is_asked_for_stays() -> None:
    index, source, (hot, *_) = filled(20, 50, 5_000)
    for number in range(100, 400):
        index.apply(source, [Chain(number, 50).stored()])
        tidy(index)
        assert depth(index, hot) == 50


def test_the_beginning_that_prompts_share_outlives_them() -> None:
    index = BlockIndex(1, 2000)
    source = index.open(0)
    system = Chain(0, 40)
    index.apply(source, [system.stored()])
    for number in range(1, 200):
        turn = Chain(number, 30)
        event = turn.stored()
        event.parent = system.names[-1]
        index.apply(source, [event])
        tidy(index)
    assert depth(index, system) == 40
    assert index.stats.evicted > 3000


def test_prompts_of_the_same_age_lose_their_ends_first() -> None:
    index = BlockIndex(1, 1000)
    source = index.open(0)
    chains = [Chain(number, 96) for number in range(10)]
    index.apply(source, [chain.stored() for chain in chains])
    tidy(index)
    depths = [depth(index, chain) for chain in chains]
    assert sum(depths) == len(index) <= 900
    assert max(depths) <= 96
    assert min(depths) > 0


def test_without_upkeep_it_is_full_at_its_limit_and_says_so() -> None:
    index = BlockIndex(1, 100)
    source = index.open(0)
    one, other = Chain(1, 80), Chain(2, 80)
    index.apply(source, [one.stored()])
    index.apply(source, [other.stored()])
    assert len(index) == 100
    assert (depth(index, one), depth(index, other)) == (80, 20)
    assert index.stats.refused == {"full": 60}
    index.expect(0, index.match(Chain(3, 10).prompt))
    assert len(index) == 100
    tidy(index)
    assert len(index) <= 85
    late = Chain(4, 10)
    index.apply(source, [late.stored()])
    assert depth(index, late) == 10


def test_engines_that_hash_differently_do_not_overflow_the_index() -> None:
    """Each pod has hashes of its own for the same blocks."""
    index = BlockIndex(60, 1000)
    chain = Chain(1, 100)
    for slot in range(60):
        event = chain.stored()
        event.hashes = [name * 100 + slot for name in chain.names]
        index.apply(index.open(slot), [event])
        tidy(index)
    assert index.stats.aliases <= 2000
    assert len(index) == 100 or index.stats.evicted


def test_a_removed_block_of_an_evicted_one_is_no_harm() -> None:
    index, source, chains = filled(150, 50, 5_000)
    for chain in chains:
        index.apply(source, [Removed([name]) for name in reversed(chain.names)])
    tidy(index)
    stats = index.stats
    assert (stats.blocks, stats.held, stats.aliases) == (0, 0, 0)
    assert stats.unknown_removed == stats.evicted
    assert stats.removed == stats.stored - stats.evicted


@pytest.mark.parametrize("backwards", [True, False])
def test_a_pod_that_removes_all_leaves_nothing(backwards: bool) -> None:
    index, source, chains = filled(3, 2000, 100_000)
    for chain in chains:
        names = chain.names[::-1] if backwards else chain.names
        index.apply(source, [Removed([name]) for name in names[:1000]])
        index.apply(source, [Removed(names[1000:])])
    tidy(index)
    assert (len(index), index.stats.aliases, index.stats.held) == (0, 0, 0)


def test_the_middle_of_a_prompt_is_remembered_for_its_end() -> None:
    """Blocks that nobody holds are kept where others follow, and go with these."""
    index, source, (chain,) = filled(1, 300, 1000)
    index.apply(source, [Removed(chain.names[10:290])])
    tidy(index)
    assert depth(index, chain) == 10
    assert index.stats.held == 20
    index.apply(source, [chain.stored(10, 290)])
    assert depth(index, chain) == 300
    index.apply(source, [Removed(chain.names[10:290])])
    index.apply(source, [Removed(chain.names[290:])])
    tidy(index)
    assert len(index) == 10


def test_a_pod_that_is_gone_is_forgotten_at_once_and_its_memory_later() -> None:
    index, source, chains = filled(100, 50, 10_000)
    other = index.open(1)
    index.apply(other, [chain.stored() for chain in chains[:30]])
    index.close(source)
    assert depth(index, chains[0]) == 0
    assert depth(index, chains[0], 1) == 50
    assert index.stats.held == 1500
    tidy(index)
    assert len(index) == index.stats.aliases == 1500
    index.close(other)
    tidy(index)
    assert len(index) == index.stats.aliases == 0


def test_pods_come_and_go_and_bits_are_used_again() -> None:
    index = BlockIndex(1, 10_000)
    chain = Chain(1, 20)
    for _ in range(300):
        source = index.open(0)
        assert depth(index, chain) == 0
        index.apply(source, [chain.stored()])
        assert depth(index, chain) == 20
        index.clear(source)
        assert depth(index, chain) == 0
        index.close(source)
        index.tidy()
    tidy(index)
    assert len(index) == 0
    assert index.stats.num_bytes < 50_000


def test_hundreds_of_pods() -> None:
    index = BlockIndex(500, 10_000)
    chain = Chain(1, 50)
    for slot in range(500):
        if slot % 7:
            index.apply(index.open(slot), [chain.stored(0, slot % 51)] if slot % 51 else [])
    expected = [slot % 51 if slot % 7 else 0 for slot in range(500)]
    assert index.match(chain.prompt).blocks.tolist() == expected
    assert len(index) == 50


def test_a_pod_is_as_deep_as_its_deepest_rank() -> None:
    index = BlockIndex(2, 1000)
    ranks = [index.open(1) for _ in range(3)]
    chain = Chain(1, 9)
    index.apply(ranks[0], [chain.stored(0, 3)])
    index.apply(ranks[1], [chain.stored(0, 7)])
    index.apply(ranks[2], [chain.stored(0, 2), chain.stored(2, 9, "CPU")])
    lookup = index.match(chain.prompt)
    assert lookup.blocks.tolist() == [0, 9]
    assert lookup.weighted[1] == pytest.approx((2 + 7 * 0.8) * SIZE)
    index.close(ranks[2])
    assert depth(index, chain, 1) == 7


def test_orphans_are_bounded_and_the_oldest_are_dropped() -> None:
    index = BlockIndex(8, 1 << 17)
    sources = [index.open(slot) for slot in range(8)]
    chains = [Chain(number, 1000) for number in range(10)]
    for chain in chains:
        index.apply(sources[0], [chain.stored(1)])
    assert index.stats.orphans <= MAX_BLOCKS
    assert index.stats.dropped == 2 * 999
    for chain in chains:
        index.apply(sources[0], [chain.stored(0, 1)])
    assert [depth(index, chain) for chain in chains] == [1, 1] + [1000] * 8
    assert index.stats.orphans == 0
    for source in sources:
        for number in range(100, 107):
            index.apply(source, [Chain(number, 1000).stored(1)])
    assert index.stats.orphans <= MAX_ALL_BLOCKS
    for source in sources:
        index.close(source)
    assert index.stats.orphans == 0


def test_block_sizes_are_bounded() -> None:
    index = BlockIndex(1, 1000)
    source = index.open(0)
    for size in range(1, 12):
        index.apply(source, [Stored([size], None, [5] * size, size)])
    assert index.stats.refused == {"block size": 3}
    lookup = index.match(TokenPrompt(np.full(20, 5, np.uint32)))
    assert sorted(lookup.keys) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lookup.tokens[0] == 8
    index.clear(source)
    index.apply(source, [Stored([11], None, [5] * 11, 11)])
    assert index.match(TokenPrompt(np.full(20, 5, np.uint32))).tokens[0] == 11


def test_a_slot_beyond_the_capacity_is_refused() -> None:
    index = BlockIndex(2)
    for slot in (-1, 2):
        with pytest.raises(IndexError, match=f"slot {slot}"):
            index.open(slot)
    index.grow(3)
    index.open(2)
    index.grow(1)
    assert index.match(TokenPrompt(np.empty(0, np.uint32))).blocks.tolist() == [0, 0, 0]
