"""The default store: one file, shared by the processes of one machine.

All work is done by one thread, which takes what waits and commits it together (a batch), before
anybody is answered. The journal is SQLite's WAL with `synchronous = NORMAL`: whatever was answered
survives the end of any process at any point, kill -9 too. A power cut or a crash of the system may
take the last moments before it, and never leaves the file inconsistent.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from picker.quota.ledger import Denial, Reservation, Use, UseKey
from picker.quota.model import QuotaError, Subject
from picker.quota.plan import DAY, Amounts, Denied, Granted, Line, Plan, Spent
from picker.quota.policy import Record
from picker.quota.rows import SCHEMA, SCHEMA_VERSION, Rows, counter_of, reservation_of
from picker.quota.store import (
    CHARGED_SECONDS,
    KEPT_DAYS,
    MAX_AUDIT,
    PAGE,
    Change,
    Changes,
    Conflict,
    Correction,
    Count,
    Dump,
    End,
    Entry,
    Fault,
    Stale,
    StoreDown,
    count,
    faults,
)

T = TypeVar("T")

MAX_BATCH = 512  # pieces of work in one commit
READ_SECONDS = 5.0  # to wait for a page of records: without them nothing can be decided
CLEAR_SECONDS = 600.0  # between two looks for rows that tell nothing any more


class SQLiteStore:
    """A file of counters, reservations, records, audit and books.

    Args:
        path: of the file; it is made when there is none, its directory is not.
        timeout: seconds to wait for other processes that write, and for the disk.
        wall: Unix seconds. Buckets go by it too, so that they go on after a restart.

    Raises:
        QuotaError: the file cannot be opened, or is not such a store.
    """

    def __init__(
        self, path: str | Path, timeout: float = 1.0, wall: Callable[[], float] = time.time
    ) -> None:
        self.wall = wall
        self._path = Path(path)
        self._timeout = timeout
        self._connection = self._open()
        self._rows = Rows(self._connection)
        self._seen = -1  # SQLite's data_version: whether others wrote
        self._revision = 0
        self._clear_at = 0.0
        self._patience = 2 * timeout  # for the lock, then for the disk
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # who, and since when
        self._watch: asyncio.TimerHandle | None = None
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quota-sqlite", daemon=True)
        self._thread.start()

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | Stale:
        def work() -> Granted | Denied | Stale:
            if plan.version != str(self._revision):
                return Stale()
            now = self.wall()
            return self._rows.reserve(id, plan, amounts, model, ttl, now, now)

        return await self._do(work)

    async def settle(self, id: str, spent: Spent) -> bool | None:
        return (await self.settle_all([(id, spent)]))[0]

    async def settle_all(self, ends: Sequence[End]) -> list[bool | None]:
        def work() -> list[bool | None]:
            now = self.wall()
            return [self._rows.settle(id, spent, now, now) for id, spent in ends]

        return await self._do(work)

    async def shrink(self, id: str, amounts: Amounts, ttl: float) -> bool:
        return await self._do(lambda: self._rows.shrink(id, amounts, ttl, self.wall()))

    async def renew(self, ids: Sequence[str], ttl: float) -> None:
        await self._do(lambda: self._rows.renew(ids, ttl, self.wall()))

    async def charge(
        self, id: str, subject: str, model: str, lines: Sequence[Line], spent: Spent
    ) -> bool:
        def work() -> bool:
            now = self.wall()
            added = self._execute(
                "INSERT OR IGNORE INTO charged VALUES (?, ?)", id, now + CHARGED_SECONDS
            )
            if added.rowcount:
                self._rows.charge(id, subject, model, lines, spent, now, now)
            return bool(added.rowcount)

        return await self._do(work)

    async def changes(self, version: str, after: str = "") -> Changes:
        since = int(version or 0)
        revision, _, name = after.partition(" ")

        def work() -> tuple[int, bool, list[_Row]]:
            whole = not 0 < since <= self._revision
            # All names come after "", and all revisions after 0 and "".
            start = (int(revision), name) if after else (0 if whole else since + 1, "")
            rows = self._execute(
                "SELECT name, revision, record FROM subjects WHERE (revision, name) > (?, ?) "
                "ORDER BY revision, name LIMIT ?",
                *start,
                PAGE,
            )
            return self._revision, whole, rows.fetchall()

        now, whole, rows = await self._do_long(work, READ_SECONDS)
        following = f"{rows[-1][1]} {rows[-1][0]}" if len(rows) == PAGE else ""
        return Changes(str(now), dict(map(_record, rows)), whole, following)

    async def write(self, changes: Sequence[Change], entries: Sequence[Entry]) -> str:
        return await self._do(lambda: self._write(changes, entries))

    async def correct(self, corrections: Sequence[Correction], entries: Sequence[Entry]) -> None:
        def work() -> None:
            now = self.wall()
            for key, amount, rate, until in corrections:
                if amount is None:
                    self._rows.reset(key, now)
                else:
                    self._rows.adjust(key, amount, rate, until, now)
            self._enter(entries)

        await self._do(work)

    async def counts(self, keys: Sequence[str]) -> list[Count]:
        def work() -> list[Count]:
            now = self.wall()
            self._rows.expire(now)
            return [count(self._rows.counter(key), now) for key in keys]

        return await self._do(work)

    async def reservations(self, subject: str = "") -> list[Reservation]:
        def work() -> list[Reservation]:
            self._rows.expire(self.wall())
            self._rows.flush()
            held = self._all_reservations()
            return [each for each in held if not each.expired and subject in ("", each.subject)]

        return await self._do(work)

    async def uses(self, since: int) -> dict[UseKey, Use]:
        def work() -> dict[UseKey, Use]:
            self._rows.flush()
            rows = self._execute("SELECT * FROM uses WHERE day >= ?", since)
            return {(day, subject, model): Use(*used) for day, subject, model, *used in rows}

        return await self._do(work)

    async def denials(self) -> list[Denial]:
        def work() -> list[Denial]:
            self._rows.flush()
            rows = self._execute("SELECT data FROM denials ORDER BY id DESC")
            return [msgspec.json.decode(data, type=Denial) for (data,) in rows]

        return await self._do(work)

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]:
        def work() -> list[Entry]:
            rows = self._execute(
                "SELECT data FROM audit WHERE ? IN ('', subject) ORDER BY id DESC LIMIT ?",
                subject,
                limit,
            )
            return [msgspec.json.decode(data, type=Entry) for (data,) in rows]

        return await self._do(work)

    async def verify(self) -> list[Fault]:
        def work() -> list[Fault]:
            self._rows.flush()
            rows = self._execute("SELECT key, data FROM counters")
            counters = {key: counter_of(data) for key, data in rows}
            return faults(counters, self._all_reservations())

        return await self._do(work)

    async def dump(self) -> Dump:
        def work() -> Dump:
            self._rows.expire(self.wall())
            self._rows.flush()
            subjects = self._execute("SELECT name, revision, record FROM subjects")
            records = dict(map(_record, subjects))
            counters = self._execute("SELECT key, data FROM counters")
            uses = self._execute("SELECT * FROM uses")
            audit = self._execute("SELECT data FROM audit ORDER BY id")
            denials = self._execute("SELECT data FROM denials ORDER BY id")
            return Dump(
                {name: record for name, record in records.items() if record is not None},
                {key: counter_of(data) for key, data in counters},
                self._all_reservations(),
                {(day, subject, model): Use(*used) for day, subject, model, *used in uses},
                [msgspec.json.decode(data, type=Entry) for (data,) in audit],
                [msgspec.json.decode(data, type=Denial) for (data,) in denials],
            )

        return await self._do(work)

    async def restore(self, dump: Dump) -> str:
        def work() -> str:
            kept = self._execute(
                "SELECT name, revision FROM subjects WHERE record IS NOT NULL LIMIT 1"
            )
            for name, revision in kept:
                raise Conflict(name, 0, revision)
            changes = [Change(name, 0, record.subject) for name, record in dump.records.items()]
            version = self._write(changes, [])
            self._insert_entries(dump.audit)
            rows = self._rows
            rows.counters |= dump.counters
            for key in dump.counters:
                rows.changed(key)
            rows.uses |= dump.uses
            rows.denials.extend(dump.denials)
            for reservation in dump.reservations:
                rows.keep(reservation)
            return version

        return await self._do(work)

    async def status(self) -> dict[str, str | int | float]:
        def work() -> dict[str, str | int | float]:
            self._rows.flush()
            found: dict[str, str | int | float] = {"store": "sqlite", "path": str(self._path)}
            found["version"] = str(self._revision)
            for table in ("subjects", "counters", "reservations"):
                where = " WHERE record IS NOT NULL" if table == "subjects" else ""
                (found[table],) = self._execute(f"SELECT count(*) FROM {table}{where}").fetchone()  # noqa: S608
            (pages,) = self._execute("PRAGMA page_count").fetchone()
            (page,) = self._execute("PRAGMA page_size").fetchone()
            return found | {"bytes": pages * page, "sqlite": sqlite3.sqlite_version}

        return await self._do(work)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    # On the event loop

    async def _do(self, work: Callable[[], T]) -> T:
        """What work in the thread returns. Raises StoreDown: not in time."""
        future = self._ask(work)
        loop, waiting = future.get_loop(), self._waiting
        while waiting and waiting[0][0].done():
            waiting.popleft()
        waiting.append((future, loop.time()))
        if self._watch is None:
            self._watch = loop.call_later(self._patience, self._give_up)
        return await future

    async def _do_long(self, work: Callable[[], T], seconds: float) -> T:
        """As `_do`, for work that may take so long."""
        try:
            async with asyncio.timeout(max(self._patience, seconds)):
                return await self._ask(work)
        except TimeoutError:
            raise self._late() from None

    def _ask(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if not self._thread.is_alive():
            raise StoreDown(f"{self._path} is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._work.put((work, future))
        return future

    def _late(self) -> StoreDown:
        return StoreDown(f"{self._path} did not answer in time")

    def _give_up(self) -> None:
        """Who has waited for too long is told so. One timer is cheaper than one for each."""
        self._watch = None
        loop, waiting = asyncio.get_running_loop(), self._waiting
        while waiting:
            future, since = waiting[0]
            left = since + self._patience - loop.time()
            if left > 0 and not future.done():
                self._watch = loop.call_later(left, self._give_up)
                return
            waiting.popleft()
            if not future.done():
                future.set_exception(self._late())

    # In the thread

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._work.get()]
            while len(batch) < MAX_BATCH and batch[-1] is not None:
                try:
                    batch.append(self._work.get_nowait())
                except Empty:
                    break
            ended = batch[-1] is None
            work = [each for each in batch if each is not None]
            if work:
                answers = self._commit([each for each, _ in work])
                _deliver([future for _, future in work], answers)
        self._connection.close()

    def _commit(self, batch: list[Callable[[], Any]]) -> list[Any]:
        """Do a batch in one transaction; answers are results, or exceptions."""
        answers: list[Any] = []
        try:
            self._execute("BEGIN IMMEDIATE")
            self._look()
            for work in batch:
                try:
                    answers.append(work())
                except (Conflict, QuotaError) as refusal:  # raised before anything was changed
                    answers.append(refusal)
            self._rows.flush()
            self._execute("COMMIT")
        except Exception as problem:
            down = problem
            if isinstance(problem, sqlite3.Error):
                down = StoreDown(f"{self._path}: {problem}")
            answers = [down] * len(batch)
            self._rows.forget()
            self._seen = -1
            if self._connection.in_transaction:
                self._connection.rollback()
        return answers

    def _look(self) -> None:
        """See whether somebody else wrote, and clear away at times."""
        (seen,) = self._execute("PRAGMA data_version").fetchone()
        if seen != self._seen:
            self._seen = seen
            self._rows.forget()
            query = "SELECT value FROM meta WHERE name = 'revision'"
            (self._revision,) = self._execute(query).fetchone()
        now = self.wall()
        if now >= self._clear_at:
            self._clear_at = now + CLEAR_SECONDS
            self._rows.forget()
            self._execute("DELETE FROM counters WHERE until <= ? AND open = 0", now)
            self._execute("DELETE FROM uses WHERE day < ?", now // DAY - KEPT_DAYS)
            self._execute("DELETE FROM charged WHERE until <= ?", now)

    def _write(self, changes: Sequence[Change], entries: Sequence[Entry]) -> str:
        for name, expected, _ in changes:
            query = "SELECT revision FROM subjects WHERE name = ? AND record IS NOT NULL"
            row = self._execute(query, name).fetchone()
            found = row[0] if row else 0
            if found != expected:
                raise Conflict(name, expected, found)
        self._revision += 1
        self._execute("UPDATE meta SET value = ? WHERE name = 'revision'", self._revision)
        for name, _, subject in changes:
            record = None if subject is None else msgspec.json.encode(subject).decode()
            self._execute(
                "INSERT OR REPLACE INTO subjects VALUES (?, ?, ?)", name, self._revision, record
            )
        self._enter(entries)
        return str(self._revision)

    def _enter(self, entries: Sequence[Entry]) -> None:
        self._insert_entries([entry._replace(revision=self._revision) for entry in entries])

    def _insert_entries(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            data = msgspec.json.encode(entry).decode()
            self._execute("INSERT INTO audit (subject, data) VALUES (?, ?)", entry.subject, data)
        if entries:
            newest = "(SELECT max(id) FROM audit)"
            self._execute(f"DELETE FROM audit WHERE id <= {newest} - ?", MAX_AUDIT)  # noqa: S608

    def _all_reservations(self) -> list[Reservation]:
        rows = self._execute("SELECT data FROM reservations ORDER BY expires, id")
        return [reservation_of(data) for (data,) in rows]

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self._path, self._timeout, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                for statement in SCHEMA.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise QuotaError(f"{self._path} is no quota store of this version of Warmpath")
            connection.execute("COMMIT")
        except sqlite3.Error as problem:
            raise QuotaError(
                f"cannot open {self._path} (does its directory exist?): {problem}"
            ) from None
        return connection


_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_Row = tuple[str, int, str | None]
"""Name, revision and record of a subject; None: it was removed."""


def _deliver(futures: list[asyncio.Future[Any]], answers: list[Any]) -> None:
    """Answer all who wait, in one step on their loop."""

    def deliver() -> None:
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue  # nobody waits any more
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    loop = futures[0].get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(deliver)


def _record(row: _Row) -> tuple[str, Record | None]:
    name, revision, record = row
    if record is None:
        return name, None
    return name, Record(revision, msgspec.json.decode(record, type=Subject))
