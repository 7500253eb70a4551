"""The lean profile: real Envoy asks a real picker over ext_authz, and logs to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from picker import tickets
from picker.config import Config, EndpointSpec, Envoy, Listen, PoolSection, Size
from picker.envoy.bootstrap import bootstrap
from picker.service import Ports, Service
from tests.e2e.gateway import ANY_PORTS, DEADLINE, Gateway, chat, running_gateway, until
from tests.e2e.http2 import connected
from tests.e2e.pods import ACT, USAGE, Pod, running_pods
from tests.envoy_process import Envoy as EnvoyProcess
from tests.envoy_process import running_envoy

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
OWNED = (
    "X-Gateway-Destination-Endpoint",
    "x-gateway-destination-endpoint-subset",
    "X-GATEWAY-DESTINATION-ENDPOINT-SERVED",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
    "X-Warmpath-Stream",
    "x-warmpath-refusal",
    "x-warmpath-refused",
    "x-warmpath-anything",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(profile="lean") as gateway:
        yield gateway


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """A body without a length, in several writes."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def seen(response: aiohttp.ClientResponse) -> Any:
    """What reached the pod, no header twice."""
    assert response.status == 200
    shown = await response.json()
    names = [name for name, _ in shown["headers"]]
    assert len(set(names)) == len(names)
    shown["headers"] = dict(shown["headers"])
    return shown


async def refused(response: aiohttp.ClientResponse) -> tuple[int, str]:
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-warmpath-refused"] == error["code"]
    assert response.headers["content-type"] == "application/json"
    return response.status, error["code"]


# Requests


async def test_a_request_goes_where_the_picker_says_and_its_end_is_told(gateway: Gateway) -> None:
    body = chat(pad=200_000)
    parts = pieces(body[:10], body[10:70_000], body[70_000:])
    headers = JSON | {"x-request-id": "in-pieces"}
    async with gateway.http.post(CHAT, data=parts, headers=headers) as response:
        shown = await seen(response)
    assert shown["sha"] == sha(body)
    assert shown["headers"]["x-gateway-destination-endpoint"].split(",")[0] == shown["pod"]
    assert shown["headers"]["x-request-id"] == "in-pieces"
    await gateway.idle()
    decision = await gateway.decision("in-pieces")
    assert decision["endpoint"] == shown["pod"]
    assert (decision["outcome"], decision["status"]) == ("completed", 200)
    assert decision["usage"]["promptTokens"] == USAGE["prompt_tokens"]
    assert decision["usage"]["completionTokens"] == USAGE["completion_tokens"]
    assert decision["firstTokenSeconds"] > 0


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "HEAD"])
async def test_a_request_without_body(gateway: Gateway, method: str) -> None:
    headers = {"x-request-id": method}
    async with gateway.http.request(method, "/v1/models?x=1", headers=headers) as response:
        if method != "HEAD":
            shown = await seen(response)
            assert (shown["method"], shown["path"]) == (method, "/v1/models?x=1")
        assert response.status == 200
    await gateway.idle()
    assert (await gateway.decision(method))["outcome"] == "completed"


async def test_http2_with_empty_frames_and_trailers(gateway: Gateway) -> None:
    async with connected(gateway.envoy.port) as client:
        await client.headers("POST", CHAT, JSON)
        await client.data(chat())
        await client.data(b"", end=True)
        status, body = await client.response()
        assert (status, json.loads(body)["sha"]) == (200, sha(chat()))
        await client.headers("POST", CHAT, JSON)
        await client.data(chat()[:9])
        await client.data(chat()[9:])
        await client.trailers({"x-checksum": "1"})
        status, body = await client.response()
        assert (status, json.loads(body)["sha"]) == (200, sha(chat()))
        await client.headers("POST", "/anything")
        await client.trailers({"x-checksum": "1"})
        assert (await client.response())[0] == 200
    await gateway.idle()


async def test_a_long_body(gateway: Gateway) -> None:
    body = chat(text="x" * 3_000_000)
    for data in (body, pieces(body[:1_000_000], body[1_000_000:])):
        async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
            assert (await seen(response))["sha"] == sha(body)
    await gateway.idle()


async def test_who_waits_for_leave_to_send_gets_it(gateway: Gateway) -> None:
    async with gateway.http.post(CHAT, data=chat(), headers=JSON, expect100=True) as response:
        assert (await seen(response))["sha"] == sha(chat())


