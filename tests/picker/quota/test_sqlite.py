"""The SQLite store's own promises: what was answered outlives its process, and it is shared."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from picker.quota.model import QuotaError, Subject
from picker.quota.plan import Denied, Granted
from picker.quota.store import CHARGED_SECONDS, Change, StoreDown
from picker.quota.store_sqlite import CLEAR_SECONDS, SQLiteStore
from picker.quota.stores import REDIS_SECONDS, open_store
from tests.picker.quota.customers import balanced, customer, killed_after, prepare
from tests.picker.quota.kit import Clock, Desk, limits, spent, tokens

ALICE = "tenant/alice"


@pytest.mark.parametrize("answers", [1, 40, 333])
async def test_what_was_answered_outlives_kill_9(tmp_path: Path, answers: int) -> None:
    path = tmp_path / "quota.db"
    store = SQLiteStore(path, 30.0)
    await prepare(store)
    await store.close()
    processes = [await customer(f"sqlite:///{path}", name) for name in ("a", "b")]
    told = await asyncio.gather(*(killed_after(each, answers) for each in processes))
    store = SQLiteStore(path, 30.0)
    await balanced(store, [*told[0], *told[1]])
    await store.close()


async def test_two_pickers_share_a_file_to_the_token(tmp_path: Path) -> None:
    clock = Clock()
    stores = [SQLiteStore(tmp_path / "quota.db", 30.0, clock) for _ in range(2)]
    desks = [Desk(store, clock) for store in stores]
    await desks[0].write({ALICE: Subject(limits=limits("total-tokens=1k/day", "concurrency=30"))})
    await desks[1].read()
    answers = await asyncio.gather(
        *(
            stores[number % 2].reserve(
                f"r{number}", desks[number % 2].plan(ALICE), tokens(90), "", 600.0
            )
            for number in range(50)
        )
    )
    assert sum(isinstance(answer, Granted) for answer in answers) == 11
    assert sum(isinstance(answer, Denied) for answer in answers) == 39
    assert await desks[1].used(ALICE) == [990, 11]
    for number, answer in enumerate(answers):
        if isinstance(answer, Granted):  # settled by the other one
            assert await stores[(number + 1) % 2].settle(f"r{number}", spent(100))
    for desk in desks:
        assert await desk.used(ALICE) == [1100, 0]
        assert await desk.store.verify() == []
        await desk.store.close()


async def test_reservations_expire_whoever_made_them(tmp_path: Path) -> None:
    clock = Clock()
    stores = [SQLiteStore(tmp_path / "quota.db", 30.0, clock) for _ in range(2)]
    first, second = (Desk(store, clock) for store in stores)
    await first.limit(ALICE, "concurrency=1")
    await second.read()
    id = await first.granted(ALICE, tokens(1), ttl=5.0)
    await first.store.close()
    await second.denied(ALICE, tokens(1))
    clock.now += 5
    await second.granted(ALICE, tokens(1))
    assert await second.store.settle(id, spent(3))
    await second.store.close()


async def test_a_writer_who_holds_the_file_makes_it_down_not_wrong(tmp_path: Path) -> None:
    path = tmp_path / "quota.db"
    clock = Clock()
    desk = Desk(SQLiteStore(path, 0.05, clock), clock)
    await desk.limit(ALICE, "requests=3/day")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreDown, match=r"locked|in time"):
        await desk.ask(ALICE, tokens(1))
    other.execute("ROLLBACK")
    other.close()
    assert await desk.used(ALICE) == [0]
    await desk.granted(ALICE, tokens(1))
    assert await desk.used(ALICE) == [1]
    await desk.store.close()


async def test_a_conflict_fails_alone_in_its_batch(tmp_path: Path) -> None:
    clock = Clock()
    desk = Desk(SQLiteStore(tmp_path / "quota.db", 30.0, clock), clock)
    await desk.limit(ALICE, "requests=3/day")
    wrong = desk.store.write([Change(ALICE, 99, None)], [])
    asks = [desk.ask(ALICE, tokens(1)) for _ in range(3)]
    conflict, *answers = await asyncio.gather(wrong, *asks, return_exceptions=True)
    assert "revision" in str(conflict)
    assert all(isinstance(answer[1], Granted) for answer in answers)  # type: ignore[index]
    assert await desk.used(ALICE) == [3]
    await desk.store.close()


async def test_a_charge_costs_the_same_after_however_many(tmp_path: Path) -> None:
    clock = Clock()
    store = SQLiteStore(tmp_path / "quota.db", 30.0, clock)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    async def charged(name: str, times: int) -> int:
        nonlocal steps
        steps = 0
        for number in range(times):
            assert await store.charge(f"{name}-{number}", ALICE, "m", [], spent(1))
        return steps

    store._connection.set_progress_handler(count, 10)  # so many instructions of SQLite's machine
    few = await charged("first", 20)
    await asyncio.gather(
        *(store.charge(f"more-{number}", ALICE, "m", [], spent(1)) for number in range(3000))
    )
    assert await charged("last", 20) < 2 * few
    clock.now += CHARGED_SECONDS + CLEAR_SECONDS
    await store.charge("first-0", ALICE, "m", [], spent(1))
    (left,) = store._connection.execute("SELECT count(*) FROM charged").fetchone()
    assert left == 1
    await store.close()


async def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuotaError, match="directory"):
        SQLiteStore(tmp_path / "missing" / "quota.db")
    text = tmp_path / "notes.txt"
    text.write_text("these are notes, not a database, " * 100)
    with pytest.raises(QuotaError, match="not a database"):
        SQLiteStore(text)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine (x)")
    other.commit()
    other.close()
    with pytest.raises(QuotaError, match="no quota store"):
        SQLiteStore(tmp_path / "other.db")


async def test_a_closed_store_is_down(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "quota.db")
    await store.close()
    with pytest.raises(StoreDown):
        await store.counts(["k"])


async def test_a_disk_that_is_slow_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """Else each picker would give out its share beside what the file knows of."""
    path = tmp_path / "quota.db"
    clock = Clock()
    desk = Desk(open_store(f"sqlite://{path}"), clock)
    await desk.limit(ALICE, "requests=3/day")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asked = asyncio.create_task(desk.granted(ALICE, tokens(1)))
    await asyncio.wait([asked], timeout=3 * REDIS_SECONDS)
    assert not asked.done()
    other.execute("ROLLBACK")
    other.close()
    await asked
    await desk.store.close()


async def test_who_waits_for_too_long_is_told_so_and_the_next_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "quota.db"
    clock = Clock()
    desk = Desk(SQLiteStore(path, 0.1, clock), clock)
    await desk.limit(ALICE, "requests=9/day")
    let_go = threading.Event()
    stuck = asyncio.create_task(desk.store._do(let_go.wait))  # type: ignore[attr-defined]
    asks = [asyncio.create_task(desk.ask(ALICE, tokens(1))) for _ in range(3)]
    for each in (stuck, *asks):
        with pytest.raises(StoreDown, match="in time"):
            await each
    let_go.set()
    assert (await desk.used(ALICE))[0] == 3, "what nobody waits for any more is done all the same"
    await desk.granted(ALICE, tokens(1))
    await desk.store.close()
