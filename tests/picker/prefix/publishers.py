"""A pod that publishes KV events as vLLM does, and does what a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from picker.config import EventSource

END = b"\xff" * 8
BLOCK_SIZE = 4


def stored(first: int, last: int, **more: Any) -> dict[str, Any]:
    """Blocks `first` to `last - 1` of `prompt`."""
    return {
        "type": "BlockStored",
        "block_hashes": [1000 + i for i in range(first, last)],
        "parent_block_hash": 1000 + first - 1 if first else None,
        "token_ids": prompt(last)[first * BLOCK_SIZE :],
        "block_size": BLOCK_SIZE,
        **more,
    }


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [1000 + i for i in blocks], "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


def prompt(blocks: int) -> list[int]:
    return list(range(7, 7 + blocks * BLOCK_SIZE))


class Pod:
    """Publishes on a port and answers replays on another; an address with port 0 takes any.

    `lose` is publishing that nobody hears of. `deaf`: it does not answer replays; `stops_after`: it
    sends no more than so many batches of one, and no end mark.
    """

    def __init__(
        self,
        live: str = "tcp://127.0.0.1:0",
        replay: str = "tcp://127.0.0.1:0",
        *,
        connect: bool = False,
        with_topic: bool = True,
        end: Sequence[bytes] = (b"", END, b""),
        topic: bytes = b"kv-events",
    ) -> None:
        self.sent: dict[int, bytes] = {}
        self.next = 0
        self.deaf = False
        self.stops_after: int | None = None
        self.questions: list[int] = []
        self.topic = topic
        self.with_topic = with_topic
        self.end = end
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.XPUB)
        self._live.linger = 0
        if connect:
            self._live.connect(live)
        else:
            self._live.bind(live)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(replay)
        self.source = EventSource(
            address=self._live.get_string(zmq.LAST_ENDPOINT),
            replay=self._router.get_string(zmq.LAST_ENDPOINT),
        )
        self._serving = asyncio.create_task(self._serve())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._serving.cancel()
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Wait until a subscriber has come: it hears what is published from now on."""
        async with asyncio.timeout(20):
            assert await self._live.recv() == b"\x01"

    async def left(self) -> None:
        """Wait until a subscriber has gone."""
        async with asyncio.timeout(20):
            assert await self._live.recv() == b"\x00"

    def lose(self, *events: Any) -> None:
        self.sent[self.next] = msgspec.msgpack.encode([1.5, list(events), 0])
        self.next += 1

    async def publish(self, *events: Any) -> None:
        self.lose(*events)
        number = self.next - 1
        await self.send([self.topic, number.to_bytes(8, "big"), self.sent[number]])

    async def send(self, frames: list[bytes]) -> None:
        await self._live.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            client, empty, first = await self._router.recv_multipart()
            assert empty == b""
            self.questions.append(int.from_bytes(first, "big"))
            if self.deaf:
                continue
            answers = [
                ([self.topic] if self.with_topic else []) + [number.to_bytes(8, "big"), payload]
                for number, payload in self.sent.items()
                if number >= self.questions[-1]
            ]
            if self.stops_after is None:
                answers.append(list(self.end))
            for answer in answers[: self.stops_after]:
                await self._router.send_multipart([client, b"", *answer])


class Server:
    """A pod's HTTP server, which says where it publishes."""

    def __init__(self, answer: Any = None, status: int = 200) -> None:
        self.answer = answer
        self.status = status
        self.asked = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/kv_event_sources", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(self.answer, status=self.status)
