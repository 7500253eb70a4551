"""The standard profile: real Envoy asks a real picker over ext_proc."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, NotFoundError

from picker.config import Size
from tests.e2e.gateway import DEADLINE, Gateway, chat, ext_proc, manager, running_gateway, until
from tests.e2e.http2 import connected
from tests.e2e.pods import ACT, USAGE, Pod
from tests.worker.process import running_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
OWNED = (
    "X-Gateway-Destination-Endpoint",
    "x-gateway-destination-endpoint-subset",
    "X-GATEWAY-DESTINATION-ENDPOINT-SERVED",
    "x-gateway-destination-endpoint-fallback",
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
    "x-warmpath-anything",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway() as gateway:
        yield gateway


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def shown(response: aiohttp.ClientResponse, seen: Any) -> dict[str, str]:
    """The headers that reached the pod, none of them twice."""
    assert response.status == 200
    names = [name for name, _ in seen["headers"]]
    assert len(set(names)) == len(names)
    return dict(seen["headers"])


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """A body without a length, in several writes."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


# Requests


async def test_a_body_in_pieces_reaches_the_picked_pod_unchanged(gateway: Gateway) -> None:
    body = chat(pad=200_000)
    parts = pieces(body[:10], body[10:70_000], body[70_000:])
    headers = JSON | {"x-request-id": "in-pieces"}
    async with gateway.http.post(CHAT, data=parts, headers=headers) as response:
        seen = await response.json()
        told = shown(response, seen)
    assert seen["sha"] == sha(body)
    assert told["x-gateway-destination-endpoint"].split(",")[0] == seen["pod"]
    assert told["x-request-id"] == "in-pieces"
    await gateway.idle()
    decision = await gateway.decision("in-pieces")
    assert decision["endpoint"] == seen["pod"]
    assert decision["outcome"] == "completed"
    assert decision["status"] == 200
    assert decision["usage"]["promptTokens"] == USAGE["prompt_tokens"]
    assert decision["usage"]["completionTokens"] == USAGE["completion_tokens"]
    assert decision["firstTokenSeconds"] > 0


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
async def test_a_request_without_body(gateway: Gateway, method: str) -> None:
    async with gateway.http.request(method, "/v1/models?x=1") as response:
        seen = await response.json()
        told = shown(response, seen)
    assert (seen["method"], seen["path"]) == (method, "/v1/models?x=1")
    assert told["x-gateway-destination-endpoint"].split(",")[0] == seen["pod"]
    await gateway.idle()


async def test_head_has_no_body(gateway: Gateway) -> None:
    async with gateway.http.head("/health") as response:
        assert response.status == 200
        assert await response.read() == b""
    await gateway.idle()


async def test_http2_with_an_empty_last_frame(gateway: Gateway) -> None:
    async with connected(gateway.envoy.port) as client:
        await client.headers("POST", CHAT, JSON)
        await client.data(chat())
        await client.data(b"", end=True)
        status, body = await client.response()
        assert status == 200
        assert json.loads(body)["sha"] == sha(chat())
        await client.headers("GET", "/v1/models", end=True)
        assert (await client.response())[0] == 200
        await client.headers("POST", "/anything")
        await client.data(b"", end=True)
        assert (await client.response())[0] == 200
    await gateway.idle()


async def test_trailers() -> None:
    async with running_gateway() as gateway:
        async with connected(gateway.envoy.port) as client:
            await client.headers("POST", CHAT, JSON)
            await client.data(chat()[:9])
            await client.data(chat()[9:])
            await client.trailers({"x-checksum": "1"})
            status, body = await client.response()
            assert status == 200
            assert json.loads(body)["sha"] == sha(chat())
            await client.headers("POST", "/anything")
            await client.trailers({"x-checksum": "1"})
            assert (await client.response())[0] == 200
        await gateway.idle()


def without_retries(told: dict[str, Any]) -> None:
    for host in manager(told)["route_config"]["virtual_hosts"]:
        for route in host["routes"]:
            route["route"].pop("retry_policy", None)


