"""Who reads the admin pages, as Kubernetes says: TokenReview and SubjectAccessReview."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from picker.admin import make_app
from picker.commands.explain import explain
from picker.config import parse
from picker.kubernetes import reviews
from picker.kubernetes.client import Api
from picker.kubernetes.reviews import Reviews, Unreviewed
from picker.service import Service
from tests.kubernetes_api import KubernetesApi, running_kubernetes
from tests.kubernetes_objects import inference_pool
from tests.picker.kubernetes.test_process import text_for
from tests.picker.test_service import DEADLINE

TOKENS, ACCESS = "tokenreviews.authentication.k8s.io", "subjectaccessreviews.authorization.k8s.io"


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        api.tokens = {"prometheus-token": "prometheus", "somebody-token": "somebody"}
        api.allowed = {("prometheus", "get", "/metrics")}
        yield api


@asynccontextmanager
async def admin(api: KubernetesApi) -> AsyncIterator[aiohttp.ClientSession]:
    """The admin port of a picker, to be asked."""
    text = text_for(api).replace("listen: {", 'listen: {"metricsAuth": "tokenReview", ')
    service = Service(parse(text))
    try:
        ports = await service.start()
        await asyncio.wait_for(service.until_ready(), DEADLINE)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{ports.admin}") as http:
            yield http
    finally:
        await service.stop()


async def ask(
    http: aiohttp.ClientSession, path: str, token: str | None = None, method: str = "GET"
) -> tuple[int, Any]:
    """Status and body."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with http.request(method, path, headers=headers) as response:
        if response.status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
        return response.status, await response.text()


def count(api: KubernetesApi, name: str) -> int:
    return sum(each[1] == name for each in api.requests)


async def test_who_may_read_what(api: KubernetesApi) -> None:
    async with admin(api) as http:
        status, text = await ask(http, "/metrics", "prometheus-token")
        assert status == 200
        assert "inference_pool_ready_pods" in text
        for path, token, expected in (
            ("/metrics", None, 401),
            ("/metrics", "", 401),
            ("/metrics", "nobodys-token", 401),
            ("/metrics", "x" * 8000, 401),  # aiohttp takes no longer ones
            ("/metrics", "somebody-token", 403),
            ("/debug/state", "prometheus-token", 403),
            ("/debug/state", None, 401),
            ("/config", None, 401),
            ("/", None, 401),
            ("/debug/%73tate", None, 401),
            ("/nothing", None, 404),
        ):
            status, text = await ask(http, path, token)
            assert status == expected, path
            for word in ("prometheus", "somebody", "pods", "RBAC", "invalid bearer token"):
                assert word not in text
        api.allowed.add(("somebody", "post", "/debug/lookup"))
        status, _ = await ask(http, "/debug/lookup", "somebody-token", "POST")
        assert status == 404  # there is no index
        for path in ("/healthz", "/readyz"):
            assert (await ask(http, path))[0] == 200


async def test_another_scheme_is_no_token(api: KubernetesApi) -> None:
    async with admin(api) as http:
        for value in ("Basic prometheus-token", "prometheus-token", "Bearer"):
            async with http.get("/metrics", headers={"authorization": value}) as response:
                assert response.status == 401
        async with http.get(
            "/metrics", headers={"authorization": "bearer  prometheus-token"}
        ) as response:
            assert response.status == 200


async def test_every_page_but_those_of_probes_is_guarded(api: KubernetesApi) -> None:
    service = Service(parse(text_for(api)))
    paths = {
        (route.method, route.resource.canonical)
        for route in make_app(service._views()).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert len(paths) > 8
    async with admin(api) as http:
        open_to_all = {
            path for method, path in paths if (await ask(http, path, None, method))[0] != 401
        }
    assert open_to_all == {"/healthz", "/readyz"}


async def test_an_api_server_that_is_away_closes_the_pages(
    api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    async with admin(api) as http:
        assert (await ask(http, "/metrics", "prometheus-token"))[0] == 200
        for name in (TOKENS, ACCESS):
            api.fail(name, 500, 500)
            for _ in range(2):
                status, text = await ask(http, "/metrics", "somebody-token")
                assert status == 503
                assert "not well" not in text
            assert (await ask(http, "/metrics", "prometheus-token"))[0] == 200  # kept
            assert (await ask(http, "/readyz"))[0] == 200
        assert caplog.text.count("Admin pages are closed") == 2
        api.forbid("create", TOKENS)
        assert (await ask(http, "/metrics", "somebody-token"))[0] == 503
        assert 'resources: ["tokenreviews"], verbs: [create]' in caplog.text


async def test_answers_are_kept_for_a_short_time(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asked(api) as subject:
        now = reviews.time.monotonic()
        monkeypatch.setattr(reviews.time, "monotonic", lambda: now)
        for _ in range(3):
            assert await subject.of("prometheus-token", "get", "/metrics") is HTTPStatus.OK
            assert await subject.of("somebody-token", "get", "/metrics") is HTTPStatus.FORBIDDEN
        assert (count(api, TOKENS), count(api, ACCESS)) == (2, 2)
        api.tokens.clear()
        api.allowed.clear()
        now += reviews.DENIED_SECONDS + 1
        assert await subject.of("prometheus-token", "get", "/metrics") is HTTPStatus.OK
        assert await subject.of("somebody-token", "get", "/metrics") is HTTPStatus.UNAUTHORIZED
        now += reviews.ALLOWED_SECONDS
        assert await subject.of("prometheus-token", "get", "/metrics") is HTTPStatus.UNAUTHORIZED
        assert not [each for each in subject._kept if b"token" in each]


async def test_what_is_kept_and_what_waits_is_bounded(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "MAX_KEPT", 5)
    async with asked(api) as subject:
        for number in range(20):
            assert await subject.of(f"t{number}", "get", "/metrics") is HTTPStatus.UNAUTHORIZED
        assert len(subject._kept) == 5
        before = count(api, TOKENS)
        many = [subject.of(f"u{number}", "get", "/metrics") for number in range(20)]
        ends = await asyncio.gather(*many, return_exceptions=True)
        assert sum(isinstance(each, Unreviewed) for each in ends) == 20 - reviews.MAX_AT_ONCE
        same = [subject.of("prometheus-token", "get", "/metrics") for _ in range(100)]
        assert set(await asyncio.gather(*same)) == {HTTPStatus.OK}
        assert count(api, TOKENS) == before + reviews.MAX_AT_ONCE + 1


@asynccontextmanager
async def asked(api: KubernetesApi) -> AsyncIterator[Reviews]:
    client = await Api.connect(parse(text_for(api)).pool.kubernetes)
    try:
        yield Reviews(client)
    finally:
        await client.close()


async def test_commands_send_a_token(api: KubernetesApi) -> None:
    api.allowed = {("somebody", "get", "/debug/decisions")}
    async with admin(api) as http:
        url = str(http._base_url)

        def run(token: str) -> tuple[int, str]:
            environment = {"WARMPATH_ADMIN_TOKEN": token}
            result = CliRunner().invoke(explain, ["--admin", url, "-o", "json"], env=environment)
            return result.exit_code, result.output

        code, output = await asyncio.to_thread(run, "somebody-token")
        assert (code, json.loads(output)) == (0, [])
        code, output = await asyncio.to_thread(run, "")
        assert code == 1
        assert "WARMPATH_ADMIN_TOKEN" in output
