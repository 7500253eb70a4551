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
from typing import Literal

from worker.config import EngineConfig
from worker.engine import Engine
from worker.sequence import Adapter, FinishReason, Output, SamplingParams, Sequence

log = logging.getLogger(__name__)

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
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._ended = False
        self._resets: set[asyncio.Future[bool]] = set()
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
        adapter: Adapter | None = None,
        cache_salt: str | None = None,
    ) -> Stream:
        """Queue one sequence.

        Raises:
            QueueFullError: `max_num_queued_reqs` sequences wait already.
            EngineDeadError: the engine's thread has ended.
        """
        if not self._alive:
            raise EngineDeadError("the engine has stopped")
        waiting = self._engine.scheduler.num_waiting + len(self._commands)
        if waiting >= self.config.max_num_queued_reqs:
            raise QueueFullError(f"{waiting} requests are waiting, the limit")
        sequence = Sequence(
            next(self._ids),
            list(prompt_ids),
            params,
            priority=priority,
            adapter=adapter,
            cache_salt=cache_salt,
            arrival=time.monotonic(),
        )
        stream = Stream(partial(self._end, sequence.id))
        self._streams[sequence.id] = stream
        self._command(partial(self._engine.add, sequence))
        return stream

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while sequences hold blocks.

        Raises:
            EngineDeadError: the engine's thread has ended.
        """
        if not self._alive:
            raise EngineDeadError("the engine has stopped")
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.add(done)
        done.add_done_callback(self._resets.discard)
        self._command(lambda: self._call_soon(_resolve, done, self._engine.reset_prefix_cache()))
        return await done

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
                    self._call_soon(self._deliver, outputs)
            reason = "abort"
        except Exception:
            log.exception("The engine died")
        finally:
            self._call_soon(self._end_all, reason)

    def _execute_commands(self) -> bool:
        """Carry out what was asked for, waiting for it when idle; False: to be closed."""
        with self._wake:
            while not (self._commands or self._engine.has_work or self._closing):
                self._wake.wait()
            commands, self._commands = self._commands, []
            if self._closing:
                return False
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
        for reset in list(self._resets):
            if not reset.done():
                reset.set_exception(EngineDeadError("the engine has stopped"))


def _resolve(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(result)
