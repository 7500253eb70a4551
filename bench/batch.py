"""The VTC paper's engine in virtual time: Llama-2-7b on an A10G, in S-LoRA.

A batch is prefilled and then decoded token by token; new requests are tried every ten steps, and
taken while the batch, with all that it will say, fits into the KV pool. Nothing is preempted. Step
times are fitted to the throughput that the paper gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from bench.loop import VirtualLoop
from bench.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT, Job

POOL = 10_000  # tokens
STEPS_BETWEEN_TRIES = 10
MAX_PREFILL = 3072  # tokens of a batch
PREFILL, PREFILL_TOKEN = 6e-3, 0.21e-3  # seconds
DECODE, CONTEXT_TOKEN = 27.5e-3, 1.6e-6


class Queue(Protocol):
    """What waits in front of the batch."""

    def first(self) -> Job | None: ...
    def take(self, job: Job) -> None: ...


class Batch:
    """One engine. `stepped` is called after each step with those that gained a token."""

    def __init__(
        self, loop: VirtualLoop, queue: Queue, stepped: Callable[[list[Job]], None]
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._stepped = stepped
        self._steps = 0  # since the last request was taken
        self._busy = False
        self.steps_between_tries = STEPS_BETWEEN_TRIES
        self.watch: Callable[[], object] = lambda: None  # called after each step, too
        self.running: list[Job] = []
        self.generated = 0  # output tokens, ever
        self.service: Counter[int] = Counter()  # weighted tokens by client

    @property
    def tokens(self) -> int:
        """In the KV pool."""
        return sum(job.input_tokens + job.came for job in self.running)

    def wake(self) -> None:
        """Something came into the queue."""
        if not self._busy:
            self._busy = True
            self._loop.call_at(self._loop.time(), self._step)

    def _step(self) -> None:
        new: list[Job] = []
        if not self.running or self._steps >= self.steps_between_tries:
            new = self._take()
        if new:
            self._steps = 0
            seconds = PREFILL + PREFILL_TOKEN * sum(job.input_tokens for job in new)
            self.running += new
            self._loop.call_at(self._loop.time() + seconds, lambda: self._end_step(new))
        elif self.running:
            self._steps += 1
            seconds = DECODE + CONTEXT_TOKEN * self.tokens
            self._loop.call_at(self._loop.time() + seconds, lambda: self._end_step(self.running))
        else:
            self._busy = False

    def _end_step(self, computed: list[Job]) -> None:
        now = self._loop.time()
        computed = list(computed)
        for job in computed:
            job.came += 1
            self.service[job.client] += OUTPUT_WEIGHT
            if job.came == 1:
                job.first_token = now
            if job.came == job.output_tokens:
                job.ended = now
        self.generated += len(computed)
        self.running = [job for job in self.running if job.came < job.output_tokens]
        self._stepped(computed)
        self.watch()
        self._step()

    def _take(self) -> list[Job]:
        new: list[Job] = []
        tokens = 0
        while (job := self._queue.first()) is not None:
            tokens += job.input_tokens
            if tokens > MAX_PREFILL or not _fits([*self.running, *new, job]):
                break
            self._queue.take(job)
            self.service[job.client] += INPUT_WEIGHT * job.input_tokens
            new.append(job)
        return new


def _fits(jobs: list[Job]) -> bool:
    """Whether the pool is large enough at each time when one of them ends."""
    held = 0
    for count, job in enumerate(sorted(jobs, key=_left, reverse=True), 1):
        held += job.input_tokens + job.came
        if held + _left(job) * count >= POOL:
            return False
    return True


def _left(job: Job) -> int:
    return job.output_tokens - job.came
