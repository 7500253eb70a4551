"""What becomes of requests while a picker or its Envoy goes away, in the standard profile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from picker.config import Listen
from picker.envoy.bootstrap import bootstrap
from tests.e2e.gateway import DEADLINE, Gateway, chat, config_for, running_gateway
from tests.e2e.pods import ACT, Pod, running_pods
from tests.envoy_process import running_envoy
from tests.worker.process import free_ports

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"


class PickerProcess:
    """`warmpath pick` for some pods, on the same ports each time."""

    def __init__(self, pods: list[Pod], folder: Path) -> None:
        grpc, http, health, admin = free_ports(4)
        self.listen = Listen(grpc=grpc, http=http, health=health, admin=admin)
        ports = f"{{grpc: {grpc}, http: {http}, health: {health}, admin: {admin}}}"
        endpoints = "".join(f"  - address: {pod.address}\n" for pod in pods)
        self._file = folder / "warmpath.yaml"
        self._file.write_text(f"listen: {ports}\npool:\n  endpoints:\n{endpoints}")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker.cli", "pick", "-c", self._file),
            stderr=asyncio.subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{self.listen.admin}/readyz"
        async with asyncio.timeout(DEADLINE), aiohttp.ClientSession() as session:
            while True:
                assert self._process.returncode is None
                try:
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def loaded(url: str, clients: int = 4) -> AsyncIterator[list[str]]:
    """Requests from several clients without a pause; how each ended."""
    results: list[str] = []

    async def client(http: aiohttp.ClientSession) -> None:
        while True:
            results.append(await once(http))

    async with aiohttp.ClientSession(url) as http:
        tasks = [asyncio.create_task(client(http)) for _ in range(clients)]
        try:
            yield results
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def once(http: aiohttp.ClientSession) -> str:
    try:
        async with http.post(CHAT, data=chat(), headers=JSON) as response:
            told: Any = await response.json()
    except aiohttp.ClientError:
        return "cut"
    return "served" if response.status == 200 else str(told["error"]["code"])


async def until_more(results: list[str], what: str, count: int) -> None:
    """Wait until so many more results are of a kind."""
    wanted = results.count(what) + count
    async with asyncio.timeout(DEADLINE):
        while results.count(what) < wanted:  # noqa: ASYNC110  # of other processes
            await asyncio.sleep(0.01)


async def test_a_picker_that_crashes_under_load_is_back_when_it_is(tmp_path: Path) -> None:
    async with running_pods(2) as pods:
        picker = PickerProcess(pods, tmp_path)
        config = msgspec.structs.replace(config_for(pods), listen=picker.listen)
        try:
            await picker.start()
            async with (
                running_envoy(bootstrap(config)) as envoy,
                loaded(envoy.url) as results,
                aiohttp.ClientSession(envoy.url) as http,
            ):
                await until_more(results, "served", 50)
                headers = JSON | {ACT: "stream"}
                running = asyncio.create_task(http.post(CHAT, data=chat(), headers=headers))
                for pod in pods:
                    pod.go.release()
                async with await running as stream:
                    assert await stream.content.readuntil(b"\n\n") == b"data: 0\n\n"
                    await picker.kill()
                    with pytest.raises(aiohttp.ClientPayloadError):  # fail-close, and no hang
                        await asyncio.wait_for(stream.content.read(), DEADLINE)
                await until_more(results, "no_picker", 10)
                assert set(results) <= {"served", "no_picker", "cut"}
                await picker.start()
                await until_more(results, "served", 50)
                settled = len(results)
                await until_more(results, "served", 200)
                assert set(results[settled:]) == {"served"}
        finally:
            await picker.kill()


async def test_a_draining_picker_finishes_its_streams_and_refuses_others() -> None:
    async with running_gateway(pods=1) as gateway:
        (pod,) = gateway.pods
        async with streaming(gateway, pod) as stream:
            draining = asyncio.create_task(gateway.service.drain())
            await refused(gateway)
            pod.go.release()
            assert await stream.content.readuntil(b"\n\n") == b"data: 1\n\n"
            assert not draining.done()
            pod.stop()
            assert await stream.content.read() == b""
        async with asyncio.timeout(DEADLINE):
            await draining
        assert (await gateway.decision("streams"))["outcome"] == "completed"


@asynccontextmanager
async def streaming(gateway: Gateway, pod: Pod) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream of events after its first."""
    headers = JSON | {ACT: "stream", "x-request-id": "streams"}
    pod.go.release()
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as stream:
        assert await stream.content.readuntil(b"\n\n") == b"data: 0\n\n"
        yield stream


async def refused(gateway: Gateway) -> None:
    """Wait until new requests are."""
    async with asyncio.timeout(DEADLINE):
        while True:
            async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
                if response.status == 503:
                    assert (await response.json())["error"]["code"] == "no_picker"
                    return


async def test_an_envoy_that_dies_leaves_nothing_in_flight() -> None:
    async with running_gateway(pods=1) as gateway:
        (pod,) = gateway.pods
        async with streaming(gateway, pod) as stream:
            assert await gateway.inflight() == 1
            gateway.envoy.process.kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.content.read()
        await gateway.idle()
        assert (await gateway.decision("streams"))["outcome"] == "aborted"
