"""All that administrators wrote, at one version, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hmac import compare_digest
from typing import NamedTuple

from picker.quota.model import (
    BUCKETS,
    CALENDAR,
    UTC,
    WHATS,
    Grant,
    Limit,
    OnFailure,
    QuotaError,
    Subject,
    split,
)
from picker.quota.plan import NO_RATE, Barred, Check, Draw, Plan
from picker.quota.windows import Calendar

MAX_PLANS = 10_000  # that are kept ready
FOREVER = float("inf")


class Record(NamedTuple):
    """A subject as a store keeps it."""

    revision: int  # the store's when it was last written; what compare and set compares
    subject: Subject


class Policy:
    """The records of a store. One owner applies what changed; all others read.

    Args:
        on_failure: of limits that say nothing.
    """

    def __init__(self, on_failure: OnFailure = "share") -> None:
        self.version = ""  # of the store; empty: nothing was read yet
        self.records: dict[str, Record] = {}
        self.on_failure: OnFailure = on_failure
        self._plans: dict[tuple[str, str], Plan] = {}
        self._calendars: dict[tuple[str, str], Calendar] = {}
        self._models: dict[str, int] = {}  # how many limits name each model
        self._keys: dict[str, list[str]] = {}  # subjects, by the first half of a key's digest

    def update(self, version: str, changes: Mapping[str, Record | None]) -> None:
        """Take over records that were written, or removed, up to a version."""
        for name, record in changes.items():
            old = self.records.pop(name, None)
            if old is not None:
                self._count(name, old.subject, -1)
            if record is not None:
                self.records[name] = record
                self._count(name, record.subject, 1)
        self.version = version
        self._plans.clear()

    def replace(self, version: str, records: Mapping[str, Record]) -> None:
        """Forget all, and take over the records of another version."""
        gone: dict[str, Record | None] = dict.fromkeys(self.records.keys() - records.keys())
        self.update(version, gone | dict(records))

    def plan(self, subject: str, model: str, wall: float) -> Plan:
        """What holds for a subject's requests for a model, at a time (Unix seconds).

        A subject that cannot be named is barred.
        """
        named = model if model in self._models else ""
        plan = self._plans.get((subject, named))
        if plan is None or plan.until <= wall:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[subject, named] = self._make(subject, named, wall)
        return plan

    def ancestry(self, subject: str) -> Iterator[tuple[str, Subject]]:
        """A subject and all above it, with what holds for each."""
        name = subject
        while name:
            kind, own_name = split(name)
            found = self.records.get(name)
            default = self.records.get(f"{kind}/*") if own_name != "*" else None
            known = found.subject if found else Subject()
            if default is not None:
                known = _both(known, default.subject)
            yield name, known
            name = known.parent

    def key_subject(self, digest: str) -> str | None:
        """Whose API key has this SHA-256, in hexadecimal. Takes as long for one that is near."""
        for name in self._keys.get(digest[:32], ()):
            key = self.records[name].subject.key
            if key is not None and compare_digest(key.digest.encode(), digest.encode()):
                return name
        return None

    def children(self, subject: str) -> list[str]:
        """Records right below a subject."""
        return sorted(
            name for name, record in self.records.items() if record.subject.parent == subject
        )

    def _make(self, subject: str, model: str, wall: float) -> Plan:
        try:
            split(subject)
        except QuotaError as problem:
            return Plan(self.version, subject, (), Barred("a subject", str(problem)), FOREVER)
        barred: Barred | None = None
        until = FOREVER
        checks: list[Check] = []
        for name, known in (*self.ancestry(subject), *self._of_model(model)):
            reason = known.blocked
            if known.expires is not None:
                if known.expires <= wall:
                    reason = reason or "expired"
                else:
                    until = min(until, known.expires)
            if name.startswith("key/") and known.key is None:
                reason = reason or "unknown key"
            if reason is not None and barred is None:
                barred = Barred(name, reason)
            for limit in known.limits:
                if limit.model in ("", model):
                    grants = [
                        grant
                        for grant in known.grants
                        if (grant.limit, grant.model) == (limit.name, limit.model)
                        and grant.expires > wall
                    ]
                    until = min([until, *(grant.expires for grant in grants)])
                    checks.append(self._check(name, limit, grants))
        return Plan(self.version, subject, tuple(checks), barred, until)

    def _of_model(self, model: str) -> Iterable[tuple[str, Subject]]:
        record = self.records.get(f"model/{model}") if model else None
        return [] if record is None else [(f"model/{model}", record.subject)]

    def _check(self, subject: str, limit: Limit, grants: list[Grant]) -> Check:
        calendar = None
        rate = NO_RATE
        if limit.window in CALENDAR:
            calendar = self._calendar(limit)
        elif limit.window:
            rate = limit.amount / BUCKETS[limit.window]
        return Check(
            key=counter_key(subject, limit),
            what=WHATS.index(limit.what),
            capacity=limit.amount,
            rate=rate,
            calendar=calendar,
            grants=tuple(
                Draw(grant_key(subject, grant), grant.amount, grant.expires)
                for grant in sorted(grants, key=lambda grant: grant.expires)
            ),
            shadow=limit.shadow,
            on_failure=limit.on_failure or self.on_failure,
            subject=subject,
            limit=limit,
        )

    def _calendar(self, limit: Limit) -> Calendar:
        key = limit.window, limit.zone or UTC
        calendar = self._calendars.get(key)
        if calendar is None:
            calendar = self._calendars[key] = Calendar(*key)
        return calendar

    def _count(self, name: str, subject: Subject, step: int) -> None:
        """Keep the models that are named, and the keys, up to date."""
        kind, own_name = split(name)
        models = [limit.model for limit in subject.limits if limit.model]
        for model in [*models, own_name] if kind == "model" else models:
            self._models[model] = self._models.get(model, 0) + step
            if not self._models[model]:
                del self._models[model]
        if subject.key is not None:
            names = self._keys.setdefault(subject.key.digest[:32], [])
            if step > 0:
                names.append(name)
            else:
                names.remove(name)
            if not names:
                del self._keys[subject.key.digest[:32]]


def _both(own: Subject, default: Subject) -> Subject:
    """What holds for a subject that has a record of its own, and one for all of its kind."""
    named = {(limit.model, limit.name) for limit in own.limits}
    ids = {grant.id for grant in own.grants}
    limits = (limit for limit in default.limits if (limit.model, limit.name) not in named)
    grants = (grant for grant in default.grants if grant.id not in ids)
    ends = [end for end in (own.expires, default.expires) if end is not None]
    return Subject(
        parent=own.parent or default.parent,
        limits=(*own.limits, *limits),
        grants=(*own.grants, *grants),
        blocked=default.blocked if own.blocked is None else own.blocked,
        expires=min(ends, default=None),
        key=own.key,
    )


def counter_key(subject: str, limit: Limit) -> str:
    """Of a limit's counter. Names are printable, so a tab parts them safely."""
    return f"{subject}\t{limit.model}\t{limit.name}"


def grant_key(subject: str, grant: Grant) -> str:
    return f"{subject}\t{grant.model}\t{grant.limit}\tgrant\t{grant.id}"
