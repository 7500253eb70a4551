"""Both profiles: a client's requests through real Envoy, asking a real picker, to pods.

Every test here runs in both. What one of them does differently is told by an `if`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, NotFoundError

from picker.config import EndpointSpec, PoolSection, Scheduling, Size
from picker.names import DESTINATION, STREAM
from tests.e2e.gateway import (
    CHAT,
    DEADLINE,
    FORGED,
    JSON,
    Gateway,
    chat,
    refused,
    running_gateway,
    until,
)
from tests.e2e.http2 import connected
from tests.e2e.pods import ACT, USAGE, Pod, running_pods
from tests.worker.process import running_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["standard", "lean"])
def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(profile: str) -> AsyncIterator[Gateway]:
    async with running_gateway(profile=profile) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Gateway) -> AsyncIterator[Gateway]:
    """With pods that nothing was asked of yet. Afterwards nothing may be left in flight."""
    for pod in shared.pods:
        pod.reset()
    yield shared
    await shared.idle()


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """A body without a length, in several writes."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def seen(response: aiohttp.ClientResponse) -> Any:
    """What reached the pod: the one that the picker named first, and no header twice."""
    assert response.status == 200
    shown = await response.json()
    names = [name for name, _ in shown["headers"]]
    assert len(set(names)) == len(names)
    shown["headers"] = dict(shown["headers"])
    assert shown["headers"][DESTINATION].split(",")[0] == shown["pod"]
    return shown


async def serving(gateway: Gateway, request_id: str) -> Pod:
    """The pod of a request."""
    decision = await gateway.decision(request_id)
    return next(pod for pod in gateway.pods if pod.address == decision["endpoint"])


async def ended(gateway: Gateway, request_id: str) -> Any:
    """What the picker remembers of a request, once nothing is in flight."""
    await gateway.idle()
    return await gateway.decision(request_id)


# Requests


async def test_a_body_in_pieces_reaches_the_picked_pod_unchanged(gateway: Gateway) -> None:
    body = chat("x" * 200_000)
    parts = pieces(body[:10], body[10:70_000], body[70_000:])
    headers = JSON | {"x-request-id": "in-pieces"}
    async with gateway.http.post(CHAT, data=parts, headers=headers) as response:
        shown = await seen(response)
    assert shown["sha"] == sha(body)
    assert shown["headers"]["x-request-id"] == "in-pieces"
    decision = await ended(gateway, "in-pieces")
    assert decision["endpoint"] == shown["pod"]
    assert (decision["outcome"], decision["status"]) == ("completed", 200)
    assert decision["usage"]["promptTokens"] == USAGE["prompt_tokens"]
    assert decision["usage"]["completionTokens"] == USAGE["completion_tokens"]
    assert 0 < decision["firstTokenSeconds"] <= decision["seconds"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "HEAD"])
async def test_a_request_without_body(gateway: Gateway, method: str) -> None:
    headers = {"x-request-id": method}
    async with gateway.http.request(method, "/v1/models?x=1", headers=headers) as response:
        assert response.status == 200
        if method != "HEAD":
            shown = await seen(response)
            assert (shown["method"], shown["path"]) == (method, "/v1/models?x=1")
    assert (await ended(gateway, method))["outcome"] == "completed"


async def test_http2_with_an_empty_last_frame(gateway: Gateway) -> None:
    async with connected(gateway.envoy.port) as client:
        await client.headers("POST", CHAT, JSON)
        await client.data(chat())
        await client.data(b"", end=True)
        status, body = await client.response()
        assert (status, json.loads(body)["sha"]) == (200, sha(chat()))
        await client.headers("GET", "/v1/models", end=True)
        assert (await client.response())[0] == 200
        await client.headers("POST", "/anything")
        await client.data(b"", end=True)
        assert (await client.response())[0] == 200


async def test_bodies_with_trailers(gateway: Gateway) -> None:
    async with connected(gateway.envoy.port) as client:
        for body in (chat(), chat("x" * 200_000)):
            await client.headers("POST", CHAT, JSON)
            for start in range(0, len(body), 16_000):
                await client.data(body[start : start + 16_000])
            await client.trailers({"x-checksum": "1"})
            status, answer = await client.response()
            assert (status, json.loads(answer)["sha"]) == (200, sha(body))
        await client.headers("POST", "/anything")
        await client.trailers({"x-checksum": "1"})
        assert (await client.response())[0] == 200


async def test_a_long_body(gateway: Gateway) -> None:
    body = chat("x" * 3_000_000)
    for data in (body, pieces(body[:1_000_000], body[1_000_000:])):
        async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
            assert (await seen(response))["sha"] == sha(body)


async def test_who_waits_for_leave_to_send_gets_it(gateway: Gateway) -> None:
    async with gateway.http.post(CHAT, data=chat(), headers=JSON, expect100=True) as response:
        assert (await seen(response))["sha"] == sha(chat())


