"""The scheduler over a real block pool; the tests invent the tokens that a model would give."""

from __future__ import annotations

import gc
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from worker.blocks import BlockPool
from worker.config import EngineConfig
from worker.scheduler import Scheduled, Scheduler
from worker.sequence import SamplingParams, Sequence

SIZE = 4
MAX_LEN = 32


def make(num_blocks: int = 64, **limits: object) -> Scheduler:
    limits = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    config = EngineConfig(num_blocks=num_blocks, block_size=SIZE, **limits)
    return Scheduler(config, BlockPool(num_blocks, SIZE, config.enable_prefix_caching))


def add(
    scheduler: Scheduler, id: int, tokens: list[int], max_tokens: int = 4, priority: int = 0
) -> Sequence:
    sequence = Sequence(id, list(tokens), SamplingParams(max_tokens=max_tokens), priority=priority)
    scheduler.add(sequence)
    return sequence


def is_done(sequence: Sequence) -> bool:
    return (
        sequence.num_output_tokens == sequence.params.max_tokens
        or len(sequence.token_ids) == MAX_LEN
    )


def step(scheduler: Scheduler, token: int = 9) -> dict[int, int]:
    """One step of an engine; how many tokens of which sequence it computed."""
    batch = scheduler.schedule()
    scheduler.pool.merge_duplicates()
    for sequence, _ in batch:
        if sequence.num_computed_tokens == len(sequence.token_ids):
            sequence.token_ids.append(token)
            if is_done(sequence):
                scheduler.remove(sequence)
    return {sequence.id: num_tokens for sequence, num_tokens in batch}


def finish(scheduler: Scheduler, within: int) -> None:
    for _ in range(within):
        if not scheduler.has_work:
            return
        step(scheduler)
    assert not scheduler.has_work, "someone starves"


def test_prompts_share_a_step_and_then_decode_one_token_each():
    scheduler = make()
    add(scheduler, 0, [1] * 7)
    add(scheduler, 1, [2] * 5)
    assert step(scheduler) == {0: 7, 1: 5}
    assert step(scheduler) == {0: 1, 1: 1}


def test_a_long_prompt_is_cut_to_the_budget_and_never_stalls_the_others():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 0, [1], max_tokens=8)
    step(scheduler)
    add(scheduler, 1, [2] * 20)
    add(scheduler, 2, [3] * 3)
    assert step(scheduler) == {0: 1, 1: 7}
    assert step(scheduler) == {0: 1, 1: 7}
    assert step(scheduler) == {0: 1, 1: 6, 2: 1}
    assert step(scheduler) == {0: 1, 1: 1, 2: 2}


def test_a_more_important_prefill_leaves_a_token_to_each_decode():
    scheduler = make(max_num_batched_tokens=8)
    for id in range(3):
        add(scheduler, id, [id], max_tokens=8, priority=1)
    step(scheduler)
    add(scheduler, 3, [7] * 20, priority=0)
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 5}
    assert step(scheduler) == {3: 5, 0: 1, 1: 1, 2: 1}


def test_no_more_run_than_allowed():
    scheduler = make(max_num_seqs=2)
    for id in range(3):
        add(scheduler, id, [id], max_tokens=2)
    assert step(scheduler) == {0: 1, 1: 1}
    assert step(scheduler) == {0: 1, 1: 1}  # both end
    assert step(scheduler) == {2: 1}


def test_importance_is_priority_then_order_of_arrival():
    scheduler = make(max_num_seqs=1)
    for id, priority in enumerate([1, 0, 1, -1, 0]):
        add(scheduler, id, [id], max_tokens=1, priority=priority)
    assert [list(step(scheduler)) for _ in range(5)] == [[3], [1], [4], [0], [2]]


def test_the_head_of_the_line_waits_for_memory_and_is_not_overtaken():
    scheduler = make(num_blocks=8)
    add(scheduler, 0, [1] * 15, max_tokens=9)
    step(scheduler)
    add(scheduler, 1, [2] * 17)  # needs more than is left
    add(scheduler, 2, [3])
    while scheduler.running:
        assert list(step(scheduler)) == [0]
    assert list(step(scheduler)) == [1, 2]


