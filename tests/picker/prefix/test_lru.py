from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from picker.prefix.blocks import block_keys
from picker.prefix.lru import RecentIndex

SLOTS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 31, 32, 63, 64, 65, 199])
TURNS = st.lists(st.sampled_from("abc"), max_size=9).map("".join)


def chain(turns: str) -> list[int]:
    """The keys of a conversation: one block a turn. All live in one small tree."""
    return block_keys(turns.encode(), b"", 1, 100)


TREE = [
    key for turns in ("aaaaaaaaa", "abcabcabc", "bbbbbbbbb", "cabcabcab") for key in chain(turns)
]
ANY_KEYS = st.lists(st.sampled_from(sorted(set(TREE))), max_size=14)  # repeats, holes, no chain


class Reference:
    """Lists of keys, least recently used first."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}

    def resize(self, slot: int, blocks: int) -> None:
        self.room[slot] = blocks
        held = self.held.setdefault(slot, [])
        del held[: max(0, len(held) - blocks)]

    def learn(self, slot: int, keys: Sequence[int]) -> None:
        held = self.held[slot]
        for key in dict.fromkeys(reversed(keys[: self.room[slot]])):
            if key in held:
                held.remove(key)
            held.append(key)
        self.resize(slot, self.room[slot])

    def unlearn(self, slot: int, keys: Sequence[int], held: int) -> None:
        """Right after `learn` of the same."""
        gone = set(keys[: self.room[slot]][held:])
        self.held[slot] = [key for key in self.held[slot] if key not in gone]

    def forget(self, slot: int) -> None:
        self.held.pop(slot, None)
        self.room.pop(slot, None)

    def match(self, keys: Sequence[int], slot: int) -> int:
        depth = 0
        while depth < len(keys) and keys[depth] in self.held.get(slot, ()):
            depth += 1
        return depth


class IndexMachine(RuleBasedStateMachine):
    """The index does what the reference does, whatever happens to it."""

    @initialize(capacity=st.integers(0, 9))
    def start(self, capacity: int) -> None:
        self.index = RecentIndex(capacity)
        self.reference = Reference()

    def _room_for(self, slot: int) -> None:
        if slot not in self.reference.room:
            self.index.grow(slot + 1)
            self.index.resize(slot, 6)
            self.reference.resize(slot, 6)

    @rule(slot=SLOTS, turns=TURNS)
    def learn_a_prompt(self, slot: int, turns: str) -> None:
        self._room_for(slot)
        self.index.learn(slot, chain(turns))
        self.reference.learn(slot, chain(turns))

    @rule(slot=SLOTS, keys=ANY_KEYS)
    def learn_anything(self, slot: int, keys: list[int]) -> None:
        self._room_for(slot)
        self.index.learn(slot, keys)
        self.reference.learn(slot, keys)

    @rule(slot=SLOTS, keys=ANY_KEYS, held=st.integers(0, 5))
    def learn_by_mistake(self, slot: int, keys: list[int], held: int) -> None:
        self._room_for(slot)
        use = self.index.learn(slot, keys)
        self.reference.learn(slot, keys)
        if use:
            self.index.unlearn(slot, use, held)
            self.reference.unlearn(slot, keys, held)

    @rule(turns=TURNS)
    def everybody_learns(self, turns: str) -> None:
        for slot in self.reference.room:
            self.index.learn(slot, chain(turns))
            self.reference.learn(slot, chain(turns))

    @rule(slot=SLOTS, turns=TURNS, times=st.integers(2, 9))
    def learn_again_and_again(self, slot: int, turns: str, times: int) -> None:
        for _ in range(times):
            self.learn_a_prompt(slot, turns)

    @rule(slot=SLOTS, blocks=st.one_of(st.integers(0, 12), st.just(1000)))
    def resize(self, slot: int, blocks: int) -> None:
        self.index.grow(slot + 1)
        self.index.resize(slot, blocks)
        self.reference.resize(slot, blocks)

    @rule(slot=SLOTS)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.reference.forget(slot)

    @precondition(lambda self: self.reference.room)
    @rule(data=st.data(), turns=TURNS)
    def a_new_pod_takes_the_slot(self, data: st.DataObject, turns: str) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reference.room)))
        self.forget(slot)
        self.learn_a_prompt(slot, turns)

    @rule(capacity=st.integers(0, 300))
    def grow(self, capacity: int) -> None:
        self.index.grow(capacity)

    @rule(turns=TURNS)
    def match_a_prompt(self, turns: str) -> None:
        self._compare(chain(turns))

    @rule(keys=ANY_KEYS)
    def match_anything(self, keys: list[int]) -> None:
        self._compare(keys)

    def _compare(self, keys: list[int]) -> None:
        depths = self.index.match(keys)
        assert depths.dtype == np.int32
        assert depths.shape == (self.index.capacity,)
        expected = [self.reference.match(keys, slot) for slot in range(self.index.capacity)]
        assert depths.tolist() == expected

    @invariant()
    def holds_the_same(self) -> None:
        held = self.reference.held
        assert self.index.blocks == sum(map(len, held.values()))
        assert len(self.index) == len(set().union(*held.values()))
        for key in {key for keys in held.values() for key in keys}:
            holders = np.flatnonzero(self.index.match([key])).tolist()
            assert holders == sorted(slot for slot, keys in held.items() if key in keys)

    def teardown(self) -> None:
        for slot in list(self.reference.room):
            self.index.forget(slot)
        assert (self.index.blocks, len(self.index)) == (0, 0)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def index_of(pods: int, blocks: int = 1000) -> RecentIndex:
    index = RecentIndex(pods)
    for slot in range(pods):
        index.resize(slot, blocks)
    return index


@settings(deadline=None)
@given(st.lists(TURNS, max_size=8), TURNS, TURNS)
def test_a_longer_prompt_never_matches_less(learnt: list[str], turns: str, more: str) -> None:
    index = index_of(8)
    for slot, each in enumerate(learnt):
        index.learn(slot, chain(each))
    shorter, longer = index.match(chain(turns)), index.match(chain(turns + more))
    assert (shorter <= longer).all()
    assert (np.minimum(longer, len(turns)) == shorter).all()


def test_a_run_must_be_one_pods_own() -> None:
    index = index_of(3)
    keys = chain("abcab")
    index.learn(0, keys[:2])
    index.learn(1, keys[2:])
    index.learn(2, keys[:1] + keys[3:])
    assert index.match(keys).tolist() == [2, 0, 1]


@pytest.mark.parametrize("pods", [1, 4, 5, 64, 1000])
def test_every_pod_is_counted_however_many_hold_the_prompt(pods: int) -> None:
    index = index_of(pods + 3, blocks=2000)
    keys = [*range(10, 10 + pods + 9)]
    for slot in range(pods):
        index.learn(slot, keys[: slot + 1])
    assert index.match(keys).tolist() == [*range(1, pods + 1), 0, 0, 0]
    for slot in range(pods):
        index.learn(slot, keys)
    assert index.match(keys).tolist() == [len(keys)] * pods + [0, 0, 0]


def test_tails_leave_before_heads_and_old_prompts_before_new_ones() -> None:
    index = index_of(1, blocks=6)
    index.learn(0, chain("abc"))
    index.learn(0, chain("bbb"))
    index.learn(0, chain("abc"))
    index.learn(0, chain("cc"))
    assert [index.match(chain(turns))[0] for turns in ("abc", "bbb", "cc")] == [3, 1, 2]
    index.resize(0, 4)
    assert [index.match(chain(turns))[0] for turns in ("abc", "bbb", "cc")] == [2, 0, 2]


def test_a_shared_head_outlives_the_first_of_its_tails() -> None:
    index = index_of(1, blocks=5)
    index.learn(0, chain("aab"))
    index.learn(0, chain("aac"))
    index.learn(0, chain("ccc"))
    assert [index.match(chain(turns))[0] for turns in ("aab", "aac", "ccc")] == [2, 2, 3]


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    index = index_of(1, blocks=10)
    index.learn(0, [*range(1000)])
    assert index.match([*range(1000)])[0] == 10
    assert index.blocks == 10


def test_looking_keeps_nothing_alive() -> None:
    index = index_of(1, blocks=2)
    index.learn(0, [1])
    index.learn(0, [2])
    index.match([1])
    index.learn(0, [3])
    assert index.match([1])[0] == 0


def test_a_pod_without_room_holds_nothing() -> None:
    index = index_of(2, blocks=3)
    index.learn(0, [1, 2, 3])
    index.resize(0, -5)
    index.learn(0, [1, 2, 3])
    index.resize(1, 0)
    assert (index.blocks, len(index)) == (0, 0)


def test_forgetting_a_pod_leaves_the_others() -> None:
    index = index_of(2)
    index.learn(0, chain("abc"))
    index.learn(1, chain("abb"))
    index.forget(0)
    index.forget(0)
    assert index.match(chain("abc")).tolist() == [0, 2]
    assert (index.blocks, len(index)) == (3, 3)


def test_a_slot_beyond_the_capacity_is_refused() -> None:
    index = RecentIndex(2)
    for slot in (-1, 2):
        with pytest.raises(IndexError, match=f"slot {slot}"):
            index.resize(slot, 5)
    index.grow(3)
    index.resize(2, 5)
    index.grow(1)
    assert index.match([1]).tolist() == [0, 0, 0]


def test_keys_at_the_ends_of_64_bits() -> None:
    index = index_of(1)
    index.learn(0, [0, 2**64 - 1, 2**63])
    assert index.match([0, 2**64 - 1, 2**63])[0] == 3
    index.resize(0, 0)
    assert len(index) == 0


def test_many_unique_prompts_stay_within_the_room() -> None:
    index = index_of(4, blocks=5000)
    for number in range(100_000):
        index.learn(number % 4, block_keys(b"%0128d" % number, b"", 32, 8))
    assert index.blocks == 4 * 5000
    assert len(index) == 4 * (5000 - 3) + 3
    for first, depth in ((0, 3), (99_000, 4)):  # the oldest are gone but for the shared head
        for number in range(first, first + 1000):
            assert index.match(block_keys(b"%0128d" % number, b"", 32, 8))[number % 4] == depth
    for slot in range(4):
        index.forget(slot)
    assert (index.blocks, len(index)) == (0, 0)


@pytest.mark.parametrize("prompts", [1, 2, 10])
def test_the_same_prompts_for_ever_take_no_more_memory(prompts: int) -> None:
    """Also while something older is never used again, and so always first to be evicted."""
    index = index_of(1, blocks=5000)
    index.learn(0, [*range(500)])
    hot = [[*range(start, start + 100)] for start in range(10_000, 10_000 + 100 * prompts, 100)]
    order = random.Random(1)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            for _ in range(1000):
                index.learn(0, order.choice(hot))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[2] < sizes[0] + 100_000  # if each use were kept, 1.6 MB
    index.resize(0, 100 * prompts + 200)
    assert index.match([*range(500)])[0] == 200
    assert [index.match(keys)[0] for keys in hot] == [100] * prompts
