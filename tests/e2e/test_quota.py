"""Quotas and fairness through real Envoy: who asks, what is counted, what clients are told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from picker.config import Duration, Flow, Identity, Quota, Saturation
from picker.quota.editor import Editor, Why
from picker.quota.model import parse_limit
from picker.quota.stores import open_store
from picker.quota.views import views
from tests.e2e.gateway import CHAT, JSON, Gateway, chat, refused, running_gateway, until
from tests.e2e.pods import ACT, DONE, TOKENS, USAGE

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANT = "x-gateway-inference-fairness-id"


@pytest.fixture(scope="module", params=["standard", "lean"])
def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


class Admin:
    """Writes to the picker's store, as `warmpath quota` does from another process."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        self.editor = Editor(self.store, "test")

    async def limit(self, tenant: str, *limits: str, parent: str | None = None) -> None:
        await self.limit_of(f"tenant/{tenant}", *limits, parent=parent)

    async def limit_of(self, subject: str, *limits: str, parent: str | None = None) -> None:
        parsed = [parse_limit(limit) for limit in limits]
        await self.editor.set(subject, parsed, parent=parent, why=Why())

    async def used(self, tenant: str, limit: str, whose: str = "") -> tuple[float, float]:
        """Used and reserved of a limit of the tenant, or of one above it."""
        policy = await self.editor.read()
        subject = f"tenant/{tenant}"
        (view,) = [
            each
            for each in await views(self.store, policy, subject)
            if each.limit.name == limit and each.subject == (whose or subject)
        ]
        return view.used - view.reserved, view.reserved


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, profile: str) -> str:
    return f"sqlite://{tmp_path_factory.mktemp('quota') / 'quota.db'}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(url: str) -> AsyncIterator[Admin]:
    admin = Admin(url)
    yield admin
    await admin.store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(profile: str, url: str, admin: Admin) -> AsyncIterator[Gateway]:
    async with running_gateway(
        profile=profile,
        quota=Quota(enabled=True, store=url, timeout=Duration(10)),
        identity=Identity(header=TENANT, keys=True),
    ) as gateway:
        yield gateway


def post(
    gateway: Gateway, tenant: str, body: bytes | None = None, **headers: str
) -> aiohttp.client._RequestContextManager:
    told = JSON | {TENANT: tenant} | headers
    return gateway.http.post(CHAT, data=chat() if body is None else body, headers=told)


async def test_requests_over_a_limit_are_refused_and_told_when_to_come_again(
    gateway: Gateway, admin: Admin
) -> None:
    await admin.limit("few", "requests=2/day")
    for left in ("1", "0"):
        async with post(gateway, "few") as response:
            assert response.status == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == left
    async with post(gateway, "few") as response:
        assert await refused(response) == (429, "quota_exceeded")
        assert 0 < int(response.headers["retry-after"]) <= 86_400
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
    async with post(gateway, "another") as response:
        assert response.status == 200
        assert "x-ratelimit-limit-requests" not in response.headers


async def test_what_an_answer_used_is_settled(gateway: Gateway, admin: Admin) -> None:
    await admin.limit("counted", "total-tokens=10k/day")
    async with post(gateway, "counted", chat(max_tokens=500)) as response:
        assert response.status == 200
        assert int(response.headers["x-ratelimit-remaining-tokens"]) < 9_500
    await until(lambda: admin.used("counted", "total-tokens/day"), (USAGE["total_tokens"], 0))


async def test_a_stream_is_counted_that_did_not_ask_for_its_usage(
    gateway: Gateway, admin: Admin
) -> None:
    await admin.limit("streams", "output-tokens=10k/day")
    body = chat(stream=True)
    async with post(gateway, "streams", body, **{ACT: "tokens"}) as response:
        assert await response.read() == b"".join((*TOKENS, DONE))
    await until(lambda: admin.used("streams", "output-tokens/day"), (USAGE["completion_tokens"], 0))


async def test_whom_nobody_can_serve_pays_nothing(gateway: Gateway, admin: Admin) -> None:
    await admin.limit("unlucky", "total-tokens=10k/day")
    headers = {"x-gateway-destination-endpoint-subset": "192.0.2.1:1"}
    async with post(gateway, "unlucky", **headers):
        pass
    async with post(gateway, "unlucky", b'{"model": 1}') as response:
        assert response.status == 400
    await until(lambda: gateway.inflight(), 0)
    used, reserved = await admin.used("unlucky", "total-tokens/day")
    assert reserved == 0
    assert used <= USAGE["total_tokens"]


async def test_who_leaves_pays_the_prompt_alone(gateway: Gateway, admin: Admin) -> None:
    await admin.limit("leaves", "total-tokens=10k/day")
    body = chat("hello " * 200, stream=True, max_tokens=5000)
    response = await post(gateway, "leaves", body, **{ACT: "stream"})
    response.close()

    async def settled() -> bool:
        used, reserved = await admin.used("leaves", "total-tokens/day")
        return reserved == 0 and 200 <= used < 1000

    await until(settled, True)


async def test_a_key_names_its_tenant_and_a_wrong_one_nobody(
    gateway: Gateway, admin: Admin
) -> None:
    await admin.limit("keyed", "requests=1/day")
    _, secret = await admin.editor.create_key("tenant/keyed", why=Why())
    headers = {"authorization": f"Bearer {secret}"}
    async with post(gateway, "somebody", **headers) as response:
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
    async with post(gateway, "somebody", **headers) as response:
        assert await refused(response) == (429, "quota_exceeded")
    async with post(gateway, "somebody", authorization="Bearer wrong") as response:
        assert await refused(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"'


async def test_parallel_requests_do_not_pass_a_limit(gateway: Gateway, admin: Admin) -> None:
    await admin.limit("many", "requests=10/day")

    async def status() -> int:
        async with post(gateway, "many") as response:
            return response.status

    statuses = Counter(await asyncio.gather(*(status() for _ in range(40))))
    assert statuses == {200: 10, 429: 30}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def queueing(profile: str) -> AsyncIterator[Gateway]:
    """One pod, which takes two requests at a time."""
    async with running_gateway(
        profile=profile,
        pods=1,
        identity=Identity(header=TENANT),
        flow=Flow(enabled=True, saturation=Saturation(inflight=2)),
    ) as gateway:
        yield gateway


async def test_who_leaves_the_queue_is_not_served(queueing: Gateway) -> None:
    (pod,) = queueing.pods
    pod.reset()

    async def waiting() -> int:
        return queueing.service.waiting

    held = [await post(queueing, "a", chat(stream=True), **{ACT: "stream"}) for _ in range(2)]
    leaving = asyncio.create_task(post(queueing, "b").__aenter__())
    await until(waiting, 1)
    leaving.cancel()
    await until(waiting, 0)
    pod.stopping = True
    for response in held:
        pod.go.release()
        await response.read()
    await queueing.idle()
    assert pod.served == 2
