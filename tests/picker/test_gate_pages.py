"""What operators see of quotas and flow control: metrics, debug pages, commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from picker.cli import main
from picker.director import Outcome, Pick
from picker.engines import LoadReport
from picker.refusal import Refusal
from picker.usage import Usage
from tests.picker.core import Core
from tests.picker.test_admin import Admin, serving
from tests.picker.test_gate import LIMITS, PODS, House, soon
from tests.picker.test_metrics import get, read

MEMORY = LoadReport(waiting=0, running=0, kv_usage=0.0, block_size=16, num_blocks=100)


@dataclass
class Site:
    """A picker with one pod that takes one request at a time, and its admin page."""

    house: House
    admin: Admin

    async def metric(self, name: str, **labels: str) -> float | None:
        _, _, text = await self.admin.get("/metrics")
        return get(read(text), name, **labels)


@asynccontextmanager
async def running_site() -> AsyncIterator[Site]:
    house = await House(PODS[:1], inflight=1).open()
    await house.limit("alice", *LIMITS)
    async with serving(house.core) as admin:
        yield Site(house, admin)
    await house.gate.stop()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as site:
        yield site


async def warmpath(*arguments: str) -> Result:
    """In a thread, because the server it asks runs here."""
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


@pytest.fixture
async def crowd(site: Site) -> AsyncIterator[list[asyncio.Task[Pick]]]:
    """Of alice one request runs and two wait; one of bob waits."""
    site.house.core.load.report(site.house.core.endpoint(PODS[0]), MEMORY, site.house.core.now)
    tasks = [await soon(site.house.ask(who)) for who in ("alice", "alice", "alice", "bob")]
    yield tasks
    for task in tasks:
        task.cancel()


async def test_the_queue_is_measured(site: Site, crowd: list[asyncio.Task[Pick]]) -> None:
    zero = {"priority": "0"}
    assert await site.metric("warmpath_flow_waiting_requests", **zero) == 3
    assert await site.metric("warmpath_flow_waiting_tenants", **zero) == 2
    assert (await site.metric("warmpath_flow_waiting_bytes", **zero) or 0) > 100
    assert await site.metric("warmpath_flow_running_requests") == 1
    assert await site.metric("warmpath_flow_passed_total") == 1
    assert await site.metric("warmpath_flow_saturation") == 1
    (await crowd[0]).end(Outcome.COMPLETED, Usage(9, 0, 5))
    (await crowd[3]).end(Outcome.COMPLETED, Usage(9, 0, 5))  # bob's, who had nothing yet
    await crowd[1]
    assert await site.metric("warmpath_flow_dispatched_total") == 2
    assert await site.metric("warmpath_flow_wait_seconds_count", **zero) == 3
    assert await site.metric("warmpath_flow_wait_seconds_bucket", **zero, le="0.005") != 0
    assert await site.metric("warmpath_flow_fairness_jain", **zero) == 1.0


async def test_the_bound_is_told_where_pods_tell_their_memory(
    site: Site, crowd: list[asyncio.Task[Pick]]
) -> None:
    zero = {"priority": "0"}
    prompt = (await crowd[0]).prompt_tokens
    queued = site.admin.config.flow.saturation.waiting * prompt
    bound = await site.metric("warmpath_flow_service_bound", **zero)
    assert bound == 2 * (1600 + queued)
    spread = await site.metric("warmpath_flow_counter_spread", **zero)
    assert spread is not None and spread <= bound
    site.house.core.update(PODS)  # a pod that does not tell
    assert await site.metric("warmpath_flow_service_bound", **zero) is None


async def test_tenants_that_come_back_are_counted(site: Site) -> None:
    for _ in range(3):
        (await site.house.ask("alice")).end(Outcome.COMPLETED, Usage(9, 0, 5))
    (await site.house.ask("bob")).end(Outcome.COMPLETED, Usage(9, 0, 5))
    assert await site.metric("warmpath_flow_lifts_total", priority="0") == 1


async def test_quotas_are_measured(site: Site) -> None:
    (await site.house.ask("alice")).end(Outcome.COMPLETED, Usage(9, 0, 5))
    await site.house.limit("none", "requests=0/day")
    with pytest.raises(Refusal):
        await site.house.ask("none")
    assert await site.metric("warmpath_quota_granted_total") == 1
    assert await site.metric("warmpath_quota_denied_total", limit="requests/day") == 1
    assert await site.metric("warmpath_quota_store_up") == 1
    assert await site.metric("warmpath_quota_owed_settlements") == 0
    for name in ("leased", "degraded", "shadowed", "barred", "unavailable", "lost_settlements"):
        assert await site.metric(f"warmpath_quota_{name}_total") == 0


async def test_the_fairness_page_tells_of_tenants(
    site: Site, crowd: list[asyncio.Task[Pick]]
) -> None:
    page = await site.admin.json("/debug/fairness?limit=1")
    assert (page["running"], page["passed"], page["dispatched"]) == (1, 1, 0)
    (band,) = cast(list[Any], page["priorities"])
    assert (band["priority"], band["waiting"], band["waitingTenants"]) == (0, 3, 2)
    (most,) = band["tenants"]
    assert (most["tenant"], most["waiting"], most["running"]) == ("alice", 2, 1)
    assert most["service"] == most["counter"] == (await crowd[0]).prompt_tokens


async def test_the_state_tells_of_the_gate(site: Site, crowd: list[asyncio.Task[Pick]]) -> None:
    state = await site.admin.json("/debug/state")
    assert state["gate"] == {
        "flow": {"waiting": 3, "running": 1},
        "quota": {"storeUp": True, "owed": 0},
    }


async def test_a_picker_without_a_gate_says_so() -> None:
    async with serving(Core(PODS)) as admin:
        assert (await admin.json("/debug/state"))["gate"] is None
        status, _, text = await admin.get("/debug/fairness")
        assert (status, json.loads(text)["error"]["code"]) == (404, "no_flow")
        _, _, text = await admin.get("/metrics")
        assert "warmpath_flow" not in text
        assert "warmpath_quota" not in text
        result = await warmpath("quota", "fairness", "--admin", admin.url)
    assert result.exit_code == 1
    assert "flow.enabled is false" in result.output


async def test_quota_fairness_shows_the_page(site: Site, crowd: list[asyncio.Task[Pick]]) -> None:
    result = await warmpath("quota", "fairness", "--admin", site.admin.url)
    assert result.exit_code == 0
    first, second, _, heading, *rows = result.output.splitlines()
    assert first == "saturation 1.00, 1 requests run"
    assert second.startswith("priority 0: 3 requests of 2 tenants wait; counters differ by ")
    assert heading.split()[:5] == ["PRIORITY", "TENANT", "WEIGHT", "WAITING", "RUNNING"]
    assert [row.split()[:5] for row in rows] == [
        ["0", "alice", "1", "2", "1"],
        ["0", "bob", "1", "1", "0"],
    ]
    told = await warmpath("quota", "fairness", "--admin", site.admin.url, "-o", "json", "-n", "1")
    (band,) = json.loads(told.output)["priorities"]
    assert [each["tenant"] for each in band["tenants"]] == ["alice"]
    told = await warmpath("quota", "fairness", "--admin", site.admin.url, "-o", "csv")
    assert told.output.splitlines()[0].startswith("priority,tenant,weight,waiting,waitingBytes,")
    told = await warmpath("quota", "fairness", "--admin", site.admin.url, "-o", "name")
    assert told.output == "alice\nbob\n"


async def test_quota_fairness_says_that_no_picker_is_there() -> None:
    async with serving(Core([])) as admin:
        url = admin.url
    result = await warmpath("quota", "fairness", "--admin", url)
    assert result.exit_code == 5
    assert f"no picker answers at {url}" in result.output


async def test_names_of_tenants_cannot_steer_a_terminal(site: Site) -> None:
    """No header can bring one that does; this looks at the command alone."""
    pick = await site.house.ask("<script> [bold]")
    result = await warmpath("quota", "fairness", "--admin", site.admin.url)
    assert "<script> [bold]" in result.output
    pick.end(Outcome.COMPLETED)
    with pytest.raises(Refusal) as caught:
        await site.house.ask("\x1b[2J")
    assert caught.value.reason == "invalid_tenant"


async def test_explain_tells_whose_it_was_and_how_long_it_waited(
    site: Site, crowd: list[asyncio.Task[Pick]]
) -> None:
    first = await crowd[0]
    first.end(Outcome.COMPLETED, Usage(9, 0, 5))
    await crowd[3]
    listed = await warmpath("explain", "--admin", site.admin.url)
    last, before = [line.split() for line in listed.output.splitlines() if "llama" in line]
    assert (last[-3], before[-3:]) == ("bob", ["alice", "0.0", "ms"])
    shown = await warmpath("explain", first.request_id, "--admin", site.admin.url)
    assert "tenant        alice\n" in shown.output
    assert "waited        0.0 ms\n" in shown.output
