"""Redis down, silent, back, or back with nothing: what requests meet, and what is booked."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from picker.config import Duration, Quota
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker
from picker.quota.model import Limit, Subject
from picker.quota.stores import open_store
from picker.usage import Usage
from tests.picker.quota.kit import Clock, Desk, limits
from tests.picker.quota.redis_server import DEADLINE, RedisServer, back, running

ALICE = "tenant/alice"
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@asynccontextmanager
async def picker(server: RedisServer, config: Quota | None = None) -> AsyncIterator[Quotas]:
    quotas = Quotas(open_store(f"{server.url}?name=test", DEADLINE), config or Quota())
    await quotas.start()
    try:
        yield quotas
    finally:
        await quotas.close()


@asynccontextmanager
async def administrator(server: RedisServer) -> AsyncIterator[Desk]:
    store = open_store(f"{server.url}?name=test", DEADLINE)
    yield Desk(store, Clock(time.time()))
    await store.close()


async def until(true: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            found = true()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


def ask(tokens: int = 10, subject: str = ALICE) -> Ask:
    return Ask(subject, "m", tokens, max_tokens=0)


async def admissions(quotas: Quotas, count: int, tokens: int = 10) -> list[Admission]:
    answers = [await quotas.admit(ask(tokens)) for _ in range(count)]
    return [answer for answer in answers if isinstance(answer, Admission)]


async def test_while_redis_is_down_each_picker_has_its_share() -> None:
    config = Quota(replicas=2)
    with running(*DURABLE) as server:
        async with administrator(server) as desk, picker(server, config) as quotas:
            await desk.limit(ALICE, "total-tokens=1k/month", "requests=1k/hour")
            before = await admissions(quotas, 10)
            assert len(before) == 10 and not any(each.degraded for each in before)
            server.kill()
            during = await admissions(quotas, 100)
            assert len(during) == 50 and all(each.degraded for each in during)  # 500 tokens
            assert not quotas.store_up
            refused = await quotas.admit(ask())
            assert isinstance(refused, Refused) and refused.refusal.status == 429

            for admission in [*before, *during]:
                quotas.settle(admission, Usage(11, 0, 0))
            assert quotas.owed >= 60
            server.start()
            await until(lambda: quotas.store_up and not quotas.owed)
            await back(desk.store)
            await desk.read()
            used = await desk.used(ALICE)
            assert used[0] == 60 * 11
            assert await desk.store.verify() == []
            assert await desk.store.reservations() == []
            (use,) = [use for use in (await desk.store.uses(0)).values() if use.requests]
            assert (use.requests, use.prompt_tokens) == (60, 660)
            after = await quotas.admit(ask())
            assert isinstance(after, Admission) and not after.degraded


async def test_closed_limits_answer_503_and_open_ones_let_pass() -> None:
    closed = Limit("total-tokens", 10**6, "month", on_failure="closed")
    opened = Limit("requests", 2, "month", on_failure="open")
    with running() as server:
        async with administrator(server) as desk, picker(server) as quotas:
            await desk.write(
                {
                    ALICE: Subject(limits=(closed,)),
                    "tenant/bob": Subject(limits=(opened,)),
                    "tenant/carol": Subject(blocked="unpaid"),
                }
            )
            assert isinstance(await quotas.admit(ask()), Admission)
            server.kill()
            for _ in range(5):
                refused = await quotas.admit(ask())
                assert isinstance(refused, Refused)
                assert refused.refusal.status == 503
                assert refused.refusal.retry_after == 1
                assert isinstance(await quotas.admit(ask(subject="tenant/bob")), Admission)
            barred = await quotas.admit(ask(subject="tenant/carol"))
            assert isinstance(barred, Refused) and barred.refusal.status == 403
            assert quotas.numbers.unavailable == 5


async def test_a_silent_redis_delays_a_few_requests_by_the_timeout_and_no_more() -> None:
    with running() as server:
        store = open_store(f"{server.url}?name=test", timeout=0.1)
        quotas = Quotas(store, Quota())
        async with administrator(server) as desk:
            await desk.limit(ALICE, "total-tokens=1M/month", "concurrency=500")
            await quotas.start()
            await until(lambda: quotas.store_up)
            first = await quotas.admit(ask())
            assert server.process is not None and isinstance(first, Admission)
            os.kill(server.process.pid, signal.SIGSTOP)
            waited = []
            for _ in range(200):
                began = time.monotonic()
                assert isinstance(await quotas.admit(ask()), Admission)
                waited.append(time.monotonic() - began)
            slow = sum(each > 0.09 for each in waited)
            assert slow <= FAILURES + 2 * sum(waited) / FIRST_PAUSE  # probes, as time goes
            os.kill(server.process.pid, signal.SIGCONT)
            await until(lambda: quotas.store_up and not quotas.owed)
            # What Redis did of the calls that nobody waited for is given back.
            await desk.read()

            async def settled() -> bool:
                return await desk.used(ALICE) == [10, 1]

            await until(settled)
            assert await desk.store.verify() == []
        await quotas.close()


async def test_a_redis_that_lost_everything_gets_the_limits_again() -> None:
    with running() as server:
        async with (
            administrator(server) as desk,
            picker(server) as first,
            picker(server) as second,
        ):
            await desk.write(
                {
                    "org/acme": Subject(limits=limits("total-tokens=100/month")),
                    ALICE: Subject("org/acme"),
                }
            )
            admission = await first.admit(ask(60))
            assert isinstance(await second.admit(ask(1)), Admission)
            server.kill()
            server.start()  # with nothing
            pickers = (first, second)
            for quotas in pickers:
                await quotas.admit(ask(0))  # which may find a connection to the server that was
                await until(lambda quotas=quotas: quotas.store_up and not quotas.owed)  # type: ignore[misc]
            assert isinstance(admission, Admission)
            first.settle(admission, Usage(60, 0, 5))  # its reservation is gone
            await until(lambda: not first.owed)
            await back(desk.store)
            assert isinstance(await second.admit(ask(50)), Refused)
            assert isinstance(await second.admit(ask(30)), Admission)
            await desk.read()
            assert set(desk.policy.records) == {"org/acme", ALICE}
            assert await desk.used(ALICE) == [95]
            assert [entry.action for entry in await desk.store.audit()] == ["restore"]
            assert await desk.store.verify() == []


@pytest.mark.parametrize(("on_failure", "status"), [("share", 200), ("open", 200), ("closed", 503)])
async def test_a_picker_that_starts_without_its_store(on_failure: str, status: int) -> None:
    with running() as server:
        async with administrator(server) as desk:
            await desk.limit(ALICE, "requests=0/month")
        with server.client() as client:
            client.bgrewriteaof()
        server.kill()
        async with picker(server, Quota(on_failure=on_failure)) as quotas:  # type: ignore[arg-type]
            answer = await quotas.admit(ask())
            assert (answer.refusal.status if isinstance(answer, Refused) else 200) == status
            server.start()
            await until(lambda: quotas.store_up)
            assert isinstance(await quotas.admit(ask()), Admission)  # it came back empty


async def test_a_cancelled_request_holds_nothing() -> None:
    with running() as server:
        async with administrator(server) as desk, picker(server) as quotas:
            await desk.limit(ALICE, "concurrency=5")
            await quotas.admit(ask())
            tasks = [asyncio.create_task(quotas.admit(ask())) for _ in range(20)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(answer, Admission):  # it had passed already
                    quotas.settle(answer, None)
                else:
                    assert isinstance(answer, asyncio.CancelledError)
            await until(lambda: not quotas.owed)
            await desk.read()

            async def given_back() -> bool:
                return await desk.used(ALICE) == [1]

            await until(given_back)


def test_the_breaker_opens_after_failures_in_a_row_and_probes_ever_more_seldom() -> None:
    clock = Clock(0.0)
    breaker = Breaker(clock)
    for _ in range(FAILURES - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        breaker.failed()
    assert not breaker.open
    breaker.failed()
    assert breaker.open
    pauses = []
    for _ in range(8):
        pauses.append(breaker.pause)
        breaker.failed()  # a late one, of a call from before: it is no probe
        assert breaker.pause == pauses[-1]
        clock.now += breaker.pause
        breaker.failed()
    assert pauses[0] == FIRST_PAUSE and pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE
    breaker.succeeded()
    assert not breaker.open and breaker.pause == 0


def test_the_timeout_of_the_configuration_is_short() -> None:
    assert Quota().timeout <= Duration(0.1)
