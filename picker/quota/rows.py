"""A ledger over the rows of an SQLite database, read when needed and written a batch at a time.

What was read is kept while nobody else writes. Every change is gathered, and `flush` writes it in
few statements: each gives up Python's lock and has to get it back, so many rows go in together.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain

import msgspec

from picker.quota.bucket import Counter, Low
from picker.quota.ledger import NUM_DENIALS, Ledger, Reservation

SCHEMA_VERSION = 1
MAX_CACHED = 100_000  # counters and reservations, before all are forgotten

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('revision', 0);
CREATE TABLE subjects (
    name TEXT PRIMARY KEY, revision INTEGER NOT NULL, record TEXT  -- NULL: removed
) WITHOUT ROWID;
CREATE INDEX subjects_revision ON subjects (revision);
CREATE TABLE counters (
    key TEXT PRIMARY KEY, until REAL NOT NULL, open INTEGER NOT NULL, data TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE reservations (
    id TEXT PRIMARY KEY, expires REAL NOT NULL, data TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX reservations_expires ON reservations (expires);
CREATE TABLE charged (id TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE uses (
    day INTEGER NOT NULL, subject TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL,
    completion INTEGER NOT NULL, denied INTEGER NOT NULL,
    PRIMARY KEY (day, subject, model)
) WITHOUT ROWID;
CREATE TABLE denials (id INTEGER PRIMARY KEY AUTOINCREMENT, data TEXT NOT NULL);
CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, subject TEXT NOT NULL, data TEXT NOT NULL
);
CREATE INDEX audit_subject ON audit (subject, id);
"""

_KEEP_COUNTERS = "INSERT OR REPLACE INTO counters VALUES {}", 4
_KEEP_RESERVATIONS = "INSERT OR REPLACE INTO reservations VALUES {}", 3
_DROP_RESERVATIONS = "DELETE FROM reservations WHERE id IN (VALUES {})", 1
_ADD_USES = (
    "INSERT INTO uses VALUES {} ON CONFLICT DO UPDATE SET "  # noqa: S608  # of names below
    + ", ".join(
        f"{name} = {name} + excluded.{name}"
        for name in ("requests", "prompt", "cached", "completion", "denied")
    ),
    8,
)
_ADD_DENIALS = "INSERT INTO denials (data) VALUES {}", 1
_TRIM_DENIALS = "DELETE FROM denials WHERE id <= (SELECT max(id) FROM denials) - ?"
_AT_ONCE = (256, 64, 16, 4, 1)  # rows of one statement: few sizes, which stay prepared

_COUNTER = msgspec.json.Decoder(tuple[int, int, float, float, float, int, list[Low], float])
_RESERVATION = msgspec.json.Decoder(Reservation)


class Rows(Ledger):
    """A ledger whose counters and reservations are a database's. Use within a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__()
        self._connection = connection
        self._changed: set[str] = set()
        self._kept: set[str] = set()
        self._dropped: set[str] = set()
        self._next_due = -math.inf  # nobody knows what is due

    def forget(self) -> None:
        """Read all anew: somebody else wrote, or what was gathered is not to be written."""
        self.counters.clear()
        self.reservations.clear()
        self.uses.clear()
        self.denials.clear()
        self._changed.clear()
        self._kept.clear()
        self._dropped.clear()
        self._next_due = -math.inf

    def flush(self) -> None:
        """Write what was gathered. Until the commit it may still be rolled back."""
        if self._changed:
            rows = [_counter_row(key, self.counters[key]) for key in self._changed]
            self._write(_KEEP_COUNTERS, rows)
            self._changed.clear()
        if self._kept:
            kept = [self.reservations[id] for id in self._kept]
            self._write(_KEEP_RESERVATIONS, [(each.id, each.expires, _text(each)) for each in kept])
            self._kept.clear()
        if self._dropped:
            self._write(_DROP_RESERVATIONS, [(id,) for id in self._dropped])
            self._dropped.clear()
        if self.uses:
            uses = [
                (
                    *key,
                    use.requests,
                    use.prompt_tokens,
                    use.cached_tokens,
                    use.completion_tokens,
                    use.denied,
                )
                for key, use in self.uses.items()
            ]
            self._write(_ADD_USES, uses)
            self.uses.clear()
        if self.denials:
            self._write(_ADD_DENIALS, [(_text(denial),) for denial in self.denials])
            self._connection.execute(_TRIM_DENIALS, (NUM_DENIALS,))
            self.denials.clear()
        if len(self.counters) + len(self.reservations) > MAX_CACHED:
            self.forget()

    def counter(self, key: str) -> Counter:
        counter = self.counters.get(key)
        if counter is None:
            query = "SELECT data FROM counters WHERE key = ?"
            row = self._connection.execute(query, (key,)).fetchone()
            counter = self.counters[key] = Counter() if row is None else counter_of(row[0])
        return counter

    def reservation(self, id: str) -> Reservation | None:
        found = self.reservations.get(id)
        if found is None and id not in self._dropped:
            query = "SELECT data FROM reservations WHERE id = ?"
            row = self._connection.execute(query, (id,)).fetchone()
            if row is not None:
                found = self.reservations[id] = reservation_of(row[0])
        return found

    def changed(self, key: str) -> None:
        self._changed.add(key)

    def keep(self, reservation: Reservation) -> None:
        self.reservations[reservation.id] = reservation
        self._kept.add(reservation.id)
        self._dropped.discard(reservation.id)
        self._next_due = min(self._next_due, reservation.expires)

    def drop(self, reservation: Reservation) -> None:
        id = reservation.id
        self.reservations.pop(id, None)
        self._kept.discard(id)
        self._dropped.add(id)

    def due(self, now: float) -> list[Reservation]:
        query = "SELECT id FROM reservations WHERE expires <= ? ORDER BY expires"
        ids = [id for (id,) in self._connection.execute(query, (now,))]
        first = "SELECT min(expires) FROM reservations WHERE expires > ?"
        (least,) = self._connection.execute(first, (now,)).fetchone()
        held = [self.reservations[id].expires for id in self._kept]
        self._next_due = min([math.inf if least is None else least, *held])
        found = (self.reservation(id) for id in ids)
        return [each for each in found if each is not None and each.expires <= now]

    def _write(self, statement: tuple[str, int], rows: Sequence[tuple[object, ...]]) -> None:
        """Write rows with a statement, `{}` in it, that takes so many columns of each."""
        start = 0
        for size in _AT_ONCE:
            while len(rows) - start >= size:
                values = chain.from_iterable(rows[start : start + size])
                self._connection.execute(_prepared(*statement, size), tuple(values))
                start += size


@cache
def _prepared(statement: str, columns: int, rows: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return statement.format(", ".join([row] * rows))


def _text(thing: object) -> str:
    return msgspec.json.encode(thing).decode()


def _counter_row(key: str, counter: Counter) -> tuple[str, float, int, str]:
    data = [
        counter.value,
        counter.settled,
        counter.rate,
        counter.level,
        counter.at,
        counter.seq,
        counter.lows,
        counter.until,
    ]
    return key, counter.until, counter.open, _text(data)


def counter_of(data: str | bytes) -> Counter:
    """A counter from its row."""
    return Counter(*_COUNTER.decode(data))


def reservation_of(data: str | bytes) -> Reservation:
    """A reservation from its row."""
    return _RESERVATION.decode(data)
