"""The requests, the clock and the figures of bench.routing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise

import click
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.conversations import ALONE, SHARED, Turn, documents, turns
from bench.replies import Figures, Reply, closed_loop, figures, middle_rate, open_loop, read_usage
from bench.routing import compared

USAGE = {
    "prompt_tokens": 40,
    "total_tokens": 42,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 32},
}


def messages(turn: Turn) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(turn.body)["messages"]
    return found


def test_the_same_seed_gives_the_same_requests() -> None:
    assert turns(SHARED, rate=5, seconds=5, seed=1) == turns(SHARED, rate=5, seconds=5, seed=1)
    assert turns(SHARED, rate=5, seconds=5, seed=1) != turns(SHARED, rate=5, seconds=5, seed=2)


def test_the_rate_is_kept_from_the_first_second_to_the_last() -> None:
    sent = turns(SHARED, rate=20, seconds=60, seed=3)
    thirds = [sum(20 * i <= turn.at < 20 * i + 20 for turn in sent) for i in range(3)]
    assert thirds == [pytest.approx(400, rel=0.25)] * 3
    assert all(a.at <= b.at for a, b in pairwise(sent))


def test_a_turn_repeats_all_that_was_said_before() -> None:
    by_opening: dict[str, list[list[dict[str, str]]]] = {}
    for turn in turns(SHARED, rate=5, seconds=30, seed=1):
        by_opening.setdefault(json.dumps(messages(turn)[:2]), []).append(messages(turn))
    held = [said for said in by_opening.values() if len(said) > 1]
    assert len(held) > 5
    for said in held:
        for before, after in pairwise(said):
            assert after[: len(before)] == before
            assert [m["role"] for m in after[len(before) :]] == ["assistant", "user"]


def test_popular_documents_are_asked_about_more_often() -> None:
    texts = documents(SHARED)
    asked = [
        texts.index(messages(t)[0]["content"]) for t in turns(SHARED, rate=20, seconds=60, seed=1)
    ]
    half = len(texts) // 2
    assert sum(number < half for number in asked) > 1.3 * sum(number >= half for number in asked)


def test_requests_that_are_alone_share_nothing() -> None:
    starts = {
        messages(turn)[0]["content"][:60] for turn in turns(ALONE, rate=20, seconds=10, seed=1)
    }
    assert len(starts) == len(turns(ALONE, rate=20, seconds=10, seed=1))


def test_figures_are_of_a_span_and_count_those_that_still_wait() -> None:
    replies = [
        Reply(due=0.5, first_token=0.1, ended=0.2, prompt_tokens=10, output_tokens=7),
        Reply(
            due=1.0, first_token=0.2, ended=0.5, prompt_tokens=30, cached_tokens=20, output_tokens=4
        ),
        Reply(
            due=1.5, first_token=0.4, ended=5.0, prompt_tokens=10, cached_tokens=10, output_tokens=4
        ),
        Reply(due=2.5),
        Reply(due=3.0, first_token=9.0),
    ]
    found = figures(replies, 1.0, 3.0, over=5.0)
    assert sorted(found.first_token) == [0.2, 0.4, 2.5]
    assert found.hit_ratio == 0.6  # of the first one too
    assert found.requests_per_second == 0.5
    assert found.output_tokens_per_second == 2.0
    assert found.unanswered == 1


def test_a_rate_leaves_out_start_and_end() -> None:
    ends = [5.0] * 3 + [10.0 + 0.5 * i for i in range(13)] + [30.0] * 4
    assert middle_rate([Reply(1.0, ended=end - 1.0) for end in ends]) == 2.0
    with pytest.raises(click.ClickException):
        middle_rate([Reply(0.0, ended=1.0)] * 3)


def test_ratios_are_within_a_seed() -> None:
    def run(seconds: float, rate: float) -> Figures:
        return Figures(np.array([seconds] * 5), 0.5, rate, 10.0, 0)

    warm = [run(0.1, 7.0), run(0.2, 7.0)]
    robin = [run(1.0, 3.5), run(1.0, 7.0)]
    found = compared(7.0, {"round_robin": robin, "approximate": warm, "events": robin})
    shorter = found["approximate"]["first_token_times_shorter"]
    assert shorter["p90"] == {"min": 5.0, "median": 7.5, "max": 10.0}
    assert found["approximate"]["times_throughput"]["max"] == 2.0
    assert found["approximate"]["requests"] == 10
    assert found["events"]["times_throughput"]["max"] == 1.0


def test_the_last_usage_counts() -> None:
    reply = Reply(0.0)
    tail = (
        f'"usage":null}}\n\ndata: {{"choices":[],"usage":{json.dumps(USAGE)}}}\n\ndata: [DONE]\n\n'
    )
    read_usage(tail.encode(), reply)
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (40, 32, 2)
    with pytest.raises(click.ClickException):
        read_usage(b"data: [DONE]\n\n", Reply(0.0))


class Server:
    """Streams a role, then, when told to, a word and the usage."""

    def __init__(self) -> None:
        self.may_speak = asyncio.Event()
        self.asked = self.most_at_once = self.at_once = 0
        self.status = 200
        self.speaks_at = 0  # requests at once

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.at_once == self.speaks_at:
            self.may_speak.set()
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
        await self.may_speak.wait()
        await response.write(b'data: {"choices":[{"delta":{"content":"Hi"}}],"usage":null}\n\n')
        await response.write(b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(USAGE).encode())
        self.at_once -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, int]]:
    handler = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler.answer)
    async with TestServer(app, host="127.0.0.1") as running:
        assert running.port is not None
        yield handler, running.port


async def test_a_role_is_not_yet_a_token(server: tuple[Server, int]) -> None:
    handler, port = server
    replies, over = await open_loop(port, [Turn(0.0, b"{}")], 0.0, patience=0.2)
    assert handler.asked == 1
    assert replies[0].first_token is None
    assert replies[0].waited(over) == over >= 0.2


async def test_answers_are_timed_and_counted(server: tuple[Server, int]) -> None:
    handler, port = server
    handler.may_speak.set()
    replies, over = await open_loop(port, [Turn(0.0, b"{}"), Turn(0.05, b"{}")], 0.1, patience=5.0)
    assert [reply.output_tokens for reply in replies] == [2, 2]
    assert all(0 < reply.first_token <= reply.ended < over for reply in replies)


async def test_so_many_requests_are_under_way_until_all_are_sent(
    server: tuple[Server, int],
) -> None:
    handler, port = server
    handler.speaks_at = 2
    assert len(await closed_loop(port, [b"{}"] * 9, 2)) == 9
    assert (handler.asked, handler.most_at_once) == (9, 2)


async def test_a_refusal_ends_the_run(server: tuple[Server, int]) -> None:
    handler, port = server
    handler.status = 503
    handler.may_speak.set()
    with pytest.raises(ExceptionGroup) as raised:
        await open_loop(port, [Turn(0.0, b"{}")], 1.0, patience=1.0)
    assert raised.group_contains(click.ClickException, match="503")
