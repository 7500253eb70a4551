"""The step loop: schedule, run, book, emit. Synchronous, and owned by one thread."""

from __future__ import annotations

import logging
import time
from typing import Literal, Protocol

from worker.blocks import BlockPool
from worker.config import EngineConfig
from worker.events import Publisher
from worker.metrics import Metrics
from worker.scheduler import Scheduled, Scheduler
from worker.sequence import FinishReason, Output, Sample, Sequence

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a step: the real model (worker/runner.py) or a simulated one."""

    def warm_up(self) -> None:
        """Do once, before the first step, what would make the first steps slow."""
        ...

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        """One sample for each entry of `batch` that ends at its sequence's last token, in order.

        Prompt log-probabilities asked for are appended to `sequence.prompt_logprobs`.
        """
        ...


class Engine:
    """Sequences in, outputs out, one step at a time."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        metrics: Metrics,
        publisher: Publisher | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(config, self.pool)
        self._runner = runner
        self._metrics = metrics
        self._publisher = publisher
        self._sequences: dict[int, Sequence] = {}
        self.failed_steps = 0  # in a row

    def warm_up(self) -> None:
        self._runner.warm_up()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def end(self, sequence_id: int, reason: Literal["stop", "abort"]) -> None:
        """Stop a sequence from outside; unknown ids have ended already and are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, reason, time.monotonic())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while sequences run."""
        done = self.pool.reset()
        self._publish()
        return done

    def step(self) -> list[tuple[int, Output]]:
        """Run one step and return what it gave, as (sequence id, output)."""
        batch = self.scheduler.schedule()
        self._count_admissions()
        try:
            samples = self._runner.run(batch)
        except Exception:
            log.exception("A step of %d sequences failed; they end with an error", len(batch))
            self.failed_steps += 1
            return self._fail_all()
        self.failed_steps = 0
        self.pool.merge_duplicates()
        outputs = self._book(batch, samples)
        self._publish()
        self.report(sum(num_tokens for _, num_tokens in batch))
        return outputs

    def _publish(self) -> None:
        events = self.pool.take_events()
        if events and self._publisher is not None:
            self._publisher.publish(events)

    def _book(self, batch: list[Scheduled], samples: list[Sample]) -> list[tuple[int, Output]]:
        """Append each sampled token and end the sequences that are done."""
        now = time.monotonic()
        outputs: list[tuple[int, Output]] = []
        gaps: list[float] = []
        chosen = iter(samples)
        for sequence, _ in batch:
            if sequence.num_computed_tokens < len(sequence.token_ids):
                continue  # a chunk of a longer prefill
            sample = next(chosen)
            token_id = sample.token_id
            sequence.token_ids.append(token_id)
            reason, stop_reason = self._finish_reason(sequence, token_id)
            if sequence.last_token_at:
                gaps.append(now - sequence.last_token_at)
                output = Output(token_id, reason, stop_reason, sample.logprobs)
            else:
                sequence.first_token_at = now
                self._metrics.first_token(now - sequence.arrival)
                output = Output(
                    token_id,
                    reason,
                    stop_reason,
                    sample.logprobs,
                    sequence.prompt_logprobs,
                    sequence.num_cached_tokens,
                )
            sequence.last_token_at = now
            outputs.append((sequence.id, output))
            if reason is not None:
                self._finish(sequence, reason, now)
        self._metrics.tokens(len(outputs), gaps)
        return outputs

    def _finish_reason(
        self, sequence: Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        """Whether `token_id`, just appended, ends the sequence; and the stop token that did."""
        params = sequence.params
        known = len(sequence.token_ids)
        produced = known - sequence.num_prompt_tokens
        if token_id in params.stop_token_ids and produced > params.min_tokens:
            return "stop", token_id
        if produced >= params.max_tokens or known >= self.config.max_model_len:
            return "length", None
        return None, None

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        self._metrics.finished(sequence, reason, now)

    def _fail_all(self) -> list[tuple[int, Output]]:
        """After a failed step: no cached block can be trusted, no running sequence kept."""
        now = time.monotonic()
        failed = list(self.scheduler.running)
        for sequence in failed:
            self._finish(sequence, "error", now)
        self.reset_prefix_cache()
        self.report()
        return [(sequence.id, Output(None, "error")) for sequence in failed]

    def _count_admissions(self) -> None:
        now = time.monotonic()
        for sequence in self.scheduler.admitted:
            if not sequence.admitted_at:  # not again after a preemption
                sequence.admitted_at = now
                self._metrics.admitted(
                    now - sequence.arrival, sequence.num_prompt_tokens, sequence.num_cached_tokens
                )
        for _ in self.scheduler.preempted:
            self._metrics.preempted()

    def report(self, num_tokens: int = 0) -> None:
        """Refresh the gauges; `num_tokens` is what the step just run computed."""
        scheduler = self.scheduler
        self._metrics.step(
            len(scheduler.running), scheduler.num_waiting, self.pool.usage, num_tokens
        )
