"""Sends chat requests and takes the time of their answers; costs little itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import click
import numpy as np

from bench.conversations import Turn

PATH = "/v1/chat/completions"
_FIRST_TEXT = re.compile(rb'"content":\s*"[^"]')
_USAGE = re.compile(rb'"usage":\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_TAIL = 2048  # bytes; the event with the usage is among the last ones


@dataclass(slots=True)
class Reply:
    """One answer. Times in seconds; those since `due`, when it should have been sent."""

    due: float
    first_token: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def waited(self, until: float) -> float:
        """For the first token; of one that never came, the time that it was waited for."""
        return self.first_token if self.first_token is not None else until - self.due


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that were due in a time span."""

    first_token: np.ndarray  # seconds
    hit_ratio: float  # cached tokens among prompt tokens, of all that were answered in the run
    requests_per_second: float  # that ended in the span
    output_tokens_per_second: float
    unanswered: int  # requests without a first token when the run was over

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.first_token, percent))


def figures(replies: Sequence[Reply], start: float, stop: float, over: float) -> Figures:
    """Figures of `start` to `stop`.

    A first token that had not come when the run was `over` counts as if it came then, which
    flatters whoever keeps people waiting.
    """
    due = [reply for reply in replies if start <= reply.due < stop]
    ended = [r for r in replies if r.ended is not None and start <= r.due + r.ended < stop]
    prompt = sum(reply.prompt_tokens for reply in replies)
    return Figures(
        first_token=np.array([reply.waited(over) for reply in due]),
        hit_ratio=sum(reply.cached_tokens for reply in replies) / max(1, prompt),
        requests_per_second=len(ended) / (stop - start),
        output_tokens_per_second=sum(reply.output_tokens for reply in ended) / (stop - start),
        unanswered=sum(reply.first_token is None for reply in due),
    )


def middle_rate(replies: Sequence[Reply]) -> float:
    """Requests a second by which replies ended, without the first and the last fifth of them."""
    ends = sorted(reply.due + reply.ended for reply in replies if reply.ended is not None)
    first, last = len(ends) // 5, len(ends) - 1 - len(ends) // 5
    if last <= first or ends[last] <= ends[first]:
        raise click.ClickException(f"{len(ends)} requests are too few to tell a rate")
    return (last - first) / (ends[last] - ends[first])


class Client:
    """Sends requests to one address, each over a connection of its own while it runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}{PATH}"
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._http.close()

    async def send(self, body: bytes, reply: Reply, start: float) -> None:
        """Fill `reply` as the answer comes. `start` is the clock's time at second 0.

        Raises:
            click.ClickException: an answer that is none.
        """
        clock = asyncio.get_running_loop().time
        due = start + reply.due
        tail = b""
        async with self._http.post(self._url, data=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise click.ClickException(f"a request was answered {response.status}: {text}")
            async for piece in response.content.iter_any():
                tail = (tail + piece)[-_TAIL:] if reply.first_token is not None else tail + piece
                if reply.first_token is None and _FIRST_TEXT.search(tail):
                    reply.first_token = clock() - due
        reply.ended = clock() - due
        read_usage(tail, reply)


def read_usage(tail: bytes, reply: Reply) -> None:
    """The token counts at the end of a stream."""
    found = _USAGE.findall(tail)
    if not found:
        raise click.ClickException(f"an answer ended without its usage: {tail[-200:]!r}")
    usage = json.loads(found[-1])
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.output_tokens = usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    reply.cached_tokens = details.get("cached_tokens") or 0


async def open_loop(
    port: int, turns: Sequence[Turn], seconds: float, patience: float
) -> tuple[list[Reply], float]:
    """Send each turn when it is due, whatever became of the others.

    `patience` seconds after the last second what still runs is given up.

    Returns:
        A reply for each turn, and the second at which the run was over.
    """
    clock = asyncio.get_running_loop().time
    client = Client(port)
    replies = [Reply(turn.at) for turn in turns]
    start = clock()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for turn, reply in zip(turns, replies, strict=True):
                await asyncio.sleep(max(0.0, start + turn.at - clock()))
                tasks.append(group.create_task(client.send(turn.body, reply, start)))
            await asyncio.sleep(max(0.0, start + seconds - clock()))
            await asyncio.wait(tasks, timeout=patience)
            over = clock() - start
            for task in tasks:
                task.cancel()
    finally:
        await client.close()
    return replies, over


async def closed_loop(port: int, bodies: Sequence[bytes], outstanding: int) -> list[Reply]:
    """Keep so many requests under way until all are answered."""
    clock = asyncio.get_running_loop().time
    client = Client(port)
    replies: list[Reply] = []
    waiting = iter(bodies)
    start = clock()

    async def one_after_another() -> None:
        for body in waiting:
            reply = Reply(clock() - start)
            replies.append(reply)
            await client.send(body, reply, start)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(outstanding):
                group.create_task(one_after_another())
    finally:
        await client.close()
    return replies
