"""Follows the KV events of every pod of a pool, from when it comes until it leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import zmq

from picker import config
from picker.pool import Endpoint, Pool
from picker.prefix.addresses import Address, told, usual, written
from picker.prefix.index import BlockIndex
from picker.prefix.sockets import Context
from picker.prefix.subscription import Subscription
from picker.prefix.turns import Turns

log = logging.getLogger(__name__)

PATH = "/kv_event_sources"
ASK_TIMEOUT = 2.0  # seconds
MAX_ANSWER = 64 << 10  # bytes
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds before a pod is tried again; they double
TICK = 0.5  # seconds
MAX_SOCKETS = 65536  # ZMQ's own limit is 1023, and a publisher takes three


@dataclass(slots=True, eq=False)
class _Followed:
    """What is kept of one endpoint."""

    subscriptions: list[Subscription] = field(default_factory=list)  # by rank
    trouble: str = ""
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # the pod was seen to
    task: asyncio.Task[None] | None = None


class Subscriptions:
    """Keeps an index told. A listener of its pool."""

    def __init__(self, pool: Pool, settings: config.Prefix, index: BlockIndex) -> None:
        self._pool = pool
        self._settings = settings
        self._index = index
        self._followed: dict[Endpoint, _Followed] = {}
        self._tools: _Tools | None = None  # while we run

    async def start(self) -> None:
        """Begin to follow all pods, those present and those to come."""
        self._tools = _Tools(self._tick)
        self._pool.listen(self)

    async def stop(self) -> None:
        """Close all connections. What pods hold is forgotten."""
        for endpoint in list(self._followed):
            self.removed(endpoint)
        if self._tools is not None:
            await self._tools.close()
            self._tools = None

    def of(self, endpoint: Endpoint) -> Sequence[Subscription]:
        """What an endpoint's publishers are followed by, by rank; empty while there is none."""
        followed = self._followed.get(endpoint)
        return () if followed is None else followed.subscriptions

    def trouble(self, endpoint: Endpoint) -> str:
        """Why there is none; empty if nothing is wrong."""
        followed = self._followed.get(endpoint)
        return "" if followed is None else followed.trouble

    def silent(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Those of some endpoints of which nothing is known: nobody there is heard, or ever was."""
        return [
            endpoint
            for endpoint in endpoints
            if (followed := self._followed.get(endpoint)) is not None
            and not any(each.connected or each.batches for each in followed.subscriptions)
        ]

    def behind(self) -> list[Endpoint]:
        """The endpoints that may still tell what they hold, and have not told all of it."""
        return [
            endpoint
            for endpoint, followed in self._followed.items()
            if not followed.trouble
            and not (
                followed.subscriptions and all(each.following for each in followed.subscriptions)
            )
        ]

    def answers(self, endpoint: Endpoint) -> None:
        """An endpoint answers to HTTP: if its publishers are not known, it is time to ask again."""
        followed = self._followed.get(endpoint)
        if followed is not None:
            followed.answers.set()

    def added(self, endpoint: Endpoint) -> None:
        if self._tools is None:
            return
        self._index.grow(self._pool.capacity)
        followed = self._followed[endpoint] = _Followed()
        followed.task = asyncio.create_task(self._follow(endpoint, followed, self._tools))

    def removed(self, endpoint: Endpoint) -> None:
        followed = self._followed.pop(endpoint, None)
        if followed is None:
            return
        assert followed.task is not None
        followed.task.cancel()
        for subscription in followed.subscriptions:
            subscription.close()

    def _tick(self) -> None:
        now = time.monotonic()
        for followed in self._followed.values():
            for subscription in followed.subscriptions:
                subscription.tick(now)

    async def _follow(self, endpoint: Endpoint, followed: _Followed, tools: _Tools) -> None:
        """Subscribe; try again until that has succeeded."""
        pause = FIRST_PAUSE
        while True:
            try:
                addresses = await self._addresses(endpoint, tools)
                followed.subscriptions = self._subscribe(endpoint, addresses, tools)
                trouble = "" if addresses else "it says that it publishes no KV events"
            except (OSError, aiohttp.ClientError) as problem:  # TimeoutError is an OSError
                trouble = _why(problem)
            if trouble and trouble != followed.trouble:
                log.warning("pod %s: no KV events yet: %s", endpoint.address, trouble)
            followed.trouble = trouble
            if not trouble:
                return
            followed.answers.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(followed.answers.wait(), pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _addresses(self, endpoint: Endpoint, tools: _Tools) -> list[Address]:
        """Where an endpoint publishes.

        Raises:
            OSError, aiohttp.ClientError: it cannot be asked now.
        """
        if endpoint.events:
            return [written(source) for source in endpoint.events]
        answer = await tools.get(f"http://{endpoint.address}{PATH}")
        addresses = None if answer is None else told(answer, endpoint.host)
        return [usual(endpoint.host, self._settings.events)] if addresses is None else addresses

    def _subscribe(
        self, endpoint: Endpoint, addresses: Sequence[Address], tools: _Tools
    ) -> list[Subscription]:
        """Raises OSError, and follows none then."""
        subscriptions: list[Subscription] = []
        try:
            for address in addresses:
                subscriptions.append(
                    Subscription(tools.context, tools.turns, self._index, endpoint.slot, address)
                )
        except OSError:
            for subscription in subscriptions:
                subscription.close()
            raise
        return subscriptions


def _why(problem: Exception) -> str:
    if isinstance(problem, aiohttp.ClientConnectorError) and problem.errno:
        return f"cannot connect: {os.strerror(problem.errno)}"
    return str(problem) or f"no answer at {PATH} within {ASK_TIMEOUT:g} s"


class _Tools:
    """What all subscriptions use together, while they run."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.context: Context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.turns = Turns()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT))
        self._ticking = asyncio.create_task(_every(TICK, tick))

    async def get(self, url: str) -> bytes | None:
        """What an HTTP server answers; None if it knows of no such page.

        Raises:
            OSError, aiohttp.ClientError: there is no answer now.
        """
        async with self._http.get(url, allow_redirects=False) as response:
            if response.status >= 500:
                raise OSError(f"{PATH} answers with status {response.status}")
            answer = bytearray()
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > MAX_ANSWER:
                    return None
            return bytes(answer) if response.status == 200 else None

    async def close(self) -> None:
        self._ticking.cancel()
        await self._http.close()
        self.context.destroy(linger=0)


async def _every(seconds: float, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        call()
