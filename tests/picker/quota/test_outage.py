"""Redis down, silent, back, or back with nothing: what requests meet, and what is booked."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from picker.config import Quota
from picker.quota import outage
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker
from picker.quota.model import Key, Limit, Subject
from picker.quota.outage import REST_SECONDS
from picker.quota.plan import Granted
from picker.quota.policy import Policy, Record
from picker.quota.store import SETTLED_SECONDS, End, StoreDown
from picker.quota.store_redis import RedisStore
from picker.quota.store_sqlite import SQLiteStore
from picker.quota.stores import open_store
from picker.refusal import Refusal
from picker.usage import Usage
from tests.picker.quota.kit import Clock, Desk, limits, spent, tokens
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


@pytest.mark.parametrize("on_failure", ["share", "open", "closed"])
async def test_a_picker_that_starts_without_its_store_lets_nothing_pass(on_failure: str) -> None:
    key, opened = "ab" * 32, Limit("requests", 2, "month", on_failure="open")
    with running(*DURABLE) as server:
        async with administrator(server) as desk:
            await desk.write(
                {
                    ALICE: Subject(limits=(opened,)),
                    "tenant/evil": Subject(blocked="evil"),
                    "key/one": Subject(ALICE, key=Key(key, "x", 0.0)),
                }
            )
        server.kill()
        async with picker(server, Quota(on_failure=on_failure)) as quotas:  # type: ignore[arg-type]
            for subject in (ALICE, "tenant/evil", "tenant/new"):
                answer = await quotas.admit(ask(subject=subject))
                assert isinstance(answer, Refused)
                assert (answer.refusal.status, answer.refusal.retry_after) == (503, 1)
            with pytest.raises(Refusal, match="cannot be checked"):
                await quotas.find_key(key)
            server.start()
            await until(lambda: quotas.store_up and bool(quotas.policy.records))
            assert isinstance(await quotas.admit(ask()), Admission)
            barred = await quotas.admit(ask(subject="tenant/evil"))
            assert isinstance(barred, Refused) and barred.refusal.status == 403
            assert await quotas.find_key(key) == "key/one"


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


async def test_shares_are_forgotten_when_the_store_has_long_been_back(tmp_path: Path) -> None:
    path, clock = tmp_path / "quota.db", Clock(time.time())
    quotas = Quotas(SQLiteStore(path, 0.05, clock), Quota(), clock)
    desk = Desk(SQLiteStore(path, DEADLINE, clock), clock)
    await desk.limit("tenant/*", "requests=3/day")
    await quotas.start()

    async def locked() -> list[type]:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        answers = [await quotas.admit(ask()) for _ in range(4)]
        for answer in answers:
            if isinstance(answer, Admission):
                assert answer.degraded
                quotas.settle(answer, Usage(1, 0, 0))
        for number in range(20):
            await quotas.admit(ask(subject=f"tenant/{number}"))
        assert quotas._shares.size > 20
        other.execute("ROLLBACK")
        other.close()
        await until(lambda: quotas.store_up and not quotas.owed)
        return [type(answer) for answer in answers]

    assert await locked() == [Admission] * 3 + [Refused]
    clock.now += REST_SECONDS - 1
    assert isinstance(await quotas.admit(ask()), Refused)
    assert await locked() == [Refused] * 4  # which follows on the other
    clock.now += REST_SECONDS
    assert isinstance(await quotas.admit(ask()), Refused)
    assert quotas._shares.size == 0
    await quotas.close()
    await desk.store.close()


async def test_shares_of_ever_more_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, policy = Clock(), Policy()
    monkeypatch.setattr(outage, "MAX_SHARED", 100)
    monkeypatch.setattr(outage, "MAX_PLANS", 50)
    policy.update("1", {"tenant/*": Record(1, Subject(limits=limits("requests=3/month")))})
    shares = outage.Shares(1, clock, clock)
    most = 0
    for number in range(1000):
        plan = policy.plan(f"tenant/{number}", "", clock.now)
        id = f"r{number}"
        assert isinstance(await shares.reserve(id, plan, tokens(1), "m", 60.0), Granted)
        shares.settle(id, spent(1))
        most = max(most, shares.size)
    assert most <= 150 + 2


class Deaf(RedisStore):
    """The store, but its answers to ends may be lost on the way."""

    deaf = False

    async def settle_all(self, ends: Sequence[End]) -> list[bool | None]:
        answers = await super().settle_all(ends)
        if self.deaf:
            raise StoreDown("unheard")
        return answers


@pytest.mark.parametrize(("minutes", "lost"), [(5, 0), (60, 1)])
async def test_an_end_whose_answer_was_lost_is_never_charged_twice(minutes: int, lost: int) -> None:
    with running() as server:
        clock = Clock(0.0)
        store = Deaf(f"{server.url}?name=test", DEADLINE)
        quotas = Quotas(store, Quota(), clock)
        async with administrator(server) as desk:
            await desk.limit(ALICE, "total-tokens=1k/month")
            await quotas.start()
            first, second = await admissions(quotas, 2)
            store.deaf = True
            quotas.settle(first, Usage(10, 0, 5))

            async def used() -> bool:
                return await desk.used(ALICE) == [15 + 10]

            await until(used)
            clock.now += 60 * minutes
            with server.client() as client:
                if clock.now > SETTLED_SECONDS:  # as Redis does then
                    assert client.delete(f"{{warmpath:test}}:r:{first.id}")
                client.delete(f"{{warmpath:test}}:r:{second.id}")  # which is lost, and never told
            store.deaf = False
            await until(lambda: not quotas.owed)
            quotas.settle(second, Usage(10, 0, 7))
            await until(lambda: not quotas.owed)
            assert quotas.lost == lost
            (use,) = (await store.uses(0)).values()
            assert (use.requests, use.prompt_tokens, use.completion_tokens) == (2, 20, 12)
        await quotas.close()
