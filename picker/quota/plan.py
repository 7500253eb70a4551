"""What a request meets: the limits of its subject, of all above it and of its model, made ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from picker.quota.model import WHATS, Limit, OnFailure
from picker.quota.windows import Calendar

REQUESTS, INPUT, OUTPUT, TOTAL, CONCURRENCY = range(len(WHATS))

MAX_ALL = 10**18  # more than any reservation holds
DAY = 86400  # seconds that a calendar window's counter outlives it

NO_RATE = -1.0  # of what is no bucket

Amounts = tuple[int, int, int, int, int]
"""How much of each of WHATS, in its order."""

NOTHING: Amounts = (0, 0, 0, 0, 0)
ALL: Amounts = (MAX_ALL,) * 5  # that a reservation holds


class Spent(NamedTuple):
    """What a request used in the end."""

    amounts: Amounts  # as limits count it; no concurrency
    prompt_tokens: int = 0  # as the engine counted, for the books
    cached_tokens: int = 0
    completion_tokens: int = 0


FREE = Spent(NOTHING)  # nothing was served


class Draw(NamedTuple):
    """A grant as a request meets it."""

    key: str  # of its counter
    amount: int
    expires: float  # Unix seconds


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One limit as a request meets it."""

    key: str  # of its counter; a calendar window's start is added
    what: int  # index in WHATS
    capacity: int
    rate: float  # that a bucket leaks, of its unit in a second; NO_RATE for others
    calendar: Calendar | None
    grants: tuple[Draw, ...]  # those that expire first come first
    shadow: bool
    on_failure: OnFailure  # never empty
    subject: str  # whose limit it is
    limit: Limit


class Barred(NamedTuple):
    """A subject that takes no requests at all."""

    subject: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that holds for the requests of one subject for one model, at one version."""

    version: str  # of the policy that it was made from
    subject: str
    checks: tuple[Check, ...]
    barred: Barred | None
    until: float  # Unix seconds: then something expires, and it must be made again


class Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a reservation holds of one counter. A limit's line is followed by those of its draws."""

    key: str
    amount: int
    what: int
    seq: int  # the bucket's charges up to this one, see picker.quota.bucket
    draws: bool  # on a grant, for the limit before it
    rate: float  # of the bucket; NO_RATE for others
    until: float  # Unix seconds that the counter is kept at least; 0 for buckets, concurrency


Standing = tuple[float, float]
"""What is used of a limit, with what is reserved; seconds until nothing is if no more comes."""


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """A request may pass, and its reservation is made."""

    standings: tuple[Standing, ...]  # for each check, with this request
    shadowed: tuple[int, ...] = ()  # checks in shadow that would have refused it


class Denied(msgspec.Struct, frozen=True, array_like=True):
    """A request may not pass; nothing was charged anywhere."""

    check: int  # which one bound: of those that refuse, the one that takes longest
    wait: float | None  # seconds until it would pass, if nothing else came; None: never
    amount: int  # that was asked for
    standings: tuple[Standing, ...]


def line_of(check: Check, wall: float) -> Line:
    """A limit's counter at a time, holding nothing."""
    if check.calendar is None:
        return Line(check.key, 0, check.what, 0, False, check.rate, 0.0)
    start, end = check.calendar.span(wall)
    return Line(f"{check.key}\t{start}", 0, check.what, 0, False, check.rate, end + DAY)
