"""What the picker knows by KV events, as admin pages, metrics and `warmpath index` show it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from picker.admin import LOOKUPS_AT_ONCE, MAX_LOOKUP
from picker.commands.index import index
from picker.config import EndpointSpec, Prefix, parse
from picker.director import Outcome
from picker.prefix.precise import EventsPrefix
from picker.usage import Usage
from tests.picker.core import IDLE, Core, completion
from tests.picker.prefix.publishers import Pod, prompt, stored
from tests.picker.test_admin import Admin, serving
from tests.picker.test_metrics import get, read
from tests.picker.waiting import until

TELLING, SILENT = "127.0.0.1:8001", "127.0.0.1:8002"
JUNK = "\x1b[2J"
PATH = {"path": "/v1/completions"}


@dataclass
class Site:
    """An admin server, and a pod that tells: three blocks of `prompt`."""

    admin: Admin
    prefix: EventsPrefix
    pod: Pod

    async def index(self) -> Any:
        return await self.admin.json("/debug/index")

    async def lookup(self, body: bytes, query: dict[str, str] = PATH) -> tuple[int, Any]:
        url = f"{self.admin.url}/debug/lookup"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=body, params=query) as response,
        ):
            return response.status, await response.json()

    async def run(self, *arguments: str, given: str | None = None) -> Result:
        """`warmpath index`, in a thread, because the server that it asks runs here."""
        all_arguments = ("--admin", self.admin.url, *arguments)
        return await asyncio.to_thread(
            CliRunner().invoke, index, all_arguments, given, {"COLUMNS": "80"}
        )


@asynccontextmanager
async def running() -> AsyncIterator[Site]:
    made: list[EventsPrefix] = []

    def producer(pool: Any) -> EventsPrefix:
        made.append(EventsPrefix(pool, Prefix(mode="events", tokenizer="simulated")))
        return made[0]

    core = Core([], producer=producer)
    (prefix,) = made
    await prefix.start()
    async with Pod() as pod, serving(core, prefix) as admin:
        admin.config = parse("prefix: {mode: events, tokenizer: simulated}")
        pod.lose(stored(0, 2), {"type": "NewKind"}, stored(5, 6))
        pod.lose(stored(2, 3))
        core.pool.update(
            [
                EndpointSpec(address=TELLING, events=[pod.source]),
                EndpointSpec(address=SILENT),
            ]
        )
        for endpoint in core.pool.endpoints.values():
            core.load.report(endpoint, IDLE, core.now)
        await prefix.first_round()
        await until(lambda: prefix.subscriptions.trouble(core.endpoint(SILENT)))
        try:
            yield Site(admin, prefix, pod)
        finally:
            await prefix.stop()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running() as site:
        yield site


async def test_the_page_shows_sizes_and_publishers(site: Site) -> None:
    told = await site.index()
    assert told["tokenizer"] == "simulated"
    sizes = told["index"]
    assert (sizes["blocks"], sizes["orphans"]) == (3, 1)
    assert sizes["held"] == {"gpu": 3, "cpu": 0, "storage": 0}
    assert sizes["changes"]["stored"] == 3
    telling, silent = told["pods"]
    assert (telling["address"], silent["address"]) == (TELLING, SILENT)
    assert silent["publishers"] == []
    assert silent["trouble"] == "cannot connect: Connection refused"
    (publisher,) = telling["publishers"]
    assert publisher["address"] == site.pod.source.address
    assert publisher["replay"] == site.pod.source.replay
    assert publisher["connected"]
    assert not publisher["replaying"]
    counts = {name: publisher[name] for name in ("batches", "events", "unknown", "gaps", "replays")}
    assert counts == {"batches": 2, "events": 3, "unknown": 1, "gaps": 0, "replays": 1}
    assert publisher["held"]["gpu"] == 3


async def test_metrics_show_the_same(site: Site) -> None:
    _, _, page = await site.admin.get("/metrics")
    samples = read(page)
    pod, silent = {"endpoint": TELLING}, {"endpoint": SILENT}
    assert get(samples, "warmpath_index_blocks") == 3
    assert get(samples, "warmpath_index_orphan_blocks") == 1
    assert get(samples, "warmpath_index_changes_total", change="stored") == 3
    assert get(samples, "warmpath_pod_held_blocks", tier="gpu", **pod) == 3
    assert get(samples, "warmpath_pod_events_connected", **pod) == 1
    assert get(samples, "warmpath_pod_events_connected", **silent) == 0
    assert get(samples, "warmpath_pod_events_batches_total", **pod) == 2
    assert get(samples, "warmpath_pod_events_unknown_total", **pod) == 1
    assert get(samples, "warmpath_pod_events_restarts_total", **pod) == 0
    age = get(samples, "warmpath_pod_events_age_seconds", **pod)
    assert age is None or age >= 0  # a replay brought all so far
    assert get(samples, "warmpath_pod_events_age_seconds", **silent) is None
    assert get(samples, "warmpath_prefix_missed_tokens_total", reason="media") == 0


async def test_predictions_are_compared_with_what_pods_find(site: Site) -> None:
    director = site.admin.core.director
    for cached, ids in ((12, prompt(5)), (8, prompt(5)), (12, [*prompt(3), 1]), (16, [9] * 17)):
        request = completion(ids, subset=[TELLING])
        assert site.prefix.prepare(request) is None
        pick = director.pick(request)
        assert pick.matched_by == "events"
        site.admin.core.now += 100
        pick.end(Outcome.COMPLETED, Usage(len(ids), cached, 1))
    guessed = completion(prompt(5), subset=[SILENT])
    assert site.prefix.prepare(guessed) is None
    director.pick(guessed).end(Outcome.COMPLETED, Usage(20, 0, 1))
    told = await site.index()
    assert told["matches"] == {"events": 4, "approximate": 1, "none": 0}
    assert told["predictions"]["events"] == {"less": 1, "exact": 2, "more": 1}
    assert told["predictions"]["approximate"] == {"less": 0, "exact": 1, "more": 0}
    samples = read(site.admin.core.page())
    predictions = "warmpath_prefix_predictions_total"
    assert get(samples, predictions, by="events", result="exact") == 2
    assert get(samples, predictions, by="events", result="more") == 1
    assert get(samples, "warmpath_prefix_matches_total", by="approximate") == 1


async def test_a_lookup_shows_who_holds_how_much(site: Site) -> None:
    body = json.dumps({"model": "m", "prompt": prompt(5)}).encode()
    status, told = await site.lookup(body)
    assert status == 200
    assert (told["model"], told["promptTokens"], told["matchedBy"]) == ("m", 20, "events")
    assert told["pods"] == [
        {
            "address": TELLING,
            "matchedBy": "events",
            "blocks": 3,
            "numBlocks": 5,
            "blockSize": 4,
            "tokens": 12,
            "weightedTokens": 12.0,
            "predictedTokens": 12,
        },
        {
            "address": SILENT,
            "matchedBy": "approximate",
            "blocks": 0,
            "numBlocks": 5,
            "blockSize": None,
            "tokens": 0,
            "weightedTokens": 0.0,
            "predictedTokens": 0,
        },
    ]
    # As chats are by default; and it was only a question.
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    status, told = await site.lookup(chat, {})
    assert (status, told["matchedBy"], told["pods"][0]["blocks"]) == (200, "events", 0)
    assert (await site.index())["matches"]["events"] == 0
    assert len(site.admin.core.journal) == 0


@pytest.mark.parametrize(
    ("body", "path", "status", "code"),
    [
        (b"{", "/v1/completions", 400, "invalid_json"),
        (b"{}", "/v1/completions", 400, "no_prompt"),
        (b'{"prompt": "Hi"}', "/v1/models", 400, "no_prompt"),
        (b'{"prompt": "Hi"}', "", 400, "no_prompt"),
        (b" " * (MAX_LOOKUP + 1), "/v1/completions", 413, "body_too_large"),
    ],
    ids=["no JSON", "no prompt", "other API", "no path", "too large"],
)
async def test_what_cannot_be_looked_up_is_refused(
    site: Site, body: bytes, path: str, status: int, code: str
) -> None:
    answer, told = await site.lookup(body, {"path": path})
    assert (answer, told["error"]["code"]) == (status, code)


async def test_only_some_lookups_run_at_once(site: Site) -> None:
    """Others are refused, whose bodies nobody has read."""
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await go_on.wait()
        yield b'"Hi"}'

    async def ask(http: aiohttp.ClientSession) -> int:
        url = f"{site.admin.url}/debug/lookup"
        async with http.post(url, data=slow(), params=PATH) as response:
            return response.status

    async with aiohttp.ClientSession() as http:
        asking = [asyncio.create_task(ask(http)) for _ in range(LOOKUPS_AT_ONCE + 1)]
        done, others = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        go_on.set()
        assert [task.result() for task in done] == [429]
        assert set(await asyncio.gather(*others)) == {200}
        assert (await site.lookup(b'{"prompt": "Hi"}'))[0] == 200


async def test_there_is_no_index_where_no_events_are_followed() -> None:
    async with serving(Core([TELLING])) as admin:
        status, _, text = await admin.get("/debug/index")
        assert (status, json.loads(text)["error"]["code"]) == (404, "no_index")
        assert "prefix.mode is approximate" in text
        result = await asyncio.to_thread(CliRunner().invoke, index, ["--admin", admin.url])
    assert result.exit_code == 1
    assert "no KV events are followed: prefix.mode is approximate" in result.output


async def test_the_command_shows_a_table(site: Site) -> None:
    result = await site.run()
    assert result.exit_code == 0
    assert re.search(r"^blocks +3 of at most 4,194,304, 0 MiB$", result.output, re.MULTILINE)
    assert re.search(r"^held +gpu 3 \(all pods\)$", result.output, re.MULTILINE)
    assert re.search(r"^orphans +1$", result.output, re.MULTILINE)
    rows = [line.split() for line in result.output.splitlines() if "127.0.0.1:800" in line]
    assert rows[0][:3] == [TELLING, site.pod.source.address, "connected"]
    assert rows[0][-6:] == ["gpu", "3", "0", "1", "0", "0"]
    assert rows[1][:2] == [SILENT, "-"]
    result = await site.run("-o", "json")
    told = json.loads(result.output)
    assert told["index"] == (await site.index())["index"]


async def test_the_table_is_shown_again_and_again_until_interrupted(site: Site) -> None:
    watching = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "picker.cli", "index", "--watch", "--interval", "0.1"),
        *("--admin", site.admin.url),
        stdout=asyncio.subprocess.PIPE,
    )
    assert watching.stdout is not None
    async with asyncio.timeout(30):
        for _ in range(3):
            await watching.stdout.readuntil(site.pod.source.address.encode())
        watching.send_signal(signal.SIGINT)
        await watching.stdout.read()
        assert await watching.wait() == 0


async def test_the_command_looks_a_prompt_up(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"prompt": prompt(4)}))
    for arguments, given in (
        (("--body", str(file), "--path", "/v1/completions"), None),
        (("--body", "-", "--path", "/v1/completions"), file.read_text()),
    ):
        result = await site.run("lookup", *arguments, given=given)
        assert result.exit_code == 0, result.output
        assert "prompt      16 tokens\n" in result.output
        (row,) = [line.split() for line in result.output.splitlines() if TELLING in line]
        assert row == [TELLING, "3", "4", "4", "12", "12", "events"]
    for arguments, given in ((("--prompt", "Hello"), None), (("--prompt", "-"), "Hello")):
        result = await site.run("lookup", "--model", "m", *arguments, "-o", "json", given=given)
        told = json.loads(result.output)
        assert (told["model"], told["promptTokens"]) == ("m", 5)
    result = await site.run("-o", "json", "lookup", "--prompt", "Hello")
    assert json.loads(result.output)["promptTokens"] == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ("lookup",),
        ("lookup", "--prompt", "a", "--body", "-"),
        ("lookup", "--body", "-", "--model", "m"),
        ("lookup", "--prompt", "a", "--path", "/v1/completions"),
        ("lookup", "--body", "/nowhere"),
        ("--watch", "-o", "json"),
        ("--interval", "0"),
    ],
    ids=" ".join,
)
def test_the_command_says_what_makes_no_sense(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(index, arguments).exit_code == 2


async def test_the_table_shows_no_control_characters(site: Site) -> None:
    (followed,) = [
        each
        for endpoint, each in site.prefix.subscriptions._followed.items()
        if endpoint.address == SILENT
    ]
    followed.trouble = f"{JUNK}red"
    result = await site.run()
    assert JUNK not in result.output
    assert "?[2Jred" in result.output
