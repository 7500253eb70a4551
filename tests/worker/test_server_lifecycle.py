"""Clients that go away, and servers that stop: nothing is left running, nobody is left waiting."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.worker.api import (
    Api,
    ScriptedRunner,
    application,
    connected,
    http_post,
    parse_events,
    serving,
    until,
)
from worker.api.lifecycle import LIFECYCLE
from worker.api.serving import serve
from worker.scheduler import Scheduled

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
ENDLESS = "x" * 500


class Gate:
    """Holds the engine before each step that has anything to do beyond `free` tokens."""

    def __init__(self, free: int = 3) -> None:
        self.open = threading.Event()
        self._free = free

    def __call__(self, batch: list[Scheduled]) -> None:
        if any(sequence.num_output_tokens >= self._free for sequence, _ in batch):
            assert self.open.wait(10)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_client_that_leaves_stops_the_engine(path: str, stream: bool, n: int) -> None:
    gate = Gate()
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        "max_tokens": 400,
        "n": n,
        "stream": stream,
    }
    async with serving(ScriptedRunner(ENDLESS, gate)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(http_post(path, json.dumps(body).encode()))
        await api.until_submitted(n)
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await api.until_active(0)  # the server has noticed while the engine still computes
        gate.open.set()
        await api.until_idle()
        page = (await api.get("/metrics"))[1].decode()
    produced = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_to")]
    assert float(produced[0].split()[-1]) < 10 * n  # a few steps, not 400


async def test_a_client_that_leaves_while_it_waits_in_the_queue() -> None:
    gate = Gate(0)
    async with serving(ScriptedRunner("abc", gate)) as api:
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(http_post(COMPLETION, b'{"prompt": "x"}'))
        await api.until_active(1)
        writer.close()
        await api.until_active(0)
        gate.open.set()
        await api.until_idle()
        assert (await api.ok(COMPLETION, prompt="x"))["choices"][0]["text"] == "abc"


async def test_a_reader_that_stops_reading_does_not_hold_the_others() -> None:
    async with serving(ScriptedRunner("x" * 400)) as api:
        body = {
            "prompt": ["x" * 400] * 128,
            "max_tokens": 1,
            "echo": True,
            "logprobs": 3,
            "stream": True,
        }  # gives more bytes than the kernel's buffers take
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", api.port))
            client.sendall(http_post(COMPLETION, json.dumps(body).encode()))
            await api.until_active(1)
            await until(lambda: api.loop.num_unfinished == 0)  # the engine is not held up
            answer = await api.ok(COMPLETION, prompt="x", max_tokens=400)
            assert answer["usage"]["completion_tokens"] == 400
            assert api.app[LIFECYCLE].num_active == 1  # it still has much to send
        await api.until_active(0)
        await api.until_idle()


@asynccontextmanager
async def served(
    runner: ScriptedRunner, drain_seconds: float = 10.0, **options: Any
) -> AsyncIterator[tuple[Api, asyncio.Task[None]]]:
    """A worker under `serve`, as the command runs it; the task ends when the worker does."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with application(runner) as parts:
        serving_task = asyncio.create_task(
            serve(
                parts[0],
                "127.0.0.1",
                0,
                drain_seconds=drain_seconds,
                on_ready=port.set_result,
                **options,
            )
        )
        async with connected(*parts, await port) as api:
            yield api, serving_task
        await asyncio.wait_for(serving_task, 10)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_stopping_when_idle() -> None:
    async with served(ScriptedRunner("abc")) as (api, task):
        assert (await api.get("/ready"))[0] == 200
        stop()
        await asyncio.wait_for(task, 10)
        with pytest.raises(aiohttp.ClientConnectionError):
            await api.get("/health")


async def test_running_requests_finish_while_new_ones_are_refused() -> None:
    gate = Gate()
    async with served(ScriptedRunner("hello", gate)) as (api, task):
        running = asyncio.create_task(api.ok(COMPLETION, prompt="x"))
        streaming = asyncio.create_task(api.events(COMPLETION, prompt="x"))
        await api.until_submitted(2)
        assert (await api.get("/ready"))[0] == 200
        stop()
        await until(lambda: api.app[LIFECYCLE].draining)
        async with api.http.post(COMPLETION, json={"prompt": "new"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert response.headers["Connection"] == "close"
            assert (await response.json())["error"]["code"] == 503
        assert (await api.get("/ready"))[0] == 503
        assert (await api.get("/health"))[0] == 200
        assert (await api.get("/metrics"))[0] == 200
        assert not task.done()
        gate.open.set()
        assert (await running)["choices"][0]["text"] == "hello"
        chunks = await streaming
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"


def after_drain_seconds() -> None:
    """The drain's own time, 50 ms, is up."""


@pytest.mark.parametrize(
    ("drain_seconds", "hurry"), [(0.05, after_drain_seconds), (60.0, stop)], ids=["time", "signal"]
)
async def test_requests_that_outlive_the_drain_are_told(
    drain_seconds: float, hurry: Callable[[], None]
) -> None:
    gate = Gate()
    async with served(ScriptedRunner(ENDLESS, gate), drain_seconds) as (api, task):
        ask = {"prompt": "x", "max_tokens": 400, "n": 2}
        running = asyncio.create_task(api.post(COMPLETION, ask))
        async with api.http.post(COMPLETION, json=ask | {"stream": True}) as response:
            begun = await response.content.readuntil(b"\n\n")
            await api.until_submitted(4)
            stop()
            await until(lambda: api.app[LIFECYCLE].draining)
            hurry()
            text = (begun + await response.content.read()).decode()
        status, answer = await running
        gate.open.set()
        await asyncio.wait_for(task, 10)
        await api.until_idle()
    assert status == 503
    assert "shutting down" in answer["error"]["message"]
    assert "shutting down" in parse_events(text)[-1]["error"]["message"]


async def test_readiness_comes_after_the_warm_up() -> None:
    warmed, port = asyncio.Event(), asyncio.Event()

    async def warm_up() -> None:
        port.set()
        await warmed.wait()

    async with application(ScriptedRunner("x")) as parts:
        task = asyncio.create_task(serve(parts[0], "127.0.0.1", 0, warm_up=warm_up))
        await port.wait()
        assert not parts[0][LIFECYCLE].ready
        warmed.set()
        await until(lambda: parts[0][LIFECYCLE].ready)
        stop()
        await asyncio.wait_for(task, 10)


async def test_a_signal_ends_the_warm_up() -> None:
    begun = asyncio.Event()

    async def warm_up() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with application(ScriptedRunner("x")) as parts:
        task = asyncio.create_task(serve(parts[0], "127.0.0.1", 0, warm_up=warm_up))
        await begun.wait()
        stop()
        await asyncio.wait_for(task, 10)
        assert not parts[0][LIFECYCLE].ready


async def test_a_taken_port_is_an_error() -> None:
    async with serving() as api, application() as parts:
        with pytest.raises(OSError, match="in use"):
            await serve(parts[0], "127.0.0.1", api.port)
