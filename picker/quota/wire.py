"""One connection to Redis that all calls share, for the scripts of each request.

redis-py takes a connection for each call and costs four times as much as the call's own bytes.
Here calls are written as they come and answered in their order, as RESP has it, and one timer
watches the oldest of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote, urlsplit

import hiredis

Argument = bytes | str | int


class WireError(OSError):
    """The connection is gone, or its server said nothing in time."""


class Wire:
    """Connects when it is needed, and again when it has to.

    Args:
        url: `redis://[USER:PASSWORD@]HOST:PORT/DB`.
        timeout: seconds for a connection, and for each answer.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "localhost"
        self._port = parts.port or 6379
        self._timeout = timeout
        self._greeting: list[tuple[Argument, ...]] = []
        if parts.password:
            names = [unquote(parts.username)] if parts.username else []
            self._greeting.append(("AUTH", *names, unquote(parts.password)))
        if database := parts.path.strip("/"):
            self._greeting.append(("SELECT", int(database)))
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()

    async def call(self, *arguments: Argument) -> object:
        """A command's answer.

        Raises:
            WireError: there was none; the command may have been done.
            hiredis.ReplyError: the server refused it.
        """
        line = self._line
        if line is None or line.closed:
            line = await self._connect()
        return await line.send(arguments)

    def close(self) -> None:
        if self._line is not None:
            self._line.end(WireError("closed"))

    async def _connect(self) -> _Line:
        async with self._connecting:
            if self._line is not None and not self._line.closed:
                return self._line
            loop = asyncio.get_running_loop()
            line = _Line(loop, self._timeout)
            try:
                async with asyncio.timeout(self._timeout):
                    await loop.create_connection(lambda: line, self._host, self._port)
                    for command in self._greeting:
                        await line.send(command)
            except BaseException as problem:
                line.end(WireError("not connected"))
                if isinstance(problem, TimeoutError):
                    raise WireError("no connection in time") from None
                raise
            self._line = line
            return line


class _Line(asyncio.Protocol):
    """A connection that is there, and who waits for answers on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.closed = False
        self._loop = loop
        self._timeout = timeout
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[asyncio.Future[object], float]] = deque()  # and since when
        self._transport: asyncio.Transport | None = None
        self._write: Callable[[bytes], None]
        self._watch: asyncio.TimerHandle | None = None

    def send(self, arguments: tuple[Argument, ...]) -> asyncio.Future[object]:
        future: asyncio.Future[object] = self._loop.create_future()
        if self.closed:
            future.set_exception(WireError("the connection was lost"))
            return future
        self._waiting.append((future, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout, self._look)
        self._write(hiredis.pack_command(arguments))  # type: ignore[arg-type]  # of any length
        return future

    def end(self, problem: Exception) -> None:
        """Close; whoever waits is told why."""
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        for future, _ in self._waiting:
            if not future.done():
                future.set_exception(problem)
        self._waiting.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._write = self._transport.write

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not False:
                future, _ = self._waiting.popleft()
                if future.done():
                    continue  # nobody waits any more
                if isinstance(answer, hiredis.ReplyError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        except hiredis.ProtocolError:
            self.end(WireError("this is no Redis"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(WireError(f"the connection was lost: {exc or 'closed by the server'}"))

    def _look(self) -> None:
        """Whether the oldest call waits too long; then none can be believed to be answered."""
        self._watch = None
        if not self._waiting:
            return
        left = self._waiting[0][1] + self._timeout - self._loop.time()
        if left <= 0:
            self.end(WireError(f"no answer within {self._timeout:g} s"))
        else:
            self._watch = self._loop.call_later(left, self._look)
