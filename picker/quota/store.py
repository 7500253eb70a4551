"""What a store does, whichever it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from picker.quota.bucket import Counter
from picker.quota.ledger import Denial, Reservation, Use, UseKey
from picker.quota.model import Subject
from picker.quota.plan import NO_RATE, Amounts, Denied, Granted, Line, Plan, Spent
from picker.quota.policy import Record

MAX_AUDIT = 100_000  # entries that a store keeps; the oldest go first
KEPT_DAYS = 400  # of the books
PAGE = 200  # records that are read at once, and decoded: about a millisecond
SETTLED_SECONDS = 600.0  # that an id is remembered at least which was settled
CHARGED_SECONDS = 3600.0  # that an id is remembered which was charged without a reservation


class StoreDown(Exception):
    """The store cannot be reached, or did not answer in time. What was asked may have happened."""


class Conflict(Exception):
    """A record is not what its writer had read."""

    def __init__(self, subject: str, expected: int, found: int) -> None:
        super().__init__(
            f"{subject} was changed by somebody else: it is at revision {found}, not {expected}"
        )
        self.subject = subject
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class Stale:
    """The plan was made of a policy that is no longer the store's: read it and ask again."""


End = tuple[str, Spent]
"""The id of a reservation, and what was used."""


class Change(NamedTuple):
    """What a record is to become."""

    name: str
    expected: int  # the revision it must have; 0: it must not be there
    subject: Subject | None  # None: it goes


class Entry(NamedTuple):
    """One line of the audit log."""

    at: float  # Unix seconds
    actor: str
    action: str  # `set`, `block`, `grant`, ...
    subject: str
    before: str  # JSON of the record or the counter; empty: nothing
    after: str
    reason: str = ""
    request_id: str = ""
    revision: int = 0  # of the store, with this change


class Count(NamedTuple):
    """A counter at the time it was read."""

    value: int  # settled + open; what calendar windows and concurrency use up
    settled: int
    level: float | None  # of a bucket; None: it is none


class Correction(NamedTuple):
    """A change of a counter by hand."""

    key: str
    amount: int | None  # to add; None: reset
    rate: float = NO_RATE  # as Line has them, for a counter that is new
    until: float = 0.0


class Changes(NamedTuple):
    """A page of the records that were written after a version, in the order of their revisions."""

    version: str  # that the last page leads to
    records: Mapping[str, Record | None]  # None: removed
    whole: bool  # all pages are all there is: records that are not named are gone
    after: str = ""  # where the next page begins; empty: this is the last


class Dump(NamedTuple):
    """All that a store holds, to be taken to another; there revisions begin anew."""

    records: Mapping[str, Record]
    counters: Mapping[str, Counter]
    reservations: Sequence[Reservation]
    uses: Mapping[UseKey, Use]
    audit: Sequence[Entry]  # oldest first
    denials: Sequence[Denial] = ()  # oldest first


class Fault(NamedTuple):
    """A counter that does not balance: value != settled + open."""

    key: str
    value: int
    settled: int
    open: int  # summed over the reservations


class Store(Protocol):
    """Counters, reservations, records, audit and books. Every method is one atomic step.

    All raise StoreDown.
    """

    def wall(self) -> float:
        """The store's time, in Unix seconds, as far as it is known here."""
        ...

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | Stale:
        """Charge all limits of a plan, or none. `id` was never used before."""
        ...

    async def settle(self, id: str, spent: Spent) -> bool | None:
        """Replace a reservation by what was used.

        False when that was done before; None when the store may have lost the reservation, so that
        `charge` is in place.
        """
        ...

    async def settle_all(self, ends: Sequence[End]) -> list[bool | None]:
        """As `settle`, of several at once; each by itself."""
        ...

    async def shrink(self, id: str, amounts: Amounts, ttl: float) -> bool:
        """Let a reservation hold less, for a new time to live. False when it is gone."""
        ...

    async def renew(self, ids: Sequence[str], ttl: float) -> None:
        """Give reservations a new time to live, those that are open still."""
        ...

    async def charge(
        self, id: str, subject: str, model: str, lines: Sequence[Line], spent: Spent
    ) -> bool:
        """Charge what was used without a reservation here, once for each id.

        The lines tell which counters; their amounts mean nothing.
        """
        ...

    async def changes(self, version: str, after: str = "") -> Changes:
        """What was written since a version; all there is when it is not of this store's past.

        With `after` of a page it goes on there, and `version` is that page's: `whole` then says
        that what was read until now is of another past.
        """
        ...

    async def write(self, changes: Sequence[Change], entries: Sequence[Entry]) -> str:
        """Write records with their audit entries, all or none; returns the new version.

        Raises:
            Conflict: a record is not at the revision that was expected.
        """
        ...

    async def correct(self, corrections: Sequence[Correction], entries: Sequence[Entry]) -> None:
        """Change counters by hand, with their audit entries, all or none."""
        ...

    async def counts(self, keys: Sequence[str]) -> list[Count]:
        """Counters as they stand now; those that never were stand at zero."""
        ...

    async def reservations(self, subject: str = "") -> list[Reservation]:
        """Those that are open, of one subject or of all, oldest first."""
        ...

    async def uses(self, since: int) -> dict[UseKey, Use]:
        """The books from a day on (days since 1970, UTC)."""
        ...

    async def denials(self) -> list[Denial]:
        """The last ones, newest first."""
        ...

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]:
        """The last entries, newest first, about one subject or all."""
        ...

    async def verify(self) -> list[Fault]:
        """Counters that do not balance. None, unless the store or its user is broken."""
        ...

    async def dump(self) -> Dump:
        """All there is. Nothing else should use the store meanwhile."""
        ...

    async def restore(self, dump: Dump) -> str:
        """Take over all of another store; returns the version.

        Raises:
            Conflict: there are records already.
        """
        ...

    async def status(self) -> dict[str, str | int | float]:
        """What an operator would like to know, by name."""
        ...

    async def close(self) -> None: ...


def count(counter: Counter | None, now: float) -> Count:
    """A counter, read at a time."""
    if counter is None:
        return Count(0, 0, None)
    if counter.rate < 0:
        return Count(counter.value, counter.settled, None)
    counter.leak(now)
    return Count(counter.value, counter.settled, counter.level)


def faults(counters: Mapping[str, Counter], reservations: Iterable[Reservation]) -> list[Fault]:
    """Counters whose value is not what was settled plus what reservations hold."""
    held: dict[str, int] = {}
    for reservation in reservations:
        for line in reservation.lines:
            held[line.key] = held.get(line.key, 0) + line.amount
    found = []
    for key in sorted(counters.keys() | held.keys()):
        counter = counters.get(key) or Counter()
        if counter.open != held.get(key, 0):
            found.append(Fault(key, counter.value, counter.settled, held.get(key, 0)))
    return found
