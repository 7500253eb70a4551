"""Customers in processes of their own, and what can be said after their end."""

from __future__ import annotations

import asyncio
import sys

from picker.quota.ledger import Use
from picker.quota.model import Subject
from picker.quota.store import Store
from tests.picker.quota.kit import Clock, Desk, limits, spent

ALICE = "tenant/alice"
ROOM = limits("total-tokens=900M/day", "total-tokens=900M/hour", "concurrency=900k")
RESERVED = 50  # tokens of each request


async def prepare(store: Store) -> None:
    """Give them a limit that they never meet."""
    await Desk(store, Clock(store.wall())).write({ALICE: Subject(limits=ROOM)})


async def customer(url: str, name: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "tests.picker.quota.customer", url, name)
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def killed_after(process: asyncio.subprocess.Process, lines: int) -> list[list[str]]:
    """Kill -9 a customer after so many answers; all that it was answered."""
    assert process.stdout is not None
    told = [await process.stdout.readline() for _ in range(lines)]
    process.kill()
    return told_words(told) + await rest(process)


async def rest(process: asyncio.subprocess.Process) -> list[list[str]]:
    """What a customer still had to tell when it ended."""
    assert process.stdout is not None
    told = [line async for line in process.stdout]
    await process.wait()
    return told_words(told)


def told_words(lines: list[bytes]) -> list[list[str]]:
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


async def balanced(store: Store, told: list[list[str]]) -> None:
    """Nothing that was answered is lost, and the books agree with the counters to the token."""
    assert await store.verify() == []
    settled = {words[1]: int(words[2]) for words in told if words[0] == "settled"}
    granted = {words[1] for words in told if words[0] == "granted"}
    held = {reservation.id for reservation in await store.reservations()}
    assert not held & settled.keys()
    for id in granted - settled.keys() - held:  # settled, but the answer came no more
        assert await store.settle(id, spent(1)) is False

    use = next(iter((await store.uses(0)).values()), Use())
    assert use.prompt_tokens >= sum(settled.values())
    assert use.requests >= len(settled)
    desk = Desk(store, Clock(store.wall()))
    await desk.read()
    day, _, concurrency = await store.counts(desk.keys(desk.plan(ALICE)))
    assert day.settled == use.prompt_tokens
    assert day.value == day.settled + RESERVED * len(held)
    assert concurrency.value == len(held)

    for id in held:
        assert await store.settle(id, spent(RESERVED))
    assert await store.reservations() == []
    day, _, concurrency = await store.counts(desk.keys(desk.plan(ALICE)))
    assert (day.value, concurrency.value) == (day.settled, 0)
    assert await store.verify() == []
