"""Limits of many tenants are read whole, whoever writes meanwhile, over every store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker.config import Quota
from picker.quota.admission import Ask, Quotas, Refused
from picker.quota.model import Subject
from picker.quota.policy import Policy
from picker.quota.reader import Reader
from picker.quota.store import PAGE, Change, Changes
from picker.quota.stores import open_store
from tests.picker.quota.conftest import STORES, opened, redis_url
from tests.picker.quota.kit import Clock, Desk, limits

MANY = 20_000
LIMITS = limits("requests=10/second", "total-tokens=100k/day", "concurrency=4")


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_a_picker_knows_its_limits_however_many_there_are(kind: str, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/quota.db" if kind == "sqlite" else redis_url()
    patient = open_store(url, 30.0)
    subjects = {f"tenant/{number}": Subject(limits=LIMITS) for number in range(MANY)}
    imported = [Change(name, 0, subject) for name, subject in subjects.items()]
    serving, starting = (Quotas(open_store(url), Quota()) for _ in range(2))
    await serving.start()
    await patient.write(imported, [])
    await patient.write([Change("tenant/evil", 0, Subject(blocked="evil"))], [])
    await starting.start()
    for quotas in (serving, starting):
        refused = await quotas.admit(Ask("tenant/evil"))
        assert isinstance(refused, Refused) and refused.refusal.status == 403
        assert quotas.store_up
        assert len(quotas.policy.records) == MANY + 1
        assert len(quotas.policy.plan("tenant/7", "", 0.0).checks) == len(LIMITS)
        await quotas.close()
    await patient.close()


class Meddler:
    """A store where somebody writes while its records are read."""

    def __init__(self, desk: Desk, plans: list[list[tuple[int, bool]]]) -> None:
        self._desk = desk
        self._plans = plans

    async def changes(self, version: str, after: str = "") -> Changes:
        page = await self._desk.store.changes(version, after)
        if self._plans:
            for number, kept in self._plans.pop():
                await self._desk.write({f"tenant/{number:04}": Subject(blocked="x")})
                if not kept:
                    revision = self._desk.revision(f"tenant/{number:04}")
                    gone = Change(f"tenant/{number:04}", revision, None)
                    await self._desk.store.write([gone], [])
        return page


_writes = st.lists(st.tuples(st.integers(0, 3 * PAGE), st.booleans()), max_size=4)


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    first=st.integers(0, 3 * PAGE),
    more=st.integers(0, 2 * PAGE),
    plans=st.lists(_writes, max_size=4),
)
def test_what_is_read_is_what_is_there(
    kind: str, first: int, more: int, plans: list[list[tuple[int, bool]]]
) -> None:
    async def run() -> None:
        clock = Clock()
        async with opened(kind, clock) as store:
            desk = Desk(store, clock)

            policy, left = Policy(), list(plans)
            meddler = Meddler(desk, left)
            for span in (range(first), range(first, first + more)):
                await desk.read()
                names = (f"tenant/{number:04}" for number in span)
                subject = Subject(blocked="")
                new = [Change(name, 0, subject) for name in names if not desk.revision(name)]
                if new:
                    await store.write(new, [])
                await Reader(meddler, policy).read()  # type: ignore[arg-type]
            left.clear()
            await Reader(meddler, policy).read()  # type: ignore[arg-type]
            await desk.read()
            assert policy.records == desk.policy.records
            fresh = Policy()
            await Reader(store, fresh).read()
            assert (fresh.version, fresh.records) == (policy.version, policy.records)

    asyncio.run(run())


@pytest.mark.parametrize("kind", STORES)
async def test_who_comes_while_somebody_reads_sees_what_was_written_before(kind: str) -> None:
    clock = Clock()
    async with opened(kind, clock) as store:
        desk = Desk(store, clock)
        await desk.write({f"tenant/{number}": Subject(blocked="") for number in range(PAGE // 2)})
        policy = Policy()
        reader = Reader(store, policy)
        first = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        while not first.done():
            name = f"tenant/late-{len(desk.policy.records)}"
            await desk.write({name: Subject(blocked="late")})
            await reader.read()
            assert name in policy.records
        await first
