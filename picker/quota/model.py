"""What administrators write: subjects, their limits, grants and keys, and how they are spelt.

    org/acme  >  team/search  >  tenant/alice  >  key/3f9c          each with its parent
    total-tokens=100k/minute   output-tokens=5M/month   concurrency=64

Any subject may have limits, for all models or for one. `model/NAME` limits all who use a model,
and what `tenant/*` (any kind but a model) says holds for every tenant; a limit of a tenant's own
takes the place of the one of that name.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal

import msgspec

KINDS = ("org", "team", "tenant", "key")  # from the top down
WHATS = ("requests", "input-tokens", "output-tokens", "total-tokens", "concurrency")
BUCKETS = {"second": 1, "minute": 60, "hour": 3600}  # seconds; windows that refill all the time
CALENDAR = ("day", "month")  # windows that begin anew at midnight
WINDOWS = (*BUCKETS, *CALENDAR)
UTC = "UTC"
FAILURES = ("share", "open", "closed")

MAX_AMOUNT = 10**15  # exact as a float, with room for sums
MAX_TIME = 253_402_300_799.0  # Unix seconds; the end of what calendars here know
MAX_NAME = 200  # characters of a subject's name, of a model
MAX_TEXT = 500  # characters of a reason
MAX_LIMITS = 32  # of one subject, and as many grants

OnFailure = Literal["", "share", "open", "closed"]


class Limit(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """At most `amount` of `what` in each window.

    Windows of seconds, minutes and hours are buckets (GCRA, ITU-T I.371): `amount` at once, and
    then as much as flows back, `amount` in each window. Days and months are the calendar's.
    """

    what: str  # of WHATS
    amount: int
    window: str = ""  # of WINDOWS; empty for concurrency
    model: str = ""  # empty: requests for any model
    zone: str = ""  # IANA time zone of a calendar window; empty: UTC
    shadow: bool = False  # counts, and tells what it would refuse, but refuses nothing
    on_failure: OnFailure = ""  # while the store is down; empty: the configuration's

    @property
    def name(self) -> str:
        """`total-tokens/minute`: one subject has one limit of a name for each model."""
        return f"{self.what}/{self.window}" if self.window else self.what

    def __str__(self) -> str:
        return f"{self.what}={shown_quantity(self.amount)}" + (
            f"/{self.window}" if self.window else ""
        )


class Grant(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """So much more than a limit, once, until it expires. It is drawn on when the limit is met."""

    id: str
    limit: str  # its name, `total-tokens/day`
    amount: int
    expires: float  # Unix seconds
    model: str = ""  # as the limit has it
    reason: str = ""


class Key(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """An API key as it is kept: not the key, only its hash."""

    digest: str  # SHA-256 in hexadecimal
    hint: str  # its last characters, for people to tell keys apart
    created: float  # Unix seconds


class Subject(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """What is known of `tenant/alice`."""

    parent: str = ""
    limits: tuple[Limit, ...] = ()
    grants: tuple[Grant, ...] = ()
    blocked: str | None = None  # why; all requests are refused
    expires: float | None = None  # Unix seconds; refused from then on
    key: Key | None = None  # of a key/ID

    @property
    def empty(self) -> bool:
        """Whether it says nothing, so that it need not be kept."""
        return self == Subject()


class QuotaError(ValueError):
    """Something that cannot be: a name, a limit, a grant. The message says what to write."""


class NotFound(QuotaError):
    """Something that is named, and is not there."""


def check(name: str, subject: Subject) -> None:
    """Whether a subject can be as it is written.

    Raises:
        QuotaError: naming what is wrong.
    """
    kind, own_name = split(name)
    if name == "model/*":
        raise QuotaError("model/* names no model: set a limit for all of them on who asks")
    if subject.parent:
        parent, parent_name = split(subject.parent)
        if kind == "model":
            raise QuotaError(f"{name} has no place in the hierarchy, so no parent")
        if KINDS.index(parent) >= KINDS.index(kind) if parent in KINDS else True:
            above = ", ".join(KINDS[: KINDS.index(kind)]) or "nothing"
            raise QuotaError(f"{subject.parent} cannot be above {name}: only {above} can")
        if parent_name == "*":
            raise QuotaError(f"{subject.parent} stands for many, and is nobody's parent")
    if subject.key is not None and (kind != "key" or own_name == "*"):
        raise QuotaError(f"{name} cannot have an API key, only key/ID can")
    seen = set()
    for limit in subject.limits:
        check_limit(limit)
        if kind == "model" and limit.model:
            raise QuotaError(f"{name} is of one model already")
        if (limit.model, limit.name) in seen:
            raise QuotaError(f"{name} has two limits named {limit.name}")
        seen.add((limit.model, limit.name))
    for grant in subject.grants:
        if (grant.model, grant.limit) not in seen:
            raise QuotaError(f"{name} has no limit {grant.limit!r} to grant more of")
        _check_amount(grant.amount)
        _check_time(grant.expires)
        check_text(grant.id)
        check_text(grant.reason)
    check_text(subject.blocked or "")
    for time in (subject.expires, subject.key.created if subject.key else None):
        if time is not None:
            _check_time(time)
    if len({grant.id for grant in subject.grants}) < len(subject.grants):
        raise QuotaError(f"{name} has two grants of one id")
    if max(len(subject.limits), len(subject.grants)) > MAX_LIMITS:
        raise QuotaError(f"{name} has more than {MAX_LIMITS} limits or grants")


def check_limit(limit: Limit) -> None:
    """Whether a limit can be.

    Raises:
        QuotaError: naming what is wrong.
    """
    if limit.what not in WHATS:
        raise QuotaError(f"{limit.what!r} cannot be limited; {_nearest(limit.what, WHATS)}")
    if limit.what == "concurrency":
        if limit.window:
            raise QuotaError("concurrency has no window: write concurrency=64")
    elif limit.window not in WINDOWS:
        raise QuotaError(f"{limit.window!r} is no window; {_nearest(limit.window, WINDOWS)}")
    if limit.zone and limit.window not in CALENDAR:
        raise QuotaError(f"{limit.name} has no use for a time zone; only {', '.join(CALENDAR)}")
    if limit.on_failure and limit.on_failure not in FAILURES:
        raise QuotaError(f"{limit.on_failure!r}: on failure is {', '.join(FAILURES)}")
    check_model(limit.model)
    _check_amount(limit.amount)


def parse_limit(text: str, model: str = "") -> Limit:
    """`total-tokens=100k/minute` or `concurrency=64`.

    Raises:
        QuotaError: it is none.
    """
    what, equals, rest = text.partition("=")
    amount, _, window = rest.partition("/")
    if not equals or not amount:
        raise QuotaError(f"{text!r} is no limit: write total-tokens=100k/minute")
    limit = Limit(what.strip(), quantity(amount), window.strip(), model)
    check_limit(limit)
    return limit


def split(name: str) -> tuple[str, str]:
    """`tenant/alice` as its kind and its own name, which may hold slashes.

    Raises:
        QuotaError: it names no subject.
    """
    kind, slash, own_name = name.partition("/")
    if kind not in KINDS and kind != "model":
        raise QuotaError(f"{name!r} is no subject: write org/, team/, tenant/, key/ or model/NAME")
    if not slash or not fit_name(own_name):
        raise QuotaError(
            f"{name!r}: a name has 1 to {MAX_NAME} printable characters, no space at its ends"
        )
    return kind, own_name


@lru_cache(maxsize=1024)  # asked about each request's model
def fit_name(name: str) -> bool:
    """Whether it can be a subject's or a model's own name."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def check_model(model: str) -> None:
    """Raises QuotaError for what cannot be a model's name; empty means any."""
    if model == "*":
        raise QuotaError("'*' names no model: leave it out for all")
    if model and not fit_name(model):
        raise QuotaError(f"{model!r} is no model's name: 1 to {MAX_NAME} printable characters")