async def test_headers_of_the_pickers_own_do_not_pass(gateway: Gateway) -> None:
    evil = [(name, "192.0.2.99:9090") for name in OWNED for _ in range(2)]
    envoys = [("x-envoy-retry-on", "5xx"), ("X-Envoy-Upstream-Rq-Timeout-Ms", "1")]
    for method, data in (("POST", chat()), ("GET", None)):
        headers = [*evil, *envoys, *JSON.items()]
        async with gateway.http.request(method, CHAT, data=data, headers=headers) as response:
            shown = await seen(response)
        owned = {name for name in shown["headers"] if name in {each.lower() for each in OWNED}}
        assert owned == {"x-gateway-destination-endpoint", "x-warmpath-stream"}
        assert "192.0.2.99" not in str(shown["headers"])
        assert not {"x-envoy-retry-on", "x-envoy-upstream-rq-timeout-ms"} & set(shown["headers"])
        assert shown["pod"] in {pod.address for pod in gateway.pods}
    await gateway.idle()


async def test_clients_that_share_an_id_are_told_apart(gateway: Gateway) -> None:
    before = await gateway.metric("warmpath_ended_requests_total")

    async def ask() -> None:
        headers = JSON | {"x-request-id": "shared"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            assert (await seen(response))["headers"]["x-request-id"] == "shared"

    await asyncio.gather(*(ask() for _ in range(20)))
    await gateway.idle()
    assert await gateway.metric("warmpath_ended_requests_total") == before + 20


# Refusals


async def test_a_body_over_the_limit_is_413() -> None:
    async with running_gateway(profile="lean", max_body=Size(100_000)) as gateway:
        for data in (bytes(100_001), pieces(bytes(100_001)), bytes(1_000_000)):
            async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
                assert await refused(response) == (413, "body_too_large")
        assert sum(pod.served for pod in gateway.pods) == 0
        body = chat(pad=100_000 - len(chat()))
        async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
            assert (await seen(response))["sha"] == sha(body)
        await gateway.idle()


async def test_a_body_that_is_not_understood_is_400(gateway: Gateway) -> None:
    for body in (b"{", b"[]", b'{"model":1,"messages":[]}', b""):
        async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
            assert (await refused(response))[0] == 400
    await gateway.idle()


async def test_without_pods_requests_are_503() -> None:
    async with running_gateway(pods=0, profile="lean") as gateway:
        for method, data in (("POST", chat()), ("GET", None)):
            async with gateway.http.request(method, CHAT, data=data, headers=JSON) as response:
                assert (await refused(response))[0] == 503
                assert int(response.headers["retry-after"]) >= 1
                assert "no endpoint" in (await response.json())["error"]["message"]
                assert not [name for name in response.headers if "refusal" in name.lower()]
        assert await gateway.metric("warmpath_refusals_total") == 2


async def test_an_unknown_model_is_404() -> None:
    async with (
        running_gateway(profile="lean", models=["other"]) as gateway,
        gateway.http.post(CHAT, data=chat(), headers=JSON) as response,
    ):
        assert await refused(response) == (404, "model_not_found")


# Responses


async def serving(gateway: Gateway, request_id: str) -> Pod:
    """The pod of a request."""
    decision = await gateway.decision(request_id)
    return next(pod for pod in gateway.pods if pod.address == decision["endpoint"])


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
    pod.stopping = False
    await gateway.idle()
    assert (await gateway.decision("one-by-one"))["outcome"] == "completed"


async def test_a_client_that_leaves_is_noticed(gateway: Gateway) -> None:
    headers = JSON | {ACT: "stream", "x-request-id": "leaves"}
    async with aiohttp.ClientSession(gateway.envoy.url) as http:
        response = await http.post(CHAT, data=chat(), headers=headers)
        pod = await serving(gateway, "leaves")
        pod.go.release()
        assert await response.content.readuntil(b"\n\n")
    await gateway.idle()
    assert (await gateway.decision("leaves"))["outcome"] == "aborted"

    async def broken() -> bool:
        pod.go.release()  # it notices as it writes
        return pod.broken > 0

    await until(broken, True)
    pod.broken, pod.go = 0, asyncio.Semaphore(0)


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
    async with running_gateway(profile="lean") as gateway:
        dead, other = gateway.pods
        await dead.kill()
        async with asyncio.timeout(DEADLINE):
            while await gateway.metric("warmpath_moved_picks_total") == 0:
                async with gateway.http.post(CHAT, data=chat(), headers=JSON) as response:
                    assert (await seen(response))["pod"] == other.address
        await gateway.idle()
        label = f'endpoint="{dead.address}"'
        assert await gateway.metric("warmpath_ended_requests_total", label) == 0


async def test_without_a_pod_that_lives_requests_are_503() -> None:
    async with running_gateway(pods=1, profile="lean") as gateway:
        await gateway.pods[0].kill()
        headers = JSON | {"x-request-id": "unreachable"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            assert (await refused(response))[0] == 503
            assert int(response.headers["retry-after"]) >= 1
        await gateway.idle()
        decision = await gateway.decision("unreachable")
        assert decision is None or decision["outcome"] == "failed"


# A picker that goes away


class Away:
    """Pods behind an Envoy whose picker can be stopped and started again."""

    def __init__(self, config: Config, envoy: EnvoyProcess, http: aiohttp.ClientSession) -> None:
        self.config = config
        self.envoy = envoy
        self.http = http
        self.service: Service | None = None

    async def start(self) -> Service:
        self.service = Service(self.config)
        await self.service.start()
        await self.service.until_ready()
        return self.service

    async def stop(self) -> None:
        assert self.service is not None
        await self.service.stop()


@asynccontextmanager
async def leaving_picker(profile: str, *, fail_open: bool) -> AsyncIterator[Away]:
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(running_pods(2))
        config = Config(
            listen=ANY_PORTS,
            pool=PoolSection(endpoints=[EndpointSpec(address=pod.address) for pod in pods]),
            envoy=Envoy(profile=profile, fail_open=fail_open),  # type: ignore[arg-type]
        )
        first = Service(config)
        config = msgspec.structs.replace(config, listen=listen_of(await first.start()))
        envoy = await stack.enter_async_context(running_envoy(bootstrap(config, discover=True)))
        await envoy.wait_for_stat("cluster.pods.membership_total", 2)
        http = await stack.enter_async_context(aiohttp.ClientSession(envoy.url))
        away = Away(config, envoy, http)
        away.service = first
        stack.push_async_callback(away.stop)
        await first.until_ready()
        yield away


def listen_of(ports: Ports) -> Listen:
    return Listen(grpc=ports.grpc, health=ports.health, http=ports.http, admin=ports.admin)


@pytest.mark.parametrize("profile", ["lean", "standard"])
@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_is_killed_and_comes_back_under_load(
    profile: str, fail_open: bool
) -> None:
    async with leaving_picker(profile, fail_open=fail_open) as away:
        statuses: list[int] = []
        reasons: set[str] = set()
        stopping = asyncio.Event()

        async def load() -> None:
            while not stopping.is_set():
                async with away.http.post(CHAT, data=chat(), headers=JSON) as response:
                    statuses.append(response.status)
                    if response.status != 200:
                        reasons.add((await refused(response))[1])
                        assert int(response.headers["retry-after"]) >= 1

        async def enough() -> bool:
            return len(statuses) >= 20

        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(load())
            await until(enough, True)
            assert set(statuses) == {200}
            await away.stop()
            statuses.clear()
            await until(enough, True)
            if not fail_open:
                assert 503 in statuses[-4:]
                assert reasons == {"no_picker"}
            service = await away.start()

            async def picked() -> bool:
                return len(service._journal) > 20

            await until(picked, True)
            statuses.clear()
            await until(enough, True)
            stopping.set()
        assert set(statuses) == {200}
        if fail_open:
            assert not reasons


async def test_the_pool_can_change_while_envoy_runs() -> None:
    async with leaving_picker("lean", fail_open=False) as away, running_pods(1) as (new,):
        service = away.service
        assert service is not None
        endpoints = [EndpointSpec(address=new.address)]
        pool = msgspec.structs.replace(away.config.pool, endpoints=endpoints)
        service.reload(msgspec.structs.replace(away.config, pool=pool))
        await away.envoy.wait_for_stat("cluster.pods.membership_total", 1)
        async with away.http.post(CHAT, data=chat(), headers=JSON) as response:
            assert (await seen(response))["pod"] == new.address


async def test_an_envoy_that_dies_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "LEASE", 1)
    async with running_gateway(profile="lean") as gateway:
        headers = JSON | {ACT: "stream", "x-request-id": "orphan"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            gateway.envoy.process.kill()
            with pytest.raises(aiohttp.ClientError):
                await response.content.readuntil(b"\n\n")
        await gateway.idle()
        assert (await gateway.decision("orphan"))["outcome"] == "aborted"
        (await serving(gateway, "orphan")).stop()


async def test_without_usage_ends_are_told_all_the_same() -> None:
    async with running_gateway(profile="lean", usage=False) as gateway:
        headers = JSON | {"x-request-id": "plain"}
        async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
            await seen(response)
        await gateway.idle()
        decision = await gateway.decision("plain")
        assert (decision["outcome"], decision["usage"]) == ("completed", None)
        assert decision["firstTokenSeconds"] > 0
