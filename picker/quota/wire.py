"""One connection to Redis that all calls share, for the scripts of each request.

redis-py takes a connection for each call and costs four times as much as the call's own bytes.
Here calls are written as they come and answered in their order, as RESP has it, and one timer
watches the oldest of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import hiredis

from picker.quota.redis_url import Address, RedisURL

Argument = bytes | str | int


class WireError(OSError):
    """The connection is gone, or its server said nothing in time."""


class Wire:
    """Connects when it is needed, and again when it has to.

    Args:
        url: of a server, or of Sentinels, who are asked for the master before each connection.
        timeout: seconds for a connection, and for each answer.

    Raises:
        QuotaError: a file of the URL cannot be used.
    """

    def __init__(self, url: RedisURL, timeout: float) -> None:
        self._url = url
        self._tls = url.context()
        self._timeout = timeout
        self._greeting = _auth(url.user, url.password)
        if url.database:
            self._greeting.append(("SELECT", url.database))
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
            try:
                async with asyncio.timeout(self._timeout):
                    if self._url.kind == "sentinel":
                        self._line = await self._to_master()
                    else:
                        self._line = await self._to(self._url.addresses[0], self._greeting)
            except TimeoutError:
                raise WireError("no connection in time") from None
            return self._line

    async def _to_master(self) -> _Line:
        """A connection to the server that one of the Sentinels says is the master, and that agrees.

        Raises:
            WireError: there is none, for all that they know.
        """
        service = self._url.service
        why: Exception = WireError(f"no Sentinel knows {service!r}")
        for sentinel in self._url.addresses:
            try:
                found = await self._ask(sentinel, service)
                if found is None:
                    continue
                line = await self._to(found, self._greeting)
                role = await line.send(("ROLE",))
            except (OSError, hiredis.ReplyError) as problem:
                why = problem
                continue
            if isinstance(role, list) and role[0] == b"master":
                return line
            line.end(WireError("not the master"))
            why = WireError(f"{found[0]}:{found[1]} is no master any more")
        raise why

    async def _ask(self, sentinel: Address, service: str) -> Address | None:
        """Where a Sentinel says that the master is."""
        password = self._url.settings.get("sentinelPassword", "")
        line = await self._to(sentinel, _auth("", password))
        try:
            found = await line.send(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service))
        finally:
            line.end(WireError("closed"))
        return (found[0].decode(), int(found[1])) if isinstance(found, list) else None

    async def _to(self, address: Address, greeting: Sequence[tuple[Argument, ...]]) -> _Line:
        """A connection whose server has taken the greeting."""
        loop = asyncio.get_running_loop()
        line = _Line(loop, self._timeout)
        try:
            await loop.create_connection(lambda: line, *address, ssl=self._tls)
            for command in greeting:
                await line.send(command)
        except BaseException:
            line.end(WireError("not connected"))
            raise
        return line


def _auth(user: str, password: str) -> list[tuple[Argument, ...]]:
    if not password:
        return []
    return [("AUTH", user, password) if user else ("AUTH", password)]


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