_SCALES: dict[str, int] = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def quantity(text: str) -> int:
    """`10k`, `1.5M`, `2G` or a whole number.

    Raises:
        QuotaError: it is none, or not whole.
    """
    match = re.fullmatch(r"([0-9]{1,16})(?:\.([0-9]{1,12}))?([kKMGT]?)", text.strip())
    if match is None:
        raise QuotaError(f"{text!r} is no quantity: write 500, 10k, 1.5M or 2G")
    digits = match[2] or ""
    scaled = int(match[1] + digits) * _SCALES[match[3].replace("K", "k")]
    amount, rest = divmod(scaled, int(10 ** len(digits)))
    if rest:
        raise QuotaError(f"{text!r} is no whole number")
    _check_amount(amount)
    return amount


def shown_quantity(amount: int) -> str:
    """The shortest text that `quantity` reads as the same number."""
    for suffix in ("T", "G", "M", "k"):
        scale = _SCALES[suffix]
        if abs(amount) >= scale and amount % (scale // 1000) == 0:
            whole, part = divmod(abs(amount) * 1000 // scale, 1000)
            fraction = f".{part:03}".rstrip("0").rstrip(".")
            return f"{'-' if amount < 0 else ''}{whole}{fraction}{suffix}"
    return str(amount)


def check_text(text: str) -> None:
    """Raises QuotaError for a reason, or an id, that is too long to keep."""
    if len(text) > MAX_TEXT:
        raise QuotaError(f"{text[:20]!r}... is too long: at most {MAX_TEXT} characters")


def _check_amount(amount: int) -> None:
    if not 0 <= amount <= MAX_AMOUNT:
        raise QuotaError(f"{amount} is out of range: 0 to {shown_quantity(MAX_AMOUNT)}")


def _check_time(seconds: float) -> None:
    if not 0 <= seconds <= MAX_TIME:
        raise QuotaError(f"{seconds:g} is no time: Unix seconds, until the year 9999")


def _nearest(word: str, words: tuple[str, ...]) -> str:
    close = get_close_matches(word, words, 1, 0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(words)}"
