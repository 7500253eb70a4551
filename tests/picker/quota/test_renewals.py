"""A living picker keeps what its requests hold; one that died gives it back soon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from picker.config import Quota
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.link import Link
from picker.quota.policy import Policy
from picker.quota.renewals import AT_ONCE, LIFE_SECONDS, Renewals
from picker.quota.store import StoreDown
from picker.quota.store_sqlite import SQLiteStore
from picker.usage import Usage
from tests.picker.quota.conftest import STORES, opened
from tests.picker.quota.kit import START, Clock, Desk, tokens
from tests.picker.quota.test_outage import until

ALICE = "tenant/alice"
HOURS_2 = 7200.0


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    clock = Clock()
    async with opened(request.param, clock) as store:
        desk = Desk(store, clock)
        await desk.limit(ALICE, "concurrency=100", "total-tokens=1M/day")
        yield desk


def renewals(desk: Desk, most: float = HOURS_2) -> Renewals:
    link = Link(desk.store, Policy(), desk.clock)
    return Renewals(link, life=LIFE_SECONDS, most=most, steady=desk.clock)


async def test_requests_that_run_keep_their_places(desk: Desk) -> None:
    kept = renewals(desk)
    ids = [await desk.granted(ALICE, tokens(5), ttl=LIFE_SECONDS) for _ in range(AT_ONCE + 7)]
    for id in ids:
        kept.add(id)
    for _ in range(30):
        desk.clock.now += LIFE_SECONDS / 3
        await kept.renew()
    assert (await desk.used(ALICE))[0] == len(ids)
    for id in ids[5:]:
        kept.drop(id)
    for _ in range(4):
        desk.clock.now += LIFE_SECONDS / 3
        await kept.renew()
    assert await desk.used(ALICE) == [5, 25]
    await kept.close()


async def test_a_request_that_was_forgotten_gives_its_place_back_in_the_end(desk: Desk) -> None:
    kept = renewals(desk, most=300.0)
    kept.add(await desk.granted(ALICE, tokens(5), ttl=LIFE_SECONDS))
    while desk.clock.now < START + 300 + LIFE_SECONDS:
        desk.clock.now += LIFE_SECONDS / 3
        await kept.renew()
    assert await desk.used(ALICE) == [0, 0]
    await kept.close()


async def test_what_could_not_be_renewed_is_renewed_when_the_store_is_back() -> None:
    clock = Clock()
    async with opened("memory", clock) as store:
        desk = Desk(store, clock)
        await desk.limit(ALICE, "concurrency=1")
        kept = renewals(desk)
        kept.add(await desk.granted(ALICE, tokens(5), ttl=LIFE_SECONDS))
        renew = store.renew

        async def down(ids: object, ttl: float) -> None:
            raise StoreDown("gone")

        store.renew = down  # type: ignore[method-assign]
        clock.now += LIFE_SECONDS / 2
        with pytest.raises(StoreDown):
            await kept.renew()
        store.renew = renew  # type: ignore[method-assign]
        clock.now += LIFE_SECONDS / 3
        await kept.renew()
        clock.now += LIFE_SECONDS / 2
        assert await desk.used(ALICE) == [1]
        await kept.close()


@pytest.mark.parametrize("kind", STORES)
async def test_the_place_of_a_picker_that_died_is_free_after_a_life(kind: str) -> None:
    clock = Clock()
    async with opened(kind, clock) as store:
        desk = Desk(store, clock)
        await desk.limit(ALICE, "concurrency=1", "total-tokens=100/day")
        dead, living = (Quotas(store, Quota(), clock) for _ in range(2))
        admission = await dead.admit(Ask(ALICE, "m", 100, max_tokens=0))
        assert isinstance(admission, Admission)
        dead._renewals.drop(admission.id)  # as if nobody were there to renew it
        clock.now += LIFE_SECONDS - 0.1
        assert isinstance(await living.admit(Ask(ALICE, "m", 100, max_tokens=0)), Refused)
        clock.now += 0.1
        assert isinstance(await living.admit(Ask(ALICE, "m", 100, max_tokens=0)), Admission)
        dead.settle(admission, Usage(70, 0, 0))  # it was only slow
        await dead.settled()
        assert await desk.used(ALICE) == [1, 170]
        assert await store.verify() == []


async def test_a_picker_renews_by_itself(tmp_path: Path) -> None:
    store = SQLiteStore(f"{tmp_path}/quota.db", 30.0)
    desk = Desk(store, Clock(store.wall()))
    await desk.limit(ALICE, "concurrency=1")
    quotas = Quotas(store, Quota(), life=6.0)
    admission = await quotas.admit(Ask(ALICE, "m", 1, max_tokens=0))
    assert isinstance(admission, Admission)
    (first,) = await store.reservations()

    async def renewed() -> bool:
        return (await store.reservations())[0].expires > first.expires

    await until(renewed)
    await quotas.close()
