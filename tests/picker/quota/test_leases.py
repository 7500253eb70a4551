"""Leases: no round trip for most requests, never more than the limit, and a stated bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker.config import Duration, Leases, Quota
from picker.quota.admission import Admission, Ask, Quotas
from picker.quota.leases import HOT, LIVES
from picker.quota.model import Subject
from picker.quota.store_memory import MemoryStore
from picker.quota.stores import open_store
from picker.usage import Usage
from tests.picker.quota.conftest import STORES, opened
from tests.picker.quota.kit import Clock, Desk, limits
from tests.picker.quota.redis_server import DEADLINE, RedisServer, running

ALICE = "tenant/alice"
PERIOD, SHARE = 1.0, 0.1
CONFIG = Quota(leases=Leases(enabled=True, period=Duration(PERIOD), share=SHARE))


@asynccontextmanager
async def leased(desk: Desk) -> AsyncIterator[Quotas]:
    quotas = Quotas(desk.store, CONFIG, desk.clock)
    await quotas.start()
    yield quotas


async def admit(quotas: Quotas, tokens: int = 10) -> Admission | None:
    answer = await quotas.admit(Ask(ALICE, "m", tokens, max_tokens=0))
    return answer if isinstance(answer, Admission) else None


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    clock = Clock()
    async with opened(request.param, clock) as store:
        desk = Desk(store, clock)
        await desk.limit(ALICE, "total-tokens=100k/day", "requests=10k/hour")
        yield desk


async def drained(quotas: Quotas) -> None:
    """All leases are given back."""
    assert quotas._leases is not None
    await quotas._leases.close()
    await quotas.settled()


async def test_a_hot_subject_seldom_asks_the_store(desk: Desk) -> None:
    async with leased(desk) as quotas:
        for _ in range(500):
            admission = await admit(quotas)
            assert admission is not None
            quotas.settle(admission, Usage(10, 0, 0))
        assert quotas.numbers.leased > 450
        await drained(quotas)
        assert await desk.used(ALICE) == pytest.approx([5000, 500])
        assert await desk.store.reservations() == []
        assert await desk.store.verify() == []
        (use,) = (await desk.store.uses(0)).values()
        assert (use.requests, use.prompt_tokens) == (500, 5000)


async def test_a_cold_subject_asks_each_time(desk: Desk) -> None:
    async with leased(desk) as quotas:
        for _ in range(3 * HOT):
            assert await admit(quotas) is not None
            desk.clock.now += PERIOD / 3
        assert quotas.numbers.leased == 0
        assert (await desk.used(ALICE))[0] == 30 * HOT


async def test_what_a_lease_holds_counts_for_everybody(desk: Desk) -> None:
    async with leased(desk) as quotas:
        for _ in range(HOT + 1):
            await admit(quotas)
        (lease,) = [held for held in await desk.store.reservations() if "lease" in held.id]
        assert lease.lines[0].amount == HOT * 10
        total = sum(each.lines[0].amount for each in await desk.store.reservations())
        assert await desk.used(ALICE) == pytest.approx([total, total // 10])


async def test_requests_that_outlive_their_lease_are_settled_to_the_token(desk: Desk) -> None:
    async with leased(desk) as quotas:
        admissions = [await admit(quotas) for _ in range(100)]
        desk.clock.now += PERIOD
        late = await admit(quotas)  # the lease is over; what nobody used is given back
        await asyncio.gather(*quotas._leases._tasks)  # type: ignore[union-attr]
        used = await desk.used(ALICE)
        assert used[0] - sum(each.lines[0].amount for each in await desk.store.reservations()) == 0
        for admission in (*admissions, late):
            assert admission is not None
            quotas.settle(admission, Usage(7, 0, 5))
        await drained(quotas)
        assert (await desk.used(ALICE))[0] == 101 * 12
        assert await desk.store.reservations() == []
        assert await desk.store.verify() == []


async def test_a_block_is_seen_within_a_period(desk: Desk) -> None:
    async with leased(desk) as quotas:
        for _ in range(3 * HOT):
            assert await admit(quotas) is not None
        await desk.write({ALICE: Subject(blocked="unpaid")})
        desk.clock.now += PERIOD
        assert await admit(quotas) is None
        await drained(quotas)
        assert await desk.store.verify() == []


async def test_subjects_with_a_limit_on_concurrency_are_not_leased(desk: Desk) -> None:
    await desk.limit(ALICE, "total-tokens=100k/day", "concurrency=500")
    async with leased(desk) as quotas:
        for _ in range(5 * HOT):
            assert await admit(quotas) is not None
        assert quotas.numbers.leased == 0
        assert await desk.used(ALICE) == [50 * HOT, 5 * HOT]


async def test_a_picker_that_dies_frees_its_lease_and_over_admission_has_a_bound(
    desk: Desk,
) -> None:
    """What its requests may still use is at most the lease: that is the bound."""
    await desk.limit(ALICE, "total-tokens=2k/day")
    dead, alive = Quotas(desk.store, CONFIG, desk.clock), Quotas(desk.store, CONFIG, desk.clock)
    running_there = [await admit(dead) for _ in range(30)]
    await asyncio.gather(*dead._leases._tasks)  # type: ignore[union-attr]
    held = await desk.store.reservations()
    lease = sum(each.lines[0].amount for each in held if each.ttl == LIVES * PERIOD)
    assert 0 < lease <= SHARE * 2000
    desk.clock.now += LIVES * PERIOD  # and nothing is heard of it any more
    admitted = 0
    while await admit(alive) is not None:
        admitted += 10
    assert admitted + 10 * len(running_there) <= 2000 + lease
    for admission in running_there:
        assert admission is not None
        dead.settle(admission, Usage(10, 0, 0))
    await drained(alive)
    await drained(dead)
    assert (await desk.used(ALICE))[0] >= 10 * len(running_there)  # debt, not loss
    assert await desk.store.verify() == []


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 1),  # which picker
            st.sampled_from(["ask", "ask", "ask", "end", "wait"]),
            st.integers(0, 40),  # tokens
        ),
        max_size=120,
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_pickers_with_leases_never_pass_a_limit_and_balance(
    steps: list[tuple[int, str, int]],
) -> None:
    async def run() -> None:
        clock = Clock()
        desk = Desk(MemoryStore(clock, clock), clock)
        await desk.write(
            {
                "org/acme": Subject(limits=limits("total-tokens=1500/month")),
                ALICE: Subject("org/acme", limits("total-tokens=900/minute", "requests=300/day")),
            }
        )
        pickers = [Quotas(desk.store, CONFIG, clock) for _ in range(2)]
        open_ones: list[tuple[Quotas, Admission]] = []
        passed, used = 0, 0
        for number, step, tokens in steps:
            quotas = pickers[number]
            if step == "ask":
                for _ in range(4):
                    admission = await admit(quotas, tokens)
                    if admission is not None:
                        open_ones.append((quotas, admission))
                        passed += tokens
            elif step == "end" and open_ones:
                quotas, admission = open_ones.pop(0)
                reserved = admission.estimate.prompt_tokens
                quotas.settle(admission, Usage(min(tokens, reserved), 0, 0))
                used += min(tokens, reserved)
                passed -= reserved - min(tokens, reserved)
            elif step == "wait":
                clock.now += tokens / 40
                await asyncio.sleep(0)
            assert passed <= 1500
        for quotas, admission in open_ones:
            quotas.settle(admission, Usage(admission.estimate.prompt_tokens, 0, 0))
            used += admission.estimate.prompt_tokens
        for quotas in pickers:
            await drained(quotas)
        assert await desk.store.verify() == []
        assert await desk.store.reservations() == []
        plan = desk.plan(ALICE)
        month = desk.keys(plan)[-1]
        assert (await desk.store.counts([month]))[0].value == used == passed

    asyncio.run(run())


async def pickers_over(server: RedisServer, count: int) -> list[Quotas]:
    stores = [open_store(f"{server.url}?name=test", DEADLINE) for _ in range(count)]
    return [Quotas(store, CONFIG) for store in stores]


@pytest.mark.parametrize("with_leases", [False, True])
async def test_fifty_at_once_on_two_pickers_never_pass_a_limit(with_leases: bool) -> None:
    with running() as server:
        store = open_store(f"{server.url}?name=test", DEADLINE)
        desk = Desk(store, Clock(time.time()))
        await desk.limit(ALICE, "total-tokens=20k/month")
        pickers = await pickers_over(server, 2)
        if not with_leases:
            for quotas in pickers:
                quotas._leases = None
        passed = 0

        async def client(number: int) -> None:
            nonlocal passed
            quotas = pickers[number % 2]
            for _ in range(80):
                admission = await admit(quotas)
                if admission is not None:
                    passed += 10
                    await asyncio.sleep(0)
                    quotas.settle(admission, Usage(10, 0, 0))
                    await quotas.settled()

        await asyncio.gather(*(client(number) for number in range(50)))
        assert passed <= 20_000
        # A lease may hold what another would have had, and so may the one before, for a moment.
        held = 2 * len(pickers) * SHARE if with_leases else 0.0
        assert passed >= 20_000 * (1 - held)
        for quotas in pickers:
            if with_leases:
                assert quotas.numbers.leased > 0
                await drained(quotas)
        await desk.read()
        assert await desk.used(ALICE) == [passed]
        while await admit(pickers[0]) is not None:
            passed += 10
        assert passed == 20_000
        assert await store.verify() == []
        for quotas in pickers:
            await quotas.close()
        await store.close()
