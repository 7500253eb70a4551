"""The standard profile's picker behind a gateway that somebody else configured.

One Envoy has a listener for each pair of body modes, none of which helps against forged headers,
asks for retries, or retries by itself.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from picker.config import Size
from picker.names import DESTINATION
from tests.e2e.gateway import (
    CHAT,
    FORGED,
    JSON,
    Gateway,
    chat,
    ext_proc,
    manager,
    refused,
    running_gateway,
)
from tests.e2e.http2 import connected
from tests.e2e.pods import ACT

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOWN = ("FULL_DUPLEX_STREAMED", "BUFFERED", "BUFFERED_PARTIAL")
MODES = [
    *((request, "FULL_DUPLEX_STREAMED") for request in (*SHOWN, "STREAMED", "NONE")),
    *(("BUFFERED", response) for response in ("STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "NONE")),
    ("FULL_DUPLEX_STREAMED", "NONE"),
    ("STREAMED", "STREAMED"),
]


def obeys_override(request: str, response: str) -> bool:
    """Whether Envoy lets the picker turn response bodies off."""
    return "FULL_DUPLEX_STREAMED" not in (request, response) and response != "NONE"


def listener_for_each_mode(told: dict[str, Any]) -> None:
    original = told["static_resources"]["listeners"]
    listeners = []
    for request, response in MODES:
        one: dict[str, Any] = {"static_resources": {"listeners": copy.deepcopy(original)}}
        mode = ext_proc(one)["processing_mode"]
        mode |= {"request_body_mode": request, "response_body_mode": response}
        ext_proc(one)["grpc_service"].pop("initial_metadata")
        ext_proc(one)["mutation_rules"] = {"disallow_is_error": True}
        del manager(one)["early_header_mutation_extensions"]
        name = f"{request}-{response}"
        manager(one)["stat_prefix"] = manager(one)["route_config"]["name"] = name
        (listener,) = one["static_resources"]["listeners"]
        listener["name"] = name
        listeners.append(listener)
    told["static_resources"]["listeners"] = [*original, *listeners]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(change=listener_for_each_mode) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def not_reading() -> AsyncIterator[Gateway]:
    """Its picker does not read usage from responses."""
    async with running_gateway(change=listener_for_each_mode, usage=False) as gateway:
        yield gateway


@pytest.mark.parametrize(("request_mode", "response_mode"), MODES)
async def test_every_mode(gateway: Gateway, request_mode: str, response_mode: str) -> None:
    await go_through(gateway, request_mode, response_mode, usage=response_mode != "NONE")


@pytest.mark.parametrize(
    ("request_mode", "response_mode"), [modes for modes in MODES if obeys_override(*modes)]
)
async def test_every_mode_that_the_picker_overrides(
    not_reading: Gateway, request_mode: str, response_mode: str
) -> None:
    await go_through(not_reading, request_mode, response_mode, usage=False)


async def go_through(
    gateway: Gateway, request_mode: str, response_mode: str, *, usage: bool
) -> None:
    for pod in gateway.pods:
        pod.reset()
    name = f"{request_mode}-{response_mode}"
    port = gateway.envoy.ports[name]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        for case, body in (("short", chat()), ("long", chat("x" * 300_000)), ("none", None)):
            headers = [*FORGED, *JSON.items(), ("x-request-id", id_of(name, case))]
            method = "GET" if body is None else "POST"
            async with http.request(method, CHAT, data=body, headers=headers) as response:
                assert response.status == 200
                seen = await response.json()
            told = dict(seen["headers"])
            assert len(told) == len(seen["headers"])
            assert seen["sha"] == hashlib.sha256(body or b"").hexdigest()
            assert told[DESTINATION].split(",")[0] == seen["pod"]
            assert "192.0.2.99" not in str(told)
            await gateway.idle()
            decision = await gateway.decision(id_of(name, case))
            assert (decision["outcome"], decision["status"]) == ("completed", 200)
            assert (decision["model"] == "m") == (body is not None and request_mode in SHOWN)
            assert (decision["usage"] is not None) == usage
        await with_trailers(port)
        await events_pass(gateway, http, name)
    for stat in ("spurious_msgs_received", "streams_failed"):
        assert await gateway.envoy.stat(f"http.{name}.ext_proc.{stat}") == 0


def id_of(name: str, case: str) -> str:
    """Longer than a UUID: into one of those, Envoy writes whether to trace the request."""
    return f"the request {case} of {name}".replace(" ", "-").ljust(40, "-")


async def with_trailers(port: int) -> None:
    async with connected(port) as client:
        await client.headers("POST", CHAT, JSON)
        await client.data(chat())
        await client.trailers({"x-checksum": "1"})
        status, answer = await client.response()
        assert status == 200
        assert json.loads(answer)["sha"] == hashlib.sha256(chat()).hexdigest()


async def events_pass(gateway: Gateway, http: aiohttp.ClientSession, name: str) -> None:
    """One by one where Envoy does not hold them back; they count as in flight until their end."""
    headers = JSON | {ACT: "stream", "x-request-id": id_of(name, "events")}
    sending = asyncio.create_task(http.post(CHAT, data=chat(), headers=headers))
    for pod in gateway.pods:
        pod.go.release()
    async with asyncio.timeout(30):
        while not any(pod.events for pod in gateway.pods):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (pod,) = (pod for pod in gateway.pods if pod.events)
    pod.go.release()
    await pod.wait_for_events(2)
    assert await gateway.inflight() >= 1
    pod.stop()
    async with await sending as response:
        assert await response.read() == b"data: 0\n\ndata: 1\n\n"
    await gateway.idle()
    assert (await gateway.decision(id_of(name, "events")))["outcome"] == "completed"


async def test_a_buffered_body_over_the_limit_is_413() -> None:
    def buffered(told: dict[str, Any]) -> None:
        ext_proc(told)["processing_mode"]["request_body_mode"] = "BUFFERED"
        told["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 1 << 20

    async with running_gateway(change=buffered, max_body=Size(100_000)) as gateway:
        body = bytes(100_001)
        for data in (body, pieces(body)):
            async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
                assert await refused(response) == (413, "body_too_large")
        async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert response.status == 200


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_responses_are_not_shown_to_a_picker_that_does_not_read_them() -> None:
    def buffered(told: dict[str, Any]) -> None:
        mode = ext_proc(told)["processing_mode"]
        mode |= {"request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"}

    async with running_gateway(change=buffered, usage=False) as gateway:
        async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert response.status == 200
        await gateway.idle()
        # Headers, body, response headers.
        assert await gateway.envoy.stat("http.clients.ext_proc.stream_msgs_sent") == 3
