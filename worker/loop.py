"""The engine on a thread of its own, and its asyncio side.

Coroutines hand commands over and read outputs; only the thread touches the engine. It
waits without polling while there is nothing to do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Literal, TypeVar

from worker.config import EngineConfig
from worker.engine import Engine
from worker.sequence import FinishReason, Output, SamplingParams, Sequence

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_FAILED_STEPS = 3  # in a row; then the worker reports itself unhealthy


class QueueFullError(Exception):
    """Too many requests wait already; the client may come back later."""


class EngineDeadError(Exception):
    """The engine's thread is gone; only a restart helps."""


class Stream:
    """The outputs of one sequence, as they come."""

    def __init__(self, end: Callable[[Literal["stop", "abort"]], None]) -> None:
        self._end = end
        self._outputs: list[Output] = []
        self._ready = asyncio.Event()

    async def next(self) -> list[Output]:
        """All outputs since the last call, one at least. The last has a finish reason."""
        await self._ready.wait()
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    async def __aiter__(self) -> AsyncIterator[Output]:
        while True:
            for output in await self.next():
                yield output
                if output.finish_reason is not None:
                    return

    def end(self, reason: Literal["stop", "abort"]) -> None:
        """Stop the sequence: its stop string was found, or nobody listens. Idempotent."""
        self._end(reason)

    def deliver(self, output: Output) -> None:
        self._outputs.append(output)
        self._ready.set()


class EngineLoop:
    """Runs an `Engine` step by step while it has work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._arrivals: list[Sequence] = []
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._ended = False
        self._failure = "the engine has stopped"
        self._asked: set[asyncio.Future[Any]] = set()
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def healthy(self) -> bool:
        return self._alive and self._engine.failed_steps < MAX_FAILED_STEPS

    @property
    def _alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        """Start the thread; outputs go to the running asyncio loop."""
        self._asyncio = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Stop after the current step and wait for the thread; open streams end with "abort"."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Stream:
        """Queue one sequence.

        Raises:
            QueueFullError: `max_num_queued_reqs` sequences wait already, those that can
                run at once not counted.
            EngineDeadError: the engine's thread has ended.
        """
        if not self._alive:
            raise EngineDeadError(self._failure)
        scheduler = self._engine.scheduler
        seats = self.config.max_num_seqs - len(scheduler.running)
        waiting = scheduler.num_waiting + len(self._arrivals) - seats
        if waiting >= self.config.max_num_queued_reqs:
            raise QueueFullError(f"{waiting} requests are waiting, the limit")
        sequence = Sequence(
            next(self._ids),
            list(prompt_ids),
            params,
            priority=priority,
            cache_salt=cache_salt,
            arrival=time.monotonic(),
        )
        stream = Stream(partial(self._end, sequence.id))
        self._streams[sequence.id] = stream
        with self._wake:
            self._arrivals.append(sequence)
            self._wake.notify()
        return stream

    async def warm_up(self) -> None:
        """Have the engine's thread warm up; whatever is submitted meanwhile waits.

        Raises:
            EngineDeadError: it failed.
        """
        await self._ask(self._engine.warm_up)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while sequences hold blocks.

        Raises:
            EngineDeadError: the engine's thread has ended.
        """
        return await self._ask(self._engine.reset_prefix_cache)

    async def _ask(self, question: Callable[[], T]) -> T:
        """Have the engine's thread call `question` between two steps, and await its answer."""
        if not self._alive:
            raise EngineDeadError(self._failure)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        self._command(lambda: self._call_soon(_resolve, answer, question()))
        return await answer

    def _end(self, sequence_id: int, reason: Literal["stop", "abort"]) -> None:
        if self._streams.pop(sequence_id, None) is not None:
            self._command(partial(self._engine.end, sequence_id, reason))

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        reason: FinishReason = "error"
        try:
            while self._execute_commands():
                if self._engine.has_work:
                    outputs = self._engine.step()
                    if outputs:
                        self._call_soon(self._deliver, outputs)
            reason = "abort"
        except ValueError as problem:
            self._failure = str(problem)
        except Exception:
            log.exception("The engine died")
        finally:
            self._call_soon(self._end_all, reason)

    def _execute_commands(self) -> bool:
        """Carry out what was asked for, waiting for it when idle; False: to be closed."""
        with self._wake:
            while not (self._arrivals or self._commands or self._engine.has_work or self._closing):
                self._wake.wait()
            arrivals, self._arrivals = self._arrivals, []
            commands, self._commands = self._commands, []
            if self._closing:
                return False
        for sequence in arrivals:
            self._engine.add(sequence)
        for command in commands:
            command()
        if not self._engine.has_work:
            self._engine.report()
        return True

    def _call_soon(self, callback: Callable[..., object], *args: object) -> None:
        assert self._asyncio is not None
        self._asyncio.call_soon_threadsafe(callback, *args)

    def _deliver(self, outputs: list[tuple[int, Output]]) -> None:
        for sequence_id, output in outputs:
            stream = self._streams.get(sequence_id)
            if stream is None:
                continue  # ended from this side meanwhile
            stream.deliver(output)
            if output.finish_reason is not None:
                del self._streams[sequence_id]

    def _end_all(self, reason: FinishReason) -> None:
        """The thread is gone, so nobody must wait for it."""
        self._ended = True
        self._deliver([(sequence_id, Output(None, reason)) for sequence_id in list(self._streams)])
        for answer in list(self._asked):
            if not answer.done():
                answer.set_exception(EngineDeadError(self._failure))


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(result)