async def test_a_long_body(gateway: Gateway) -> None:
    body = chat(text="x" * 3_000_000)
    for data in (body, pieces(body[:1_000_000], body[1_000_000:])):
        async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
            assert (await response.json())["sha"] == sha(body)
    async with connected(gateway.envoy.port) as client:
        await client.headers("POST", CHAT, JSON)
        sent = 0
        for start in range(0, 60_000, 10_000):
            await client.data(chat(pad=60_000)[start : start + 10_000])
            sent += 10_000
        await client.data(chat(pad=60_000)[sent:], end=True)
        status, answer = await client.response()
        assert status == 200
        assert json.loads(answer)["sha"] == sha(chat(pad=60_000))
    await gateway.idle()


async def test_headers_of_the_pickers_own_do_not_pass(gateway: Gateway) -> None:
    evil = [(name, "192.0.2.99:9090") for name in OWNED for _ in range(2)]
    for method, data in (("POST", chat()), ("GET", None)):
        headers = [*evil, ("content-type", "application/json")]
        async with gateway.http.request(method, CHAT, data=data, headers=headers) as response:
            seen = await response.json()
            told = shown(response, seen)
        owned = {name for name in told if name in {each.lower() for each in OWNED}}
        assert owned == {"x-gateway-destination-endpoint"}
        assert "192.0.2.99" not in str(seen["headers"])
        assert seen["pod"] in {pod.address for pod in gateway.pods}


async def test_an_id_is_given_to_requests_without_one(gateway: Gateway) -> None:
    async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
        told = shown(response, await response.json())
    await gateway.idle()
    assert (await gateway.decision(told["x-request-id"]))["outcome"] == "completed"


async def test_a_conversation_stays_on_its_pod(gateway: Gateway) -> None:
    text = "All happy families are alike. " * 100
    served = set()
    for turn in range(6):
        body = chat(text + str(turn))
        async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
            served.add((await response.json())["pod"])
        await gateway.idle()
    assert len(served) == 1