async def test_headers_of_the_pickers_own_do_not_pass(gateway: Gateway) -> None:
    envoys = [("x-envoy-retry-on", "5xx"), ("X-Envoy-Upstream-Rq-Timeout-Ms", "1")]
    for method, data in (("POST", chat()), ("GET", None)):
        headers = [*FORGED, *envoys, *JSON.items()]
        async with gateway.http.request(method, CHAT, data=data, headers=headers) as response:
            shown = await seen(response)
        passed = {name.lower() for name, _ in [*FORGED, *envoys]} & set(shown["headers"])
        assert passed - {STREAM} == {DESTINATION}  # both made by us
        assert "192.0.2.99" not in str(shown["headers"])


async def test_clients_that_share_an_id_are_told_apart(gateway: Gateway) -> None:
    before = await gateway.metric("warmpath_ended_requests_total")

    async def ask() -> None:
        headers = JSON | {"x-request-id": "shared"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            assert (await seen(response))["headers"]["x-request-id"] == "shared"

    await asyncio.gather(*(ask() for _ in range(20)))
    await gateway.idle()
    assert await gateway.metric("warmpath_ended_requests_total") == before + 20


async def test_an_id_is_given_to_requests_without_one(gateway: Gateway) -> None:
    async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
        shown = await seen(response)
    decision = await ended(gateway, shown["headers"]["x-request-id"])
    assert decision["outcome"] == "completed"


async def test_a_conversation_stays_on_its_pod(gateway: Gateway) -> None:
    text = "All happy families are alike. " * 100
    served = set()
    for turn in range(6):
        async with gateway.http.post(CHAT, data=chat(text + str(turn)), headers=JSON) as response:
            served.add((await seen(response))["pod"])
        await gateway.idle()
    assert len(served) == 1


async def test_scorers_see_clients_headers(profile: str) -> None:
    label: Any = {"label": {"weight": 1, "header": "x-zone", "label": "zone"}}
    async with running_pods(2) as pods:
        endpoints = [
            EndpointSpec(address=pod.address, labels={"zone": zone})
            for pod, zone in zip(pods, "ab", strict=True)
        ]
        async with running_gateway(
            pods=0,
            profile=profile,
            pool=PoolSection(endpoints=endpoints),
            scheduling=Scheduling(scorers=label),
        ) as gateway:
            for pod, zone in (*zip(pods, "ab", strict=True), *zip(pods, "ab", strict=True)):
                headers = JSON | {"X-Zone": zone, "authorization": "Bearer secret"}
                async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
                    shown = await seen(response)
                assert shown["pod"] == pod.address
                assert shown["headers"]["authorization"] == "Bearer secret"


async def test_real_workers_before_the_official_client(profile: str) -> None:
    flags = ("--simulate", "instant", "--served-model-name", "m")
    async with running_worker(*flags) as one, running_worker(*flags) as two:
        addresses = [worker.url.removeprefix("http://") for worker in (one, two)]
        async with (
            running_gateway(pods=0, addresses=addresses, profile=profile) as gateway,
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
                await gateway.idle()
            assert cached[0] == 0
            assert cached[1:] == sorted(cached[1:])
            assert cached[1] > 100  # the conversation stayed where its prefix was
            async with gateway.admin.get("/debug/decisions") as response:
                decisions = (await response.json())["decisions"][:4]
            assert [each["usage"]["cachedTokens"] for each in decisions] == cached[::-1]
            with pytest.raises(NotFoundError):
                await client.chat.completions.create(model="other", messages=messages)


# Refusals


async def test_a_body_over_the_limit_is_413(profile: str) -> None:
    async with running_gateway(profile=profile, max_body=Size(100_000)) as gateway:
        for data in (bytes(100_001), pieces(bytes(100_001)), bytes(1_000_000)):
            async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
                assert await refused(response) == (413, "body_too_large")
        assert sum(pod.served for pod in gateway.pods) == 0
        body = chat("x" * (100_000 - len(chat(""))))
        async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
            assert (await seen(response))["sha"] == sha(body)
        await gateway.idle()


async def test_a_body_that_is_not_understood_is_400(gateway: Gateway) -> None:
    for body in (b"{", b"[]", b'{"model":1,"messages":[]}', b""):
        async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
            assert (await refused(response))[0] == 400


async def test_an_unknown_method_is_405(gateway: Gateway) -> None:
    async with connected(gateway.envoy.port) as client:
        for method in ("FOO", "PURGE"):
            await client.headers(method, CHAT, end=True)
            status, body = await client.response()
            assert (status, json.loads(body)["error"]["code"]) == (405, "unknown_method")
            assert method in json.loads(body)["error"]["message"]


async def test_an_unknown_model_is_404(profile: str) -> None:
    async with (
        running_gateway(profile=profile, models=["other"]) as gateway,
        gateway.http.post(CHAT, data=chat(), headers=JSON) as response,
    ):
        assert await refused(response) == (404, "model_not_found")


async def test_without_pods_requests_are_503(profile: str) -> None:
    async with running_gateway(pods=0, profile=profile) as gateway:
        for method, data in (("POST", chat()), ("GET", None)):
            async with gateway.http.request(method, CHAT, data=data, headers=JSON) as response:
                assert (await refused(response))[0] == 503
                assert int(response.headers["retry-after"]) >= 1
                assert "no endpoint" in (await response.json())["error"]["message"]
        assert await gateway.metric("warmpath_refusals_total") == 2


# Responses


async def test_events_pass_one_by_one(gateway: Gateway) -> None:
    headers = JSON | {ACT: "stream", "x-request-id": "one-by-one"}
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
        pod = await serving(gateway, "one-by-one")
        assert await gateway.inflight() > 1  # tokens, too: the first has not come
        for number in range(5):
            pod.go.release()
            async with asyncio.timeout(DEADLINE):
                assert await response.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
        await until(gateway.inflight, 1)  # the first token is told before the end
        assert (await gateway.decision("one-by-one"))["firstTokenSeconds"] > 0
        pod.stop()
        assert await response.content.read() == b""
    assert (await ended(gateway, "one-by-one"))["outcome"] == "completed"


async def test_a_comment_is_no_token(gateway: Gateway) -> None:
    headers = JSON | {ACT: "comment", "x-request-id": "comment"}
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
        assert await response.content.readuntil(b"\n\n") == b": wait\n\n"

        async def status() -> Any:
            return (await gateway.decision("comment"))["status"]

        await until(status, 200)  # it has heard of the response
        assert (await gateway.decision("comment"))["firstTokenSeconds"] is None
        assert await gateway.inflight() > 1
        pod = await serving(gateway, "comment")
        pod.go.release()
        await until(gateway.inflight, 1)
        pod.stop()
        assert await response.content.read() == b"data: 0\n\n"


async def test_a_client_that_leaves_is_noticed(gateway: Gateway) -> None:
    headers = JSON | {ACT: "stream", "x-request-id": "leaves"}
    async with aiohttp.ClientSession(gateway.envoy.url) as http:
        response = await http.post(CHAT, data=chat(), headers=headers)
        pod = await serving(gateway, "leaves")
        pod.go.release()
        assert await response.content.readuntil(b"\n\n")
    assert (await ended(gateway, "leaves"))["outcome"] == "aborted"

    async def broken() -> bool:
        pod.go.release()  # it notices as it writes
        return pod.broken > 0

    await until(broken, True)


async def test_a_client_that_leaves_while_it_sends(gateway: Gateway) -> None:
    """Nothing was picked yet, so nothing is left."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.envoy.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nabc")
    await writer.drain()
    active = "http.clients.downstream_rq_active"
    await gateway.envoy.wait_for_stat(active, 1)
    writer.close()
    await gateway.envoy.wait_for_stat(active, 0)


async def test_a_pod_that_breaks_off_mid_stream(gateway: Gateway) -> None:
    headers = JSON | {ACT: "cut", "x-request-id": "cut"}
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 0\n\n"
        (await serving(gateway, "cut")).go.release()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert (await ended(gateway, "cut"))["outcome"] == "aborted"


async def test_a_dead_pods_requests_go_to_the_fallback(profile: str) -> None:
    async with running_gateway(profile=profile) as gateway:
        dead, other = gateway.pods
        await dead.shut_the_door()
        async with asyncio.timeout(DEADLINE):
            while await gateway.metric("warmpath_moved_picks_total") == 0:
                async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
                    assert (await response.json())["pod"] == other.address
        await gateway.idle()
        label = f'endpoint="{dead.address}"'
        assert await gateway.metric("warmpath_ended_requests_total", label) == 0


async def test_without_a_pod_that_can_be_reached_requests_are_503(profile: str) -> None:
    async with running_gateway(pods=1, profile=profile) as gateway:
        await gateway.pods[0].shut_the_door()
        headers = JSON | {"x-request-id": "unreachable"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            assert await refused(response) == (503, "no_endpoint")
            assert int(response.headers["retry-after"]) >= 1
        decision = await ended(gateway, "unreachable")
        assert (decision["outcome"], decision["status"]) == ("failed", 503)


async def test_without_usage_ends_are_told_all_the_same(profile: str) -> None:
    async with running_gateway(profile=profile, usage=False) as gateway:
        headers = JSON | {"x-request-id": "plain"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            await seen(response)
        decision = await ended(gateway, "plain")
        assert (decision["outcome"], decision["usage"]) == ("completed", None)
        assert decision["firstTokenSeconds"] > 0


# Pods that come and go


async def test_the_pool_can_change_while_envoy_runs(profile: str) -> None:
    async with running_gateway(profile=profile, discover=True) as gateway, running_pods(1) as new:
        (pod,) = new
        gateway.change_pool([pod.address])
        await gateway.envoy.wait_for_stat("cluster.pods.membership_total", 1)
        async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert (await seen(response))["pod"] == pod.address
        await gateway.idle()
