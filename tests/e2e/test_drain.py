"""A picker that ends: Envoy goes elsewhere, streams end in peace, and what waits is answered."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from picker.config import Duration, Flow, Saturation
from picker.envoy.bootstrap import bootstrap
from tests.e2e.gateway import (
    CHAT,
    DEADLINE,
    JSON,
    chat,
    config_for,
    refused,
    running_gateway,
    until,
)
from tests.e2e.picker_process import PickerProcess, Profile
from tests.e2e.pods import ACT, Pod, running_pods
from tests.e2e.test_outages import loaded_client
from tests.envoy_process import Envoy, running_envoy

DRAIN = "drainDelay: 1s\ndrain: 30s\n"


@asynccontextmanager
async def two_pickers(
    folder: Path, more: str
) -> AsyncIterator[tuple[list[PickerProcess], list[Pod], Envoy, aiohttp.ClientSession]]:
    """Behind one Envoy, which asks either."""
    async with running_pods(2) as pods:
        addresses = [pod.address for pod in pods]
        pickers = []
        try:
            for name in ("a", "b"):
                (folder / name).mkdir()
                pickers.append(PickerProcess(addresses, folder / name, more))
                await pickers[-1].start()
            config = msgspec.structs.replace(config_for(pods), listen=pickers[0].listen)
            told: dict[str, Any] = bootstrap(config)
            clusters = told["static_resources"]["clusters"]
            (cluster,) = [each for each in clusters if each["name"] == "picker-grpc"]
            (locality,) = cluster["load_assignment"]["endpoints"]
            second = copy.deepcopy(locality["lb_endpoints"][0])
            address = second["endpoint"]["address"]["socket_address"]
            address["port_value"] = pickers[1].listen.grpc
            locality["lb_endpoints"].append(second)
            async with running_envoy(told) as envoy, aiohttp.ClientSession(envoy.url) as http:
                await envoy.wait_for_stat("cluster.picker-grpc.membership_healthy", 2)
                yield pickers, pods, envoy, http
        finally:
            for picker in pickers:
                await picker.kill()


async def test_no_request_is_lost_when_one_of_two_pickers_ends(tmp_path: Path) -> None:
    async with two_pickers(tmp_path, DRAIN) as (pickers, pods, envoy, http):
        async with streams(http, pods, 6) as running, loaded_client(http) as results:
            async with asyncio.timeout(DEADLINE):
                while len(results) < 50:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            pickers[0].terminate()
            await envoy.wait_for_stat("cluster.picker-grpc.membership_healthy", 1)
            settled = len(results)
            async with asyncio.timeout(DEADLINE):
                while len(results) < settled + 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(DEADLINE):
                for pod in pods:
                    pod.stopping = True
                    for _ in running:
                        pod.go.release()
                for stream in running:  # those of the picker that ends, too
                    assert await stream.content.read() == b""
                assert await pickers[0].ended() == 0
                while len(results) < settled + 400:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert set(results) == {"served"}


@asynccontextmanager
async def streams(
    http: aiohttp.ClientSession, pods: list[Pod], count: int
) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    """Answers that have begun."""
    headers = JSON | {ACT: "stream"}
    asked = [
        asyncio.create_task(http.post(CHAT, data=chat(str(number)), headers=headers).__aenter__())
        for number in range(count)
    ]
    running: list[aiohttp.ClientResponse] = []
    try:
        async with asyncio.timeout(DEADLINE):
            running = await asyncio.gather(*asked)
            for pod in pods:
                for _ in range(pod.served):
                    pod.go.release()
            for stream in running:
                assert await stream.content.readuntil(b"\n\n") == b"data: 0\n\n"
        yield running
    finally:
        for stream in running:
            stream.close()


@pytest.mark.parametrize("profile", ["standard", "lean"])
async def test_what_still_waits_for_its_turn_is_answered(profile: Profile) -> None:
    """The pod is busy with a stream, which outlives the drain."""
    flow = Flow(enabled=True, saturation=Saturation(inflight=1))
    async with running_gateway(
        pods=1,
        profile=profile,
        flow=flow,
        drain_delay=Duration(0),
        drain=Duration(1),
    ) as gateway:
        headers = JSON | {ACT: "stream"}

        async def waiting() -> int:
            return gateway.service.waiting

        async with gateway.http.post(CHAT, data=chat(), headers=headers):
            asked = [asyncio.create_task(gateway.http.post(CHAT, data=chat())) for _ in range(5)]
            await until(waiting, 5)
            async with asyncio.timeout(DEADLINE):
                _, *answers = await asyncio.gather(gateway.service.drain(), *asked)
            for answer in answers:
                assert await refused(answer) == (503, "draining")
                assert answer.headers["retry-after"] == "1"