async def test_real_workers_before_the_official_client() -> None:
    flags = ("--simulate", "instant", "--served-model-name", "m")
    async with running_worker(*flags) as one, running_worker(*flags) as two:
        addresses = [worker.url.removeprefix("http://") for worker in (one, two)]
        async with (
            running_gateway(pods=0, addresses=addresses) as gateway,
            AsyncOpenAI(base_url=f"{gateway.envoy.url}/v1", api_key="none") as client,
        ):
            assert [model.id async for model in client.models.list()] == ["m"]
            messages: list[Any] = [{"role": "system", "content": "Be brief. " * 100}]
            cached = []
            for turn in range(4):
                messages.append({"role": "user", "content": f"Question {turn}?"})
                stream = await client.chat.completions.create(
                    model="m",
                    messages=messages,
                    max_tokens=16,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                    if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                        cached.append(chunk.usage.prompt_tokens_details.cached_tokens or 0)
                messages.append({"role": "assistant", "content": text})
            assert cached[0] == 0
            assert cached[1:] == sorted(cached[1:])
            assert cached[1] > 100  # the conversation stayed where its prefix was
            await gateway.idle()
            async with gateway.admin.get("/debug/decisions") as response:
                decisions = (await response.json())["decisions"][:4]
            assert [each["usage"]["cachedTokens"] for each in decisions] == cached[::-1]
            with pytest.raises(NotFoundError):
                await client.chat.completions.create(model="other", messages=messages)


# Refusals


async def refused(response: aiohttp.ClientResponse) -> tuple[int, str]:
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-warmpath-refused"] == error["code"]
    return response.status, error["code"]


async def test_a_body_over_the_limit_is_413(gateway: Gateway) -> None:
    limit = gateway.service.config.max_body
    before = sum(pod.served for pod in gateway.pods)
    body = bytes(limit + 1)
    async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
        assert await refused(response) == (413, "body_too_large")
    async with gateway.http.post(CHAT, data=pieces(body), headers=JSON) as response:
        assert await refused(response) == (413, "body_too_large")
    assert sum(pod.served for pod in gateway.pods) == before
    await gateway.idle()


async def test_a_body_that_is_not_understood_is_400(gateway: Gateway) -> None:
    for body in (b"{", b"[]", b'{"model":1,"messages":[]}', b""):
        async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
            assert (await refused(response))[0] == 400
    await gateway.idle()


async def test_without_pods_requests_are_503() -> None:
    async with running_gateway(pods=0) as gateway:
        async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert (await refused(response))[0] == 503
            assert int(response.headers["retry-after"]) >= 1
        async with gateway.http.get("/v1/models") as response:
            assert (await refused(response))[0] == 503
        assert await gateway.metric("warmpath_refusals_total") == 2


# Responses


async def test_events_pass_one_by_one(gateway: Gateway) -> None:
    headers = JSON | {ACT: "stream", "x-request-id": "one-by-one"}
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
        assert response.status == 200
        pod = await serving(gateway, "one-by-one")
        for number in range(5):
            pod.go.release()
            async with asyncio.timeout(DEADLINE):
                assert await response.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
        assert await gateway.inflight() == 1  # no tokens: the first has come
        pod.stop()
        assert await response.content.read() == b""
    pod.stopping = False
    await gateway.idle()
    assert (await gateway.decision("one-by-one"))["outcome"] == "completed"


async def serving(gateway: Gateway, request_id: str) -> Pod:
    """The pod of a request."""
    decision = await gateway.decision(request_id)
    return next(pod for pod in gateway.pods if pod.address == decision["endpoint"])


async def test_a_client_that_leaves_is_noticed(gateway: Gateway) -> None:
    headers = JSON | {ACT: "stream", "x-request-id": "leaves"}
    async with aiohttp.ClientSession(gateway.envoy.url) as http:
        response = await http.post(CHAT, data=chat(), headers=headers)
        pod = await serving(gateway, "leaves")
        pod.go.release()
        assert await response.content.readuntil(b"\n\n")
        broken = pod.broken
    await gateway.idle()
    assert (await gateway.decision("leaves"))["outcome"] == "aborted"

    async def told() -> int:
        return pod.broken

    await until(told, broken + 1)


async def test_a_client_that_leaves_while_it_sends(gateway: Gateway) -> None:
    """Nothing was picked yet, so nothing is left."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.envoy.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nabc")
    await writer.drain()
    active = "http.clients.downstream_rq_active"
    await gateway.envoy.wait_for_stat(active, 1)
    writer.close()
    await gateway.envoy.wait_for_stat(active, 0)
    await gateway.idle()


async def test_a_pod_that_breaks_off_mid_stream(gateway: Gateway) -> None:
    headers = JSON | {ACT: "cut", "x-request-id": "cut"}
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 0\n\n"
        (await serving(gateway, "cut")).go.release()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    await gateway.idle()
    assert (await gateway.decision("cut"))["outcome"] == "aborted"


async def test_a_dead_pods_requests_go_to_the_fallback() -> None:
    async with running_gateway() as gateway:
        dead, other = gateway.pods
        await dead.kill()
        async with asyncio.timeout(DEADLINE):
            while await gateway.metric("warmpath_moved_picks_total") == 0:
                async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
                    assert (await response.json())["pod"] == other.address
        await gateway.idle()
        label = f'endpoint="{dead.address}"'
        assert await gateway.metric("warmpath_ended_requests_total", label) == 0


# Every mode of a gateway that we did not configure


def modes(request: str, response: str, trailers: str = "SEND") -> Callable[[dict[str, Any]], None]:
    """A gateway with these modes for bodies, and no help of Envoy's against forged headers."""

    def change(told: dict[str, Any]) -> None:
        mode = ext_proc(told)["processing_mode"]
        mode |= {"request_body_mode": request, "response_body_mode": response}
        mode |= {"request_trailer_mode": trailers, "response_trailer_mode": trailers}
        del manager(told)["early_header_mutation_extensions"]
        without_retries(told)

    return change


SHOWN = ("FULL_DUPLEX_STREAMED", "BUFFERED", "BUFFERED_PARTIAL")
MODES = [
    *((request, "FULL_DUPLEX_STREAMED") for request in (*SHOWN, "STREAMED", "NONE")),
    *(("BUFFERED", response) for response in ("STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "NONE")),
    ("FULL_DUPLEX_STREAMED", "NONE"),
    ("STREAMED", "STREAMED"),
]


@pytest.mark.parametrize(("request_mode", "response_mode"), MODES)
@pytest.mark.parametrize("usage", [True, False])
async def test_every_mode(request_mode: str, response_mode: str, usage: bool) -> None:
    change = modes(request_mode, response_mode)
    evil = dict.fromkeys(OWNED, "192.0.2.99:9090")
    async with running_gateway(change=change, usage=usage) as gateway:
        for name, body in (("short", chat()), ("long", chat(pad=300_000)), ("none", None)):
            headers = {**JSON, **evil, "x-request-id": name}
            method = "GET" if body is None else "POST"
            async with gateway.http.request(method, CHAT, data=body, headers=headers) as response:
                seen = await response.json()
                told = shown(response, seen)
            assert seen["sha"] == sha(body or b"")
            assert told["x-gateway-destination-endpoint"].split(",")[0] == seen["pod"]
            assert "192.0.2.99" not in str(told)
            await gateway.idle()
            decision = await gateway.decision(name)
            assert decision["outcome"] == "completed"
            assert decision["status"] == 200
            assert (decision["model"] == "m") == (body is not None and request_mode in SHOWN)
            assert (decision["usage"] is not None) == (usage and response_mode != "NONE")

        async with connected(gateway.envoy.port) as client:
            await client.headers("POST", CHAT, JSON)
            await client.data(chat())
            await client.trailers({"x-checksum": "1"})
            status, answer = await client.response()
            assert status == 200
            assert json.loads(answer)["sha"] == sha(chat())

        headers = JSON | {ACT: "stream", "x-request-id": "events"}
        sending = asyncio.create_task(gateway.http.post(CHAT, data=chat(), headers=headers))

        async def picked() -> bool:
            return await gateway.decision("events") is not None

        await until(picked, True)
        pod = await serving(gateway, "events")
        for number in (1, 2):
            pod.go.release()
            await pod.wait_for_events(number)
        assert await gateway.inflight() >= 1  # as long as the response lasts
        pod.stop()
        async with await sending as response:
            assert await response.read() == b"data: 0\n\ndata: 1\n\n"
        await gateway.idle()
        assert (await gateway.decision("events"))["outcome"] == "completed"
        assert await gateway.envoy.stat("http.clients.ext_proc.spurious_msgs_received") == 0
        assert await gateway.envoy.stat("http.clients.ext_proc.streams_failed") == 0


async def test_a_buffered_body_over_the_limit_is_413() -> None:
    change = modes("BUFFERED", "STREAMED")

    def wider(told: dict[str, Any]) -> None:
        change(told)
        told["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 1 << 20

    async with running_gateway(change=wider, max_body=Size(100_000)) as gateway:
        for data in (bytes(100_001), pieces(bytes(100_001))):
            async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
                assert await refused(response) == (413, "body_too_large")
        async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert response.status == 200


async def test_responses_are_not_shown_to_a_picker_that_does_not_read_them() -> None:
    async with running_gateway(change=modes("BUFFERED", "STREAMED"), usage=False) as gateway:
        async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert response.status == 200
        await gateway.idle()
        # Headers, body, response headers.
        assert await gateway.envoy.stat("http.clients.ext_proc.stream_msgs_sent") == 3
