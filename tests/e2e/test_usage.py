"""usage.lua in real Envoy: what it finds in responses, however they are cut."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from picker.config import Config, EndpointSpec, Envoy, Listen, PoolSection
from picker.envoy.bootstrap import bootstrap
from picker.service import Service
from tests.e2e.gateway import ANY_PORTS, until
from tests.e2e.pods import METRICS
from tests.envoy_process import running_envoy

pytestmark = pytest.mark.asyncio(loop_scope="module")

SSE = "text/event-stream; charset=utf-8"
JSON = "application/json"
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 22,
    "prompt_tokens_details": {"cached_tokens": 4},
}
TOLD = {"promptTokens": 11, "completionTokens": 22, "cachedTokens": 4}


class ScriptedPod:
    """Answers each request with the pieces that it is told, one write each."""

    def __init__(self) -> None:
        self.head = ""
        self.pieces: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                if head.startswith("get /metrics"):
                    page = METRICS.encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page
                    )
                else:
                    await self.answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {self.head}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for piece in (*self.pieces, b""):
            await writer.drain()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class Pipe:
    """A client, Envoy, a picker and a scripted pod."""

    def __init__(
        self, pod: ScriptedPod, http: aiohttp.ClientSession, admin: aiohttp.ClientSession
    ) -> None:
        self.pod = pod
        self.http = http
        self.admin = admin
        self.count = 0

    async def usage(
        self, *pieces: bytes, kind: str = JSON, status: str = "200 OK", more: str = ""
    ) -> dict[str, Any] | None:
        """What the picker is told of a response; its bytes must pass unchanged."""
        self.count += 1
        name = f"request-{self.count}"
        self.pod.head = f"{status}\r\ncontent-type: {kind}{more}"
        self.pod.pieces = [piece for piece in pieces if piece]
        async with self.http.get("/", headers={"x-request-id": name}) as response:
            assert await response.read() == b"".join(pieces)
        told: list[Any] = []

        async def over() -> bool:
            params = {"request_id": name}
            async with self.admin.get("/debug/decisions", params=params) as page:
                (decision,) = (await page.json())["decisions"]
            told.append(decision)
            return decision["outcome"] == "completed"

        await until(over, True)
        assert told[-1]["firstTokenSeconds"] is not None
        usage: dict[str, Any] | None = told[-1]["usage"]
        return usage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipe() -> AsyncIterator[Pipe]:
    async with AsyncExitStack() as stack:
        pod = ScriptedPod()
        server = await asyncio.start_server(pod.serve, "127.0.0.1", 0)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        config = Config(
            listen=ANY_PORTS,
            pool=PoolSection(endpoints=[EndpointSpec(address=f"127.0.0.1:{port}")]),
            envoy=Envoy(profile="lean"),
        )
        service = Service(config)
        stack.push_async_callback(service.stop)
        ports = await service.start()
        await service.until_ready()
        listen = Listen(grpc=ports.grpc, http=ports.http)
        told = bootstrap(msgspec.structs.replace(config, listen=listen))
        envoy = await stack.enter_async_context(running_envoy(told))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(envoy.url, auto_decompress=False)
        )
        admin_url = f"http://127.0.0.1:{ports.admin}"
        admin = await stack.enter_async_context(aiohttp.ClientSession(admin_url))
        yield Pipe(pod, http, admin)
        assert "script" not in envoy.log


def event(data: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


STREAM = (
    event({"choices": [{"delta": {"content": 'he said "usage"'}}], "usage": None}) * 3
    + event({"choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)


async def test_a_whole_answer(pipe: Pipe) -> None:
    answer = json.dumps({"choices": [{"text": "x" * 10_000}], "usage": USAGE}).encode()
    assert await pipe.usage(answer) == TOLD
    assert await pipe.usage(json.dumps({"usage": USAGE, "id": "x"}, indent=2).encode()) == TOLD


@pytest.mark.parametrize("cut", range(STREAM.index(b'"usage": {'), len(STREAM), 9))
async def test_a_stream_at_any_cut(pipe: Pipe, cut: int) -> None:
    assert await pipe.usage(STREAM[:cut], STREAM[cut:], kind=SSE) == TOLD


async def test_a_stream_in_single_bytes(pipe: Pipe) -> None:
    pieces = [STREAM[at : at + 1] for at in range(len(STREAM))]
    assert await pipe.usage(*pieces, kind=SSE) == TOLD


async def test_the_last_usage_of_a_long_stream_counts(pipe: Pipe) -> None:
    early = event({"choices": [{"delta": {"content": "x" * 90}}], "usage": {"prompt_tokens": 11}})
    pieces = [early] * 300 + [STREAM]
    assert await pipe.usage(*pieces, kind=SSE) == TOLD


@pytest.mark.parametrize("cut", [0, 10, 60, 100, 130, 200, 3000])
async def test_anthropic_tells_half_at_the_beginning(pipe: Pipe, cut: int) -> None:
    begin = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 6, "output_tokens": 1}},
    }
    middle = {"type": "content_block_delta", "delta": {"text": "x" * 90}}
    end = {"type": "message_delta", "usage": {"output_tokens": 22}}
    stream = event(begin, "message_start") + event(middle, "content_block_delta") * 100
    stream += event(end, "message_delta")
    usage = await pipe.usage(stream[:cut], stream[cut:], kind=SSE)
    assert usage == {"promptTokens": 11, "cachedTokens": 6, "completionTokens": 22}


async def test_the_responses_api_tells_it_within_its_last_event(pipe: Pipe) -> None:
    usage = {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 22,
        "output_tokens_details": {"reasoning_tokens": 1},
    }
    last = {"type": "response.completed", "response": {"output": "x" * 9000, "usage": usage}}
    assert await pipe.usage(event(last, "response.completed"), kind=SSE) == TOLD


@pytest.mark.parametrize(
    ("body", "kind", "status", "more"),
    [
        (b" ", JSON, "200 OK", ""),
        (b'{"id": 1}', JSON, "200 OK", ""),
        (b'{"usage": null}', JSON, "200 OK", ""),
        (b'{"usage": {"prompt_tokens": 1', JSON, "200 OK", ""),
        (b'{"usage": {"prompt_tokens": "many"}}', JSON, "200 OK", ""),
        (b'{"usage": {"prompt_tokens": 1}}', "text/plain", "200 OK", ""),
        (b'{"usage": {"prompt_tokens": 1}}', JSON, "404 Not Found", ""),
        (
            gzip.compress(b'{"usage": {"prompt_tokens": 1}}'),
            JSON,
            "200 OK",
            "\r\ncontent-encoding: gzip",
        ),
        (b'"usage": ' * 500, JSON, "200 OK", ""),
        (b'{"usage": ' + b"{" * 2000 + b"}" * 2000 + b"}", JSON, "200 OK", ""),
    ],
)
async def test_answers_without_usage(
    pipe: Pipe, body: bytes, kind: str, status: str, more: str
) -> None:
    assert await pipe.usage(body, kind=kind, status=status, more=more) is None
