"""Continuous batching: which sequences run in the next step, and how many tokens of each.

There is no prefill phase and no decode phase (vLLM v1): each sequence has tokens known and
tokens computed, and every step spends one token budget on closing those gaps. Chunked
prefill, prefix hits and recomputation after a preemption all follow from that.

Running sequences are kept in order of importance, and the least important one gives way
when memory runs out. The most important one is therefore never preempted and always
advances: no livelock. Nobody overtakes the head of the waiting line: no starvation within
a priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from worker.blocks import BlockPool
from worker.config import EngineConfig
from worker.sequence import Sequence

# A share of a step: compute so many tokens of a sequence, ending at its
# `num_computed_tokens`. If these were its last known tokens, one more is sampled.
Scheduled = tuple[Sequence, int]


class Scheduler:
    """Owns the waiting line and the running list."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.running: list[Sequence] = []  # most important first
        self.admitted: list[Sequence] = []  # by the last `schedule`
        self.preempted: list[Sequence] = []  # likewise
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap
        self._removed: set[int] = set()  # ids ended while they waited, still in the heap

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) - len(self._removed)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, sequence: Sequence) -> None:
        heappush(self._waiting, (sequence.importance, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ended, whether it runs or waits."""
        if sequence.block_ids:
            self.running.remove(sequence)
            self.pool.release(sequence)
        else:
            self._removed.add(sequence.id)
            if 2 * len(self._removed) > len(self._waiting):
                self._sweep()

    def schedule(self) -> list[Scheduled]:
        """Plan one step. `num_computed_tokens` of each sequence moves to what it will be."""
        self.admitted = []
        self.preempted = []
        budget = self.config.max_num_batched_tokens
        batch: list[Scheduled] = []
        for sequence in self._running_with_memory():
            # Each sequence behind this one keeps one token, so a long prefill never
            # stalls the decoding of the others.
            share = budget - (len(self.running) - len(batch) - 1)
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed_tokens, share)
            budget -= num_tokens
            batch.append(self._plan(sequence, num_tokens))
        if not self.preempted:
            self._admit(batch, budget)
        return batch

    def _plan(self, sequence: Sequence, num_tokens: int) -> Scheduled:
        sequence.num_computed_tokens += num_tokens
        if sequence.num_computed_tokens // self.config.block_size > sequence.num_registered_blocks:
            self.pool.register(sequence)
        return sequence, num_tokens

    def _running_with_memory(self) -> Iterator[Sequence]:
        """Running sequences that have room for all their tokens, preempting to make it."""
        index = 0
        size = self.config.block_size
        while index < len(self.running):
            sequence = self.running[index]
            if len(sequence.block_ids) * size < len(sequence.token_ids):
                while not self.pool.can_allocate(1):
                    victim = self.running.pop()
                    self._preempt(victim)
                    if victim is sequence:
                        return
                self.pool.allocate(sequence, 1)
            yield sequence
            index += 1

    def _preempt(self, victim: Sequence) -> None:
        """Take all memory of a sequence; it will be computed again, mostly from the cache."""
        self.pool.release(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.preempted.append(victim)
        self.add(victim)

    def _admit(self, batch: list[Scheduled], budget: int) -> None:
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self._head()
            if sequence is None:
                return
            cached = self.pool.match_prefix(sequence)
            missing = self._blocks_wanted(sequence) - len(cached)
            # One block for each running sequence stays in reserve, or a newcomer would
            # soon be preempted by their growth.
            reserve = 0 if self.config.preallocate else len(self.running)
            if not self.pool.can_allocate(missing + self.pool.num_idle(cached) + reserve):
                return
            heappop(self._waiting)
            self.pool.acquire(sequence, cached)
            self.pool.allocate(sequence, missing)
            sequence.num_computed_tokens = len(cached) * self.config.block_size
            if sequence.num_cached_tokens < 0:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            self.admitted.append(sequence)
            insort(self.running, sequence, key=lambda running: running.importance)
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed_tokens, budget)
            budget -= num_tokens
            batch.append(self._plan(sequence, num_tokens))

    def _head(self) -> Sequence | None:
        """The most important waiting sequence that has not ended."""
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.id not in self._removed:
                return sequence
            self._removed.discard(sequence.id)
            heappop(self._waiting)
        return None

    def _sweep(self) -> None:
        """Let go of those who ended while they waited; the line may never move on to them."""
        self._waiting = [entry for entry in self._waiting if entry[1].id not in self._removed]
        heapify(self._waiting)
        self._removed.clear()

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """Blocks taken at admission: all known tokens, or all that may ever come."""
        tokens = len(sequence.token_ids)
        if self.config.preallocate:
            most = sequence.num_prompt_tokens + sequence.params.max_tokens
            tokens = max(tokens, min(most, self.config.max_model_len))
        return self.pool.blocks_for(tokens)
