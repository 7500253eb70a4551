"""The store of one picker alone: everything is gone when it ends."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from picker.quota.ledger import Denial, Ledger, Reservation, Use, UseKey
from picker.quota.plan import DAY, Amounts, Denied, Granted, Line, Plan, Spent
from picker.quota.policy import Record
from picker.quota.store import (
    CHARGED_SECONDS,
    KEPT_DAYS,
    MAX_AUDIT,
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
    count,
    faults,
)

MIN_COUNTERS = 1024  # below that nothing is cleared away


class MemoryStore:
    """A ledger and a clock.

    Args:
        wall: Unix seconds, for the calendar.
        steady: seconds from any start that never jump, for buckets and expiry.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wall = wall
        self._steady = steady
        self._offset = wall() - steady()  # so that all times look alike
        self._ledger = Ledger()
        self._revision = 0
        self._version = "0"
        self._records: dict[str, Record] = {}
        self._removed: dict[str, int] = {}  # at which revision
        self._audit: deque[Entry] = deque(maxlen=MAX_AUDIT)
        self._charged: OrderedDict[str, float] = OrderedDict()  # ids, and when to forget them
        self._clear_at = MIN_COUNTERS

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | Stale:
        if plan.version != self._version:
            return Stale()
        now = self._now()
        if len(self._ledger.counters) > self._clear_at:
            self._clear(now)
        return self._ledger.reserve(id, plan, amounts, model, ttl, now, self.wall())

    async def settle(self, id: str, spent: Spent) -> bool:
        return self.settle_now(id, spent)

    async def settle_all(self, ends: Sequence[End]) -> list[bool | None]:
        return [self.settle_now(id, spent) for id, spent in ends]

    def settle_now(self, id: str, spent: Spent) -> bool:
        """As `settle`, for who cannot wait."""
        return self._ledger.settle(id, spent, self._now(), self.wall())

    async def shrink(self, id: str, amounts: Amounts, ttl: float) -> bool:
        return self._ledger.shrink(id, amounts, ttl, self._now())

    async def renew(self, ids: Sequence[str], ttl: float) -> None:
        self._ledger.renew(ids, ttl, self._now())

    async def charge(
        self, id: str, subject: str, model: str, lines: Sequence[Line], spent: Spent
    ) -> bool:
        now = self._now()
        while self._charged and next(iter(self._charged.values())) <= now:
            self._charged.popitem(last=False)
        if id in self._charged:
            return False
        self._charged[id] = now + CHARGED_SECONDS
        self._ledger.charge(id, subject, model, lines, spent, now, self.wall())
        return True

    async def changes(self, version: str, after: str = "") -> Changes:
        since = int(version or 0)
        records: dict[str, Record | None] = {
            name: record for name, record in self._records.items() if record.revision > since
        }
        records |= {name: None for name, revision in self._removed.items() if revision > since}
        return Changes(self._version, records, whole=not since)

    async def write(self, changes: Sequence[Change], entries: Sequence[Entry]) -> str:
        for name, expected, _ in changes:
            found = self._records[name].revision if name in self._records else 0
            if found != expected:
                raise Conflict(name, expected, found)
        self._revision += 1
        self._version = str(self._revision)
        for name, _, subject in changes:
            if subject is None:
                self._records.pop(name, None)
                self._removed[name] = self._revision
            else:
                self._removed.pop(name, None)
                self._records[name] = Record(self._revision, subject)
        self._enter(entries)
        return self._version

    async def correct(self, corrections: Sequence[Correction], entries: Sequence[Entry]) -> None:
        now = self._now()
        for key, amount, rate, until in corrections:
            if amount is None:
                self._ledger.reset(key, now)
            else:
                self._ledger.adjust(key, amount, rate, until, now)
        self._enter(entries)

    async def counts(self, keys: Sequence[str]) -> list[Count]:
        now = self._now()
        self._ledger.expire(now)
        return [count(self._ledger.counters.get(key), now) for key in keys]

    async def reservations(self, subject: str = "") -> list[Reservation]:
        self._ledger.expire(self._now())
        return [
            reservation
            for reservation in self._ledger.reservations.values()
            if not reservation.expired and subject in ("", reservation.subject)
        ]

    async def uses(self, since: int) -> dict[UseKey, Use]:
        return {key: use for key, use in self._ledger.uses.items() if key[0] >= since}

    async def denials(self) -> list[Denial]:
        return list(reversed(self._ledger.denials))

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]:
        found = [entry for entry in reversed(self._audit) if subject in ("", entry.subject)]
        return found[:limit]

    async def verify(self) -> list[Fault]:
        return faults(self._ledger.counters, self._ledger.reservations.values())

    async def dump(self) -> Dump:
        ledger = self._ledger
        ledger.expire(self._now())
        held = list(ledger.reservations.values())
        audit, denials = list(self._audit), list(ledger.denials)
        return Dump(self._records, ledger.counters, held, ledger.uses, audit, denials)

    async def restore(self, dump: Dump) -> str:
        if self._records:
            name, record = next(iter(self._records.items()))
            raise Conflict(name, 0, record.revision)
        self._ledger.counters |= dump.counters
        self._ledger.uses |= dump.uses
        self._ledger.denials.extend(dump.denials)
        for reservation in sorted(dump.reservations, key=lambda held: held.expires):
            self._ledger.keep(reservation)
        self._audit.extend(dump.audit)
        changes = [Change(name, 0, record.subject) for name, record in dump.records.items()]
        return await self.write(changes, [])

    async def status(self) -> dict[str, str | int | float]:
        return {
            "store": "memory",
            "version": self._version,
            "subjects": len(self._records),
            "counters": len(self._ledger.counters),
            "reservations": len(self._ledger.reservations),
        }

    async def close(self) -> None:
        """Nothing is open."""

    @property
    def size(self) -> int:
        """Counters and lines of the books."""
        return len(self._ledger.counters) + len(self._ledger.uses)

    def _now(self) -> float:
        return self._offset + self._steady()

    def _enter(self, entries: Sequence[Entry]) -> None:
        self._audit.extend(entry._replace(revision=self._revision) for entry in entries)

    def _clear(self, now: float) -> None:
        """Clear away counters that stand where a new one does, and old pages of the books.

        Done when they are twice as many as were left, so that it costs little for each request.
        """
        ledger = self._ledger
        counters = ledger.counters
        idle = [key for key, found in counters.items() if found.until <= now and not found.open]
        for key in idle:
            del counters[key]
        self._clear_at = max(MIN_COUNTERS, 2 * len(counters))
        first = int(self.wall() // DAY) - KEPT_DAYS
        for page in [page for page in ledger.uses if page[0] < first]:
            del ledger.uses[page]
