"""A log of requests against limits, in virtual time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.config import Quota
from picker.quota.model import Subject
from picker.quota.replay import Logged, replay
from tests.picker.quota.kit import START, limits
from tests.picker.quota.terminal import Terminal

ALICE = "tenant/alice"


def request(at: float, tokens: int = 100, seconds: float = 0.0, subject: str = ALICE) -> Logged:
    return Logged(START + at, subject, tokens, 0, max_tokens=0, seconds=seconds)


async def test_a_bucket_refills_in_the_time_of_the_log() -> None:
    log = [request(6 * number) for number in range(100)]  # 1,000 tokens a minute
    subjects = {ALICE: Subject(limits=limits("total-tokens=500/minute"))}
    (outcome,) = (await replay(subjects, log, Quota())).values()
    assert outcome.granted == 54  # 500 tokens at once, and 500 in each of 9.9 minutes
    assert outcome.refused == {"tenant/alice total-tokens/minute": 46}


async def test_requests_run_as_long_as_they_did() -> None:
    subjects = {ALICE: Subject(limits=limits("concurrency=2"))}
    log = [request(at, seconds=10) for at in (0, 1, 2, 9.5, 10, 10.5)]
    (outcome,) = (await replay(subjects, log, Quota())).values()
    assert (outcome.granted, outcome.refused.total()) == (3, 3)


async def test_ancestors_and_blocks_hold() -> None:
    subjects = {
        "org/acme": Subject(limits=limits("requests=2/day")),
        "tenant/*": Subject(parent="org/acme"),
        "tenant/bob": Subject(parent="org/acme", blocked="unpaid"),
    }
    log = [request(at, subject=f"tenant/{name}") for at, name in enumerate(["a", "bob", "b", "c"])]
    found = await replay(subjects, log, Quota())
    assert {name: outcome.granted for name, outcome in found.items()} == {
        "tenant/a": 1,
        "tenant/b": 1,
        "tenant/bob": 0,
        "tenant/c": 0,
    }
    assert list(found["tenant/c"].refused) == ["org/acme requests/day"]


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(8)))
def test_the_order_of_the_lines_does_not_matter(order: list[int]) -> None:
    log = [request(10 * number) for number in order]
    subjects = {ALICE: Subject(limits=limits("total-tokens=300/minute"))}
    (outcome,) = asyncio.run(replay(subjects, log, Quota())).values()
    assert outcome.granted == 6


def test_the_command_tries_the_stores_limits_or_a_files(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/quota.db"
    terminal = Terminal(url, ("--store", url))
    terminal("set", ALICE, "requests=2/day")
    log = tmp_path / "log.jsonl"
    line = {"at": START, "subject": ALICE, "promptTokens": 9, "completionTokens": 1}
    log.write_text("\n".join(json.dumps(line) for _ in range(4)) + "\n\n")
    (row,) = terminal.data("simulate", str(log))
    assert (row["requests"], row["granted"], row["refused"], row["tokens"]) == (4, 2, 2, 20)
    assert row["mostBy"] == "tenant/alice requests/day"
    proposed = terminal("export").stdout.replace("amount: 2", "amount: 3")
    (row,) = terminal.data("simulate", str(log), "-f", str(write(tmp_path, proposed)))
    assert row["granted"] == 3
    assert terminal.data("get")[0]["used"] == 0


def write(directory: Path, content: str) -> Path:
    path = directory / "proposed.yaml"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "at=5",
        '{"at": 1, "subject": "alice", "promptTokens": 1, "completionTokens": 1}',
        '{"at": 1, "subject": "tenant/a", "promptTokens": -1, "completionTokens": 1}',
        '{"at": 1, "subject": "tenant/a", "promptTokens": 1, "completionTokens": 1, "x": 1}',
        '{"at": 1e12, "subject": "tenant/a", "promptTokens": 1, "completionTokens": 1}',
        '{"at": -1e300, "subject": "tenant/a", "promptTokens": 1, "completionTokens": 1}',
        '{"at": 1, "seconds": 1e12, "subject": "tenant/a", "promptTokens": 1,'
        ' "completionTokens": 1}',
    ],
)
def test_a_line_that_cannot_be_is_told_with_its_place(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f"\n{line}\n")
    url = f"sqlite://{tmp_path}/quota.db"
    terminal = Terminal(url, ("--store", url))
    terminal("set", "tenant/a", "requests=5/month")
    told = terminal("simulate", str(log), code=2).stderr
    assert f"{log}:2: " in told
