"""The admin pages over HTTP, and `warmpath explain` which reads them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from picker.admin import AdminServer, Pages, Views
from picker.commands.explain import explain
from picker.config import Config, Rewrite, RewriteTarget, as_data, parse
from picker.director import Outcome
from picker.engines import LoadReport
from picker.metrics import MODEL_METRICS
from picker.prefix.precise import EventsPrefix
from picker.usage import Usage
from tests.picker.core import Core, completion

PODS = ["10.0.0.1:8000", "10.0.0.2:8000"]


@dataclass
class Admin:
    """A running admin server, and what it shows."""

    core: Core
    config: Config = field(default_factory=Config)
    events: EventsPrefix | None = None
    not_ready: str | None = None
    url: str = ""

    async def get(self, path: str) -> tuple[int, str, str]:
        """Status, content type and text."""
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return response.status, response.content_type, await response.text()

    async def json(self, path: str) -> dict[str, object]:
        status, content_type, text = await self.get(path)
        assert (status, content_type) == (200, "application/json")
        found: dict[str, object] = json.loads(text)
        return found


def views_of(admin: Admin) -> Views:
    core = admin.core
    return Views(
        pool=core.pool,
        load=core.load,
        prefix=core.prefix,
        events=admin.events,
        journal=core.journal,
        metrics=core.metrics,
        config=lambda: admin.config,
        not_ready=lambda: admin.not_ready,
        gate=core.gate,
    )


@asynccontextmanager
async def serving(core: Core, events: EventsPrefix | None = None) -> AsyncIterator[Admin]:
    admin = Admin(core, events=events)
    server = AdminServer(views_of(admin), "127.0.0.1", 0)
    admin.url = f"http://127.0.0.1:{await server.start()}"
    try:
        yield admin
    finally:
        await server.stop()


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    async with serving(Core(PODS)) as admin:
        yield admin


async def run_explain(*arguments: str) -> Result:
    """In a thread, because the server it asks runs here."""
    return await asyncio.to_thread(CliRunner().invoke, explain, arguments, env={"COLUMNS": "80"})


async def test_metrics_are_for_prometheus(admin: Admin) -> None:
    admin.core.director.pick(completion("Hello"))
    async with aiohttp.ClientSession() as http, http.get(admin.url + "/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name for family in text_string_to_metric_families(await response.text())}
    assert {
        "inference_objective_request",
        "inference_pool_ready_pods",
        "inference_extension_info",
        "warmpath_picks",
        "process_cpu_seconds",
    } <= families


async def test_metrics_of_many_models_let_picks_go_first() -> None:
    core = Core(PODS[:1])
    for number in range(300):
        core.director.pick(completion("Hello", model=f"m{number}"))
    making = Pages(views_of(Admin(core))).metrics(make_mocked_request("GET", "/metrics"))
    pauses = 0
    try:
        while True:
            making.send(None)
            pauses += 1
    except StopIteration as end:
        text = end.value.body.decode()
    assert text.count("inference_objective_request_total{") == 300
    assert pauses > len(MODEL_METRICS) * 300 / 21


async def test_probes(admin: Admin) -> None:
    assert (await admin.get("/healthz"))[0] == 200
    assert (await admin.get("/readyz"))[0] == 200
    admin.not_ready = "draining"
    assert (await admin.get("/readyz"))[::2] == (503, "draining\n")
    assert (await admin.get("/healthz"))[0] == 200


async def test_the_configuration_in_force_is_shown_as_the_file_is_written(admin: Admin) -> None:
    admin.config = parse("metrics: {idleInterval: 1.5s}\nmaxBody: 1MiB")
    status, content_type, text = await admin.get("/config")
    assert (status, content_type) == (200, "application/yaml")
    assert "idleInterval: 1.5" in text
    assert parse(text) == admin.config
    assert await admin.json("/config?format=json") == as_data(admin.config)


@pytest.mark.parametrize("query", ["", "?format=json"])
async def test_the_configuration_is_shown_without_passwords(admin: Admin, query: str) -> None:
    admin.config = parse('quota: {store: "redis://user:hunter2@10.0.0.1:6379/0"}')
    text = (await admin.get(f"/config{query}"))[2]
    assert "hunter2" not in text
    assert "redis://***@10.0.0.1:6379/0" in text


async def test_state_shows_the_pods_and_what_they_do_not_tell(admin: Admin) -> None:
    core = admin.core
    core.load.report(core.endpoint(PODS[1]), LoadReport(waiting=2, running=1), core.now)
    core.load.failed(core.endpoint(PODS[1]), "it is tired")
    core.now += 0.5
    core.director.pick(completion([1] * 640, subset=PODS[1:]))
    state = await admin.json("/debug/state")
    assert state["notReady"] is None
    assert state["prefixIndex"] == {"blocks": core.prefix.blocks}
    assert state["journal"] == {"picks": 1}
    pool = state["pool"]
    assert isinstance(pool, dict)
    assert [pod["address"] for pod in pool["pods"]] == PODS
    second = pool["pods"][1]
    assert second["scrapeError"] == "it is tired"
    assert (second["waiting"], second["running"], second["kvUsage"]) == (3, 1, None)
    assert (second["inflightRequests"], second["inflightTokens"]) == (1, 640)
    assert second["loadAgeSeconds"] == 0.5
    digest = state["configDigest"]
    admin.config = parse("drain: 1s")
    assert (await admin.json("/debug/state"))["configDigest"] != digest


async def test_decisions_are_newest_first_and_in_full_by_id(admin: Admin) -> None:
    for name in "abc":
        admin.core.director.pick(completion("Hello", id=name))
    found = (await admin.json("/debug/decisions?limit=2"))["decisions"]
    assert isinstance(found, list)
    assert [each["requestId"] for each in found] == ["c", "b"]
    assert "candidates" not in found[0]
    [one] = (await admin.json("/debug/decisions?request_id=b"))["decisions"]  # type: ignore[misc]
    assert one["requestId"] == "b"
    assert len(one["candidates"]) == 2


@pytest.mark.parametrize("limit", ["0", "1025", "-1", "x", "", "1e3", "٣"])
async def test_a_bad_limit_is_400(admin: Admin, limit: str) -> None:
    status, _, text = await admin.get(f"/debug/decisions?limit={limit}")
    assert status == 400
    assert json.loads(text)["error"]["code"] == "bad_limit"


async def test_an_unknown_id_is_404(admin: Admin) -> None:
    status, _, text = await admin.get("/debug/decisions?request_id=nobody")
    assert status == 404
    assert json.loads(text)["error"]["code"] == "pick_not_found"


async def test_the_index_names_the_pages(admin: Admin) -> None:
    _, _, text = await admin.get("/")
    pages = ("/metrics", "/readyz", "/config", "/debug/state", "/debug/decisions")
    for page in (*pages, "/debug/index", "/debug/lookup"):
        assert page in text


async def test_explain_lists_the_last_picks(admin: Admin) -> None:
    result = await run_explain("--admin", admin.url)
    assert (result.exit_code, result.output) == (0, "the picker has picked nothing yet\n")
    first = admin.core.director.pick(completion([1] * 6400, id="first-of-two"))
    first.response_started(200)
    first.first_token(0.25)
    first.end(Outcome.COMPLETED, Usage(6400, 1600, 3), after=1.0)
    admin.core.director.pick(completion([1] * 6400, id="second"))
    result = await run_explain("--admin", admin.url)
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines() if "llama" in line]
    assert [line[1] for line in lines] == ["second", "first-of-two"]
    assert lines[1][3:] == [
        *(first.endpoint.address, "6,400", "~0", "1,600", "250.0", "ms", "1,000.0", "ms"),
        *("200", "completed"),
    ]
    assert lines[0][-1] == "running"
    result = await run_explain("--admin", admin.url, "-n", "1", "-o", "json")
    assert [each["requestId"] for each in json.loads(result.output)] == ["second"]


async def test_explain_tells_what_a_request_was_sent_as(admin: Admin) -> None:
    targets = [RewriteTarget(model="llama-v2")]
    admin.core.director.rewrites.update([Rewrite(models=["llama"], targets=targets)])
    for model, sent_as in {"llama": ["llama-v2"], "other": []}.items():
        headers = {"content-type": "application/json", "x-request-id": model}
        body = json.dumps({"model": model, "prompt": "Hello"}).encode()
        admin.core.director.route("POST", "/v1/completions", headers, body)
        lines = (await run_explain("--admin", admin.url, model)).output.splitlines()
        assert [line.split()[1] for line in lines if line.startswith("model ")] == [model]
        assert [line.split()[2] for line in lines if line.startswith("sent as ")] == sent_as


async def test_explain_shows_each_candidates_scores() -> None:
    async with serving(Core(PODS, scorers={"prefix": 3, "queue": 2})) as admin:
        admin.core.director.pick(completion([1] * 640, subset=PODS[1:]))
        admin.core.director.pick(completion([1] * 640, id="why"))
        result = await run_explain("why", "--admin", admin.url.removeprefix("http://"))
    assert result.exit_code == 0
    [chosen] = [line for line in result.output.splitlines() if f"{PODS[1]} *" in line]
    assert re.search(r" 0\.99\d x 3 = 2\.9\d\d +0\.000 x 2 = 0\.000 +2\.9\d\d", chosen)
    [other] = [line for line in result.output.splitlines() if f" {PODS[0]} " in line]
    assert "0.000 x 3 = 0.000" in other
    assert f"fallbacks     {PODS[0]}\n" in result.output


async def test_explain_shows_by_what_a_prompt_was_matched(admin: Admin) -> None:
    admin.core.director.pick(completion("Hello", id="x"))
    result = await run_explain("x", "--admin", admin.url)
    assert "matched by    what was sent\n" in result.output
    assert "predicted     ~0\n" in result.output


async def test_explain_shows_no_control_characters(admin: Admin) -> None:
    admin.core.director.pick(completion("Hello", model="\x1b[2Jred\x07 [bold]", id="x"))
    for arguments in ((), ("x",)):
        result = await run_explain("--admin", admin.url, *arguments)
        assert result.exit_code == 0
        assert "\x1b" not in result.output
        assert "?[2Jred? [bold]" in result.output


async def test_explain_says_what_is_wrong_in_a_line(admin: Admin) -> None:
    result = await run_explain("nobody", "--admin", admin.url)
    assert result.exit_code == 1
    assert "the last 0 picks have no such request id" in result.output
    result = await run_explain("--admin", admin.url + "/nothing")
    assert result.exit_code == 1
    assert "it is not the admin page of a picker" in result.output
    result = await run_explain("--admin", "ftp://example.com")
    assert result.exit_code == 2


async def test_explain_says_that_no_picker_is_there() -> None:
    async with serving(Core([])) as admin:
        url = admin.url
    result = await run_explain("--admin", url)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: no picker answers at {url}: ")
    assert "Connection refused" in result.output
    assert len(result.output.splitlines()) == 1
