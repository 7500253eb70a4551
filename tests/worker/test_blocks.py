"""The block pool against a model of it that fits on a page."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.blocks import ROOT, BlockPool, chain_hash, root_key, wire_hash
from worker.events import AllBlocksCleared, BlockRemoved, BlockStored
from worker.sequence import Adapter, SamplingParams, Sequence

SIZE = 4
NUM_BLOCKS = 10
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
PARAMS = SamplingParams(max_tokens=64)


def sequence(tokens: list[int], **keys: object) -> Sequence:
    return Sequence(0, list(tokens), PARAMS, **keys)


def run(pool: BlockPool, tokens: list[int], **keys: object) -> Sequence:
    """Compute a prompt as a scheduler would, in one step."""
    seq = sequence(tokens, **keys)
    cached = pool.match_prefix(seq)
    pool.acquire(seq, cached)
    pool.allocate(seq, pool.blocks_for(len(tokens)) - len(cached))
    seq.num_computed_tokens = len(tokens)
    pool.register(seq)
    pool.merge_duplicates()
    return seq


def hits(pool: BlockPool, tokens: list[int], **keys: object) -> int:
    return len(pool.match_prefix(sequence(tokens, **keys)))


def test_a_repeated_prefix_is_found_block_by_block():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    pool.release(run(pool, [1] * 4 + [2] * 4 + [3] * 2))
    assert hits(pool, [1] * 4 + [2] * 4 + [9]) == 2
    assert hits(pool, [1] * 4 + [9] * 5) == 1
    assert hits(pool, [9] * 4 + [2] * 5) == 0


def test_only_full_blocks_are_cached():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    pool.release(run(pool, [1] * 7))
    assert pool.num_cached == 1


def test_at_least_one_token_is_left_to_compute():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    pool.release(run(pool, [1] * 8))
    assert hits(pool, [1] * 8) == 1
    assert hits(pool, [1] * 9) == 2


def test_salts_and_adapters_do_not_share():
    pool = BlockPool(64, SIZE)
    tokens = [1] * 9
    first, again = Adapter("a", 1), Adapter("a", 2)
    variants = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"adapter": first},
        {"adapter": again},
        {"adapter": first, "cache_salt": "a"},
    ]
    for keys in variants:
        assert hits(pool, tokens, **keys) == 0
        run(pool, tokens, **keys)
        assert hits(pool, tokens, **keys) == 2


def test_no_name_passes_for_another_key():
    assert root_key(Adapter("x", 1), None) != root_key(None, "x")
    assert root_key(Adapter("a", 1), "b") != root_key(Adapter("a", 1), None) + b"b"
    assert chain_hash(ROOT, [1]) != chain_hash(ROOT, [1], root_key(None, ""))


def test_memory_is_taken_from_the_tail_of_the_oldest_chain():
    pool = BlockPool(6, SIZE)
    old, new = [1] * 12, [2] * 12
    pool.release(run(pool, old))
    pool.release(run(pool, new))
    other = sequence([3] * 4)
    pool.allocate(other, 1)
    assert hits(pool, [*old, 0]) == 2  # the head is still there
    assert hits(pool, [*new, 0]) == 3
    pool.allocate(other, 2)
    assert hits(pool, [*old, 0]) == 0
    assert hits(pool, [*new, 0]) == 3


def test_a_partial_block_is_the_first_to_be_reused():
    pool = BlockPool(6, SIZE)
    pool.release(run(pool, [1] * 8))
    pool.release(run(pool, [2] * 7))
    pool.allocate(sequence([]), 3)
    assert pool.num_cached == 3, "nothing worth keeping was lost"


def test_use_keeps_a_chain_alive():
    pool = BlockPool(6, SIZE)
    first, second = [1] * 12, [2] * 12
    pool.release(run(pool, first))
    pool.release(run(pool, second))
    pool.release(run(pool, [*first[:8], 9]))  # uses the first chain again
    pool.allocate(sequence([]), 3)
    assert hits(pool, [*first, 0]) >= 2


def test_equal_blocks_are_held_once():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    a, b = run(pool, [1] * 8), run(pool, [1] * 8)  # the last block of b cannot be a hit
    assert a.block_ids == b.block_ids
    assert pool.num_free == NUM_BLOCKS - 2


def test_a_copy_takes_the_place_of_an_original_that_was_evicted_meanwhile():
    pool = BlockPool(4, SIZE)
    pool.release(run(pool, [1] * 8))
    copy = sequence([1] * 8)
    pool.acquire(copy, pool.match_prefix(copy))
    pool.allocate(copy, 1)
    copy.num_computed_tokens = 8
    pool.register(copy)
    pool.allocate(sequence([]), 2)  # another admission takes all memory that is left
    pool.merge_duplicates()
    pool.check()
    assert hits(pool, [1] * 9) == 2


def test_reset_is_refused_while_blocks_are_used():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    seq = run(pool, [1] * 8)
    assert not pool.reset()
    pool.release(seq)
    assert pool.reset()
    assert hits(pool, [1] * 9) == 0


def test_no_caching_means_no_hits_and_no_events():
    pool = BlockPool(NUM_BLOCKS, SIZE, enable_caching=False)
    pool.release(run(pool, [1] * 8))
    assert hits(pool, [1] * 9) == 0
    assert pool.take_events() == []


def test_events_give_parent_and_tokens_when_part_of_the_prefix_was_cached():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    run(pool, [1] * 4 + [2] * 4)
    (stored,) = pool.take_events()
    assert stored.parent_block_hash is None
    assert stored.token_ids == [1] * 4 + [2] * 4
    run(pool, [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4)
    (more,) = pool.take_events()
    assert more.parent_block_hash == stored.block_hashes[-1]
    assert more.token_ids == [3] * 4 + [4] * 4
    assert more.block_size == SIZE


def test_events_name_salt_and_adapter_as_vllm_does():
    pool = BlockPool(NUM_BLOCKS, SIZE)
    run(pool, [1] * 8, cache_salt="tenant-a")
    run(pool, [1] * 8, adapter=Adapter("sql", 7), cache_salt="tenant-a")
    plain, adapted = pool.take_events()
    assert (plain.lora_name, plain.extra_keys) == (None, [["tenant-a"], None])
    assert (adapted.lora_name, adapted.extra_keys) == ("sql", [["sql", "tenant-a"], ["sql"]])


class PoolMachine(RuleBasedStateMachine):
    """Random lives of sequences. The reference is what the pool must remember: nothing but
    which token prefixes were computed, and (from events) which of them are still cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.live: list[Sequence] = []
        self.chains: dict[int, tuple[int, ...]] = {}  # cached wire hash -> all tokens up to it

    def follow_events(self) -> None:
        for event in self.pool.take_events():
            match event:
                case BlockStored():
                    before = self.chains.get(event.parent_block_hash, ())
                    assert event.parent_block_hash is None or before
                    for index, digest in enumerate(event.block_hashes):
                        before += tuple(event.token_ids[index * SIZE : (index + 1) * SIZE])
                        assert digest not in self.chains, "stored twice"
                        self.chains[digest] = before
                case BlockRemoved():
                    for digest in event.block_hashes:
                        del self.chains[digest]
                case AllBlocksCleared():
                    self.chains.clear()

    @rule(tokens=PROMPTS)
    def start(self, tokens: list[int]) -> None:
        self.start_sequence(tokens)

    def start_sequence(self, tokens: list[int]) -> None:
        self.follow_events()
        seq = sequence(tokens)
        cached = self.pool.match_prefix(seq)
        expected = 0
        while tuple(tokens[: (expected + 1) * SIZE]) in self.chains.values():
            expected += 1
            if (expected + 1) * SIZE > len(tokens) - 1:
                break
        if len(tokens) - 1 < SIZE:
            expected = 0
        assert len(cached) == expected, "finds every cached block from the first on"
        missing = self.pool.blocks_for(len(tokens)) - len(cached)
        if not self.pool.can_allocate(missing + self.pool.num_idle(cached)):
            return
        self.pool.acquire(seq, cached)
        self.pool.allocate(seq, missing)
        seq.num_computed_tokens = len(cached) * SIZE
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Compute some tokens of some sequences, as one step of the engine does."""
        for seq in data.draw(st.lists(st.sampled_from(self.live), unique_by=id)):
            left = len(seq.token_ids) - seq.num_computed_tokens
            seq.num_computed_tokens += data.draw(st.integers(0, left))
            self.pool.register(seq)
        for _ in range(data.draw(st.integers(0, 2))):  # admissions in the same step
            self.start_sequence(data.draw(PROMPTS))
        self.pool.merge_duplicates()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        if len(seq.token_ids) == len(seq.block_ids) * SIZE:
            if not self.pool.can_allocate(1):
                return
            self.pool.allocate(seq, 1)
        seq.token_ids.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finished, aborted or preempted: for the pool it is all the same."""
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.pool.release(seq)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not any(seq.block_ids for seq in self.live))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.follow_events()
        self.pool.check()
        held = {block for seq in self.live for block in seq.block_ids}
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.cached_hashes() == set(self.chains)

    @invariant()
    def chains_are_whole(self) -> None:
        """A cached block's parent is cached too: tails go first."""
        cached = set(self.chains.values())
        assert all(len(chain) == SIZE or chain[:-SIZE] in cached for chain in cached)

    def teardown(self) -> None:
        for seq in self.live:
            self.pool.release(seq)
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS


TestPool = PoolMachine.TestCase


def test_wire_hashes_are_the_low_64_bits():
    digest = bytes(range(32))
    assert wire_hash(digest) == int.from_bytes(bytes(range(24, 32)), "big")