def test_a_newcomer_leaves_room_for_the_growth_of_those_who_run():
    scheduler = make(num_blocks=8)
    add(scheduler, 0, [1] * 16, max_tokens=9)
    step(scheduler)
    add(scheduler, 1, [2] * 12)  # its three blocks are free, but would be the last
    while scheduler.running:
        assert list(step(scheduler)) == [0]
        assert not scheduler.preempted
    assert list(step(scheduler)) == [1]


def test_a_prompt_shares_blocks_that_the_same_step_computes():
    scheduler = make()
    first = add(scheduler, 0, [1] * 12)
    second = add(scheduler, 1, [1] * 10)
    assert step(scheduler) == {0: 12, 1: 2}
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.num_cached_tokens == 8


def test_two_that_outgrow_the_memory_both_finish():
    scheduler = make(num_blocks=8)
    older = add(scheduler, 0, [1] * 12, max_tokens=20)
    younger = add(scheduler, 1, [2] * 12, max_tokens=20)
    finish(scheduler, within=60)
    assert younger.num_preemptions > 0
    assert older.num_preemptions == 0
    assert [older.num_output_tokens, younger.num_output_tokens] == [20, 20]


def test_the_least_important_gives_way_even_if_it_came_first():
    scheduler = make(num_blocks=8)
    background = add(scheduler, 0, [1] * 12, max_tokens=20, priority=5)
    urgent = add(scheduler, 1, [2] * 12, max_tokens=20, priority=-5)
    finish(scheduler, within=60)
    assert background.num_preemptions > 0
    assert urgent.num_preemptions == 0


def test_a_preempted_sequence_finds_its_blocks_again():
    scheduler = make(num_blocks=8)
    add(scheduler, 0, [1] * 12, max_tokens=8)
    victim = add(scheduler, 1, [2] * 12, max_tokens=20)
    while not victim.num_preemptions:
        step(scheduler)
    known = len(victim.token_ids)
    while victim not in scheduler.running:
        computed = step(scheduler)
    assert computed[1] < known
    assert victim.num_cached_tokens == 0, "of the prompt, nothing was cached at first"


def test_preallocation_takes_all_that_an_answer_may_need():
    scheduler = make(num_blocks=8, preallocate=True)
    short = add(scheduler, 0, [1] * 4, max_tokens=16)
    long = add(scheduler, 1, [2] * 4, max_tokens=1000)
    assert list(step(scheduler)) == [0]
    assert len(short.block_ids) == 5
    for _ in range(15):
        step(scheduler)
    assert list(step(scheduler)) == [1]
    assert len(long.block_ids) == MAX_LEN // SIZE, "no more than the model's context"


def test_those_who_leave_the_line_are_let_go():
    scheduler = make(max_num_seqs=1)
    add(scheduler, 0, [0], max_tokens=30)
    step(scheduler)
    add(scheduler, 1, [1])
    for id in range(2, 1000):
        scheduler.remove(add(scheduler, id, [id]))
    assert scheduler.num_waiting == 1
    kept = [one for one in gc.get_objects() if type(one) is Sequence and one.id in range(2, 1000)]
    assert len(kept) < 10
    finish(scheduler, within=40)


