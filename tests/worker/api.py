"""A worker's HTTP server for tests: everything is real but the model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
from aiohttp import web

from text.byte_tokenizer import ByteTokenizer
from worker.api.bodies import BodyLimits
from worker.api.serving import listening
from worker.config import EngineConfig
from worker.engine import Engine, Runner
from worker.loop import EngineLoop
from worker.metrics import Metrics
from worker.profiles import PROFILES
from worker.scheduler import Scheduled
from worker.sequence import Sample, Sequence, TokenLogprobs
from worker.server import LIFECYCLE, make_app
from worker.simulate import SimulatedRunner

MODEL = "tiny"
ALIAS = "tiny-alias"
END = 258  # <|im_end|>, one of the byte tokenizer's ends
CONFIG = EngineConfig(num_blocks=512, max_model_len=512)
LETTERS = list(b"etaoinshrdlu")


class ScriptedRunner:
    """A model that says `text` and then ends, whatever it is asked.

    Its second choice is always the byte before, half as likely; the third cannot happen.
    `before_step` is called with each step's batch, on the engine's thread.
    """

    def __init__(
        self,
        text: str | bytes | list[int],
        before_step: Callable[[list[Scheduled]], object] | None = None,
    ) -> None:
        data = text.encode() if isinstance(text, str) else text
        self._script = [*data, END]
        self._before_step = before_step

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        if self._before_step is not None:
            self._before_step(batch)
        return [
            self._sample(sequence)
            for sequence, _ in batch
            if sequence.num_computed_tokens == len(sequence.token_ids)
        ]

    def _sample(self, sequence: Sequence) -> Sample:
        if sequence.needs_prompt_logits:
            sequence.prompt_logprobs = [None, *map(logprobs_of, sequence.token_ids[1:])]
        token_id = self._script[sequence.num_output_tokens % len(self._script)]
        return Sample(token_id, None if sequence.params.logprobs is None else logprobs_of(token_id))


def logprobs_of(token_id: int) -> TokenLogprobs:
    top = [(token_id, math.log(0.5)), (token_id - 1, math.log(0.25)), (0, -math.inf)]
    return TokenLogprobs(token_id, top[0][1], 1, top)


@dataclass
class Api:
    """A running server and ways to talk to it."""

    app: web.Application
    loop: EngineLoop
    engine: Engine
    port: int
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and decoded body."""
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def ok(self, path: str, **body: object) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.http.get(path) as response:
            return response.status, await response.read()

    async def events(self, path: str, **body: object) -> list[Any]:
        """The data of a stream's events, without the final [DONE], which must be there."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = (await response.read()).decode()
        return parse_events(text)

    async def raw(self, data: bytes) -> bytes:
        """Everything the server answers to `data`, until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def until_idle(self) -> None:
        """Wait until the engine holds no sequence and no block."""
        await until(lambda: self.engine.num_unfinished == 0 and self.engine.pool.usage == 0)

    async def until_submitted(self, count: int) -> None:
        """Wait until so many sequences wait or run."""
        await until(lambda: self.loop.num_unfinished == count)

    async def until_active(self, count: int) -> None:
        """Wait until the server is busy with so many requests."""
        await until(lambda: self.app[LIFECYCLE].num_active == count)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread or task brings about, or fail."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the engine's thread sets no asyncio events
            await asyncio.sleep(0.001)


def parse_events(text: str) -> list[Any]:
    *events, done, rest = text.split("\n\n")
    assert done == "data: [DONE]"
    assert rest == ""
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a request on a connection of its own."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        "Connection: close",
        "Content-Type: application/json",
        *headers,
    ]
    if not any(line.lower().startswith(("content-length", "transfer-enc")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def application(
    runner: Runner | None = None,
    *,
    config: EngineConfig = CONFIG,
    api_key: str | None = None,
    body_limits: BodyLimits | None = None,
) -> AsyncIterator[tuple[web.Application, EngineLoop, Engine]]:
    """A worker's application with a running engine, not listening yet."""
    metrics = Metrics(MODEL, config, "simulated")
    engine = Engine(config, runner or SimulatedRunner(PROFILES["instant"], LETTERS), metrics)
    loop = EngineLoop(engine)
    app = make_app(
        loop=loop,
        tokenizer=ByteTokenizer(),
        metrics=metrics,
        model_names=[MODEL, ALIAS],
        api_key=api_key,
        kv_event_sources={"0": {"endpoint": "tcp://127.0.0.1:5557"}},
        body_limits=body_limits or BodyLimits(),
    )
    loop.start()
    try:
        yield app, loop, engine
    finally:
        await loop.close()


@asynccontextmanager
async def connected(
    app: web.Application, loop: EngineLoop, engine: Engine, port: int, api_key: str = "unused"
) -> AsyncIterator[Api]:
    """Clients of a server that listens on `port`."""
    url = f"http://127.0.0.1:{port}"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
    async with aiohttp.ClientSession(url) as http, client:
        yield Api(app, loop, engine, port, http, client)


@asynccontextmanager
async def serving(
    runner: Runner | None = None,
    *,
    config: EngineConfig = CONFIG,
    api_key: str | None = None,
    body_limits: BodyLimits | None = None,
) -> AsyncIterator[Api]:
    """A worker on a free port."""
    async with (
        application(runner, config=config, api_key=api_key, body_limits=body_limits) as parts,
        listening(parts[0], "127.0.0.1", 0) as port,
        connected(*parts, port, api_key or "unused") as api,
    ):
        yield api