class SchedulerMachine(RuleBasedStateMachine):
    """Random lives of sequences, step by step.

    The memory is real, as far as the scheduler is concerned: to compute a token writes all
    tokens up to it into its slot, and the slots that attention reads must hold the sequence's
    own past. So nobody ever reads what was evicted, not yet written, or another's.
    """

    @initialize(
        num_blocks=st.integers(8, 14),
        max_num_seqs=st.integers(1, 5),
        more_tokens=st.integers(0, 12),
        preallocate=st.sampled_from([False, False, True]),
        enable_prefix_caching=st.booleans(),
    )
    def begin(self, num_blocks: int, max_num_seqs: int, more_tokens: int, **options: bool) -> None:
        self.scheduler = make(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more_tokens,
            **options,
        )
        self.pool = self.scheduler.pool
        self.alive: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_computed: dict[int, int] = {}  # of those who run
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> all tokens up to its own
        self.random = Random(0)
        self.num_submitted = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN - 1),
        max_tokens=st.integers(1, MAX_LEN),
        priority=st.integers(0, 2),
    )
    def submit(self, tokens: list[int], max_tokens: int, priority: int) -> None:
        sequence = add(self.scheduler, self.num_submitted, tokens, max_tokens, priority)
        self.num_submitted += 1
        self.alive.append(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.alive)))

    @precondition(lambda self: self.alive)
    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.alive:
                self.step()

    def step(self) -> None:
        scheduler = self.scheduler
        before = list(scheduler.running)
        batch = scheduler.schedule()
        self.check_shares(batch)
        self.check_preemptions(before)
        self.check_admissions(before)
        self.compute(batch)
        self.pool.merge_duplicates()
        for sequence, _ in batch:
            if sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.token_ids.append(self.random.randrange(2))
                if is_done(sequence):
                    self.end(sequence)

    def check_shares(self, batch: list[Scheduled]) -> None:
        config, running = self.scheduler.config, self.scheduler.running
        assert batch, "there is work, so something is done"
        assert sum(num_tokens for _, num_tokens in batch) <= config.max_num_batched_tokens
        assert all(num_tokens >= 1 for _, num_tokens in batch)
        assert len(running) <= config.max_num_seqs
        assert sorted(s.id for s, _ in batch) == sorted(s.id for s in running), "nobody stalls"
        if not config.preallocate:
            for sequence in running:
                spare = len(sequence.block_ids) * SIZE - len(sequence.token_ids)
                assert 0 <= spare < SIZE, "no memory is taken before it is needed"

    def check_preemptions(self, before: list[Sequence]) -> None:
        preempted, kept = self.scheduler.preempted, [s for s in before if s.block_ids]
        assert not (preempted and self.scheduler.config.preallocate)
        for victim in preempted:
            assert victim in before
            assert all(other.importance < victim.importance for other in kept)
            del self.num_computed[victim.id]
            self.waiting.append(victim)
        assert len(kept) + len(preempted) == len(before)

    def check_admissions(self, before: list[Sequence]) -> None:
        admitted = self.scheduler.admitted
        self.waiting.sort(key=lambda sequence: sequence.importance)
        assert self.waiting[: len(admitted)] == admitted, "nobody is overtaken"
        assert not (admitted and self.scheduler.preempted)
        assert sorted(s.id for s in before + admitted) == sorted(
            s.id for s in self.scheduler.running + self.scheduler.preempted
        )
        del self.waiting[: len(admitted)]

    def compute(self, batch: list[Scheduled]) -> None:
        for sequence, num_tokens in batch:
            end = sequence.num_computed_tokens
            start = end - num_tokens
            if sequence.id in self.num_computed:
                assert start == self.num_computed[sequence.id], "every token once, in order"
            else:
                assert start % SIZE == 0, "only whole blocks come from the cache"
                assert start == 0 or self.scheduler.config.enable_prefix_caching
            assert end <= len(sequence.token_ids)
            self.num_computed[sequence.id] = end
            for position in range(start, end):
                self.memory[slot(sequence, position)] = tuple(sequence.token_ids[: position + 1])
        for sequence, _ in batch:
            for position in range(sequence.num_computed_tokens):
                known = tuple(sequence.token_ids[: position + 1])
                assert self.memory[slot(sequence, position)] == known

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.alive.remove(sequence)
        self.num_computed.pop(sequence.id, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check()
        held = {block for sequence in self.alive for block in sequence.block_ids}
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.has_work == bool(self.alive)

    def teardown(self) -> None:
        """Once nobody comes any more, everybody finishes.

        The most important of those who run is never preempted and advances by a token at
        least; whoever is more important still, and waits, takes that place at most once.
        """
        bound = sum(MAX_LEN for _ in self.alive) * (1 + len(self.alive))
        for _ in range(bound):
            if self.alive:
                self.step()
        assert not self.alive, "someone starves"
        assert self.pool.num_free == self.pool.num_blocks


def slot(sequence: Sequence, position: int) -> int:
    return sequence.block_ids[position // SIZE] * SIZE + position % SIZE


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
