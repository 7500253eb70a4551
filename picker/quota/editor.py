"""Every change that an administrator can make, each written with its audit entry.

A change reads a record, makes another of it and writes that only over what was read. When
somebody else was faster it is made anew, unless the caller named the revision that it means.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from picker.quota.keys import new_key
from picker.quota.model import (
    CALENDAR,
    UTC,
    Grant,
    Limit,
    NotFound,
    OnFailure,
    QuotaError,
    Subject,
    check,
    check_limit,
    check_text,
    split,
)
from picker.quota.plan import FREE, line_of
from picker.quota.policy import Policy
from picker.quota.reader import Reader
from picker.quota.store import Change, Conflict, Correction, Count, Entry, Store
from picker.quota.unhurried import unhurried
from picker.quota.windows import load_zone

REVOKED = "revoked"  # why a revoked key is blocked
KEEPS = {"zone", "shadow", "on_failure"}  # of a limit, when its amount is changed
MAX_TRIES = 10  # to write over somebody else's changes


class Written(NamedTuple):
    """A record before and after a change."""

    name: str
    revision: int  # that it has now; 0: nothing was written
    before: Subject | None
    after: Subject | None

    @property
    def changed(self) -> bool:
        return self.before != self.after


class Corrected(NamedTuple):
    """A counter before and after a change by hand."""

    subject: str
    limit: Limit
    before: Count
    after: Count


class Pair(NamedTuple):
    """A record before and after a change."""

    before: Subject | None
    after: Subject | None


@dataclass(frozen=True, slots=True)
class Diff:
    """What a document would change, by name."""

    added: dict[str, Pair] = field(default_factory=dict)
    changed: dict[str, Pair] = field(default_factory=dict)
    removed: dict[str, Pair] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.added or self.changed or self.removed)


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit log is told beside the change, and how it is to be made."""

    reason: str = ""
    request_id: str = ""
    if_revision: int | None = None  # the record must have; None: whichever it has
    dry_run: bool = False  # tell what would be, write nothing


class Editor:
    """An administrator's hand on a store.

    Args:
        actor: who it is, for the audit log.
        zone: of the calendar windows that it sets, where they name none.
        on_failure: of limits that say nothing.

    Every method raises StoreDown, and QuotaError for what cannot be.
    """

    def __init__(
        self, store: Store, actor: str, zone: str = "UTC", on_failure: OnFailure = "share"
    ) -> None:
        self.store = store
        self._actor = actor
        self._zone = zone
        self._policy = Policy(on_failure)
        self._reader = Reader(store, self._policy)

    async def read(self) -> Policy:
        """All that is written, as it is now."""
        await self._reader.read()
        return self._policy

    async def set(
        self,
        name: str,
        limits: Sequence[Limit] = (),
        *,
        parent: str | None = None,
        keep: Sequence[str] = (),
        why: Why,
    ) -> Written:
        """Add limits, or replace those of the same name and model; `parent` "" takes it away.

        A limit that is there keeps what `keep` names: `zone`, `shadow`, `on_failure`.
        """
        if unknown := set(keep) - KEEPS:
            raise QuotaError(f"a limit cannot keep {sorted(unknown)[0]!r}")
        for limit in limits:
            check_limit(limit)

        def change(old: Subject) -> Subject:
            found = {(limit.model, limit.name): limit for limit in old.limits}
            for limit in limits:
                key = limit.model, limit.name
                new = self._zoned(limit)
                if key in found:
                    new = replace(new, **{name: getattr(found[key], name) for name in keep})
                found[key] = new
            above = old.parent if parent is None else parent
            return replace(old, limits=tuple(found.values()), parent=above)

        return await self._edit("set", name, change, why)

    async def unset(
        self, name: str, names: Sequence[str] | None = None, *, model: str = "", why: Why
    ) -> Written:
        """Take limits away, with their grants, by name; None: forget the subject."""

        def change(old: Subject) -> Subject:
            if names is None:
                return Subject()
            gone = {(model, limit) for limit in names}
            if missing := gone - {(limit.model, limit.name) for limit in old.limits}:
                raise NotFound(f"{name} has no limit {sorted(missing)[0][1]!r}{_for(model)}")
            return replace(
                old,
                limits=tuple(each for each in old.limits if (each.model, each.name) not in gone),
                grants=tuple(each for each in old.grants if (each.model, each.limit) not in gone),
            )

        return await self._edit("unset", name, change, why)

    async def block(self, name: str, reason: str, *, why: Why) -> Written:
        """Refuse all requests of a subject, and of those below it."""
        return await self._edit("block", name, lambda old: replace(old, blocked=reason), why)

    async def unblock(self, name: str, *, why: Why) -> Written:
        return await self._edit("unblock", name, lambda old: replace(old, blocked=None), why)

    async def expire(self, name: str, at: float | None, *, why: Why) -> Written:
        """Refuse all requests from a time on (Unix seconds); None: never."""
        return await self._edit("expire", name, lambda old: replace(old, expires=at), why)

    async def grant(self, name: str, grant: Grant, *, why: Why) -> Written:
        """Grant more than a limit, once; a grant of an id that is there changes nothing."""
        if grant.expires <= self.store.wall():
            raise QuotaError("a grant must expire in the future")

        def change(old: Subject) -> Subject:
            if any(each.id == grant.id for each in old.grants):
                return old
            now = self.store.wall()
            current = [each for each in old.grants if each.expires > now]
            return replace(old, grants=(*current, grant))

        return await self._edit("grant", name, change, why)

    async def revoke_grant(self, name: str, id: str, *, why: Why) -> Written:
        def change(old: Subject) -> Subject:
            kept = tuple(each for each in old.grants if each.id != id)
            if len(kept) == len(old.grants):
                raise NotFound(f"{name} has no grant {id!r}")
            return replace(old, grants=kept)

        return await self._edit("revoke-grant", name, change, why)

    async def create_key(
        self, parent: str, id: str | None = None, *, expires: float | None = None, why: Why
    ) -> tuple[Written, str]:
        """A new key below a subject, and its secret, which nobody can tell again."""
        name = f"key/{id or secrets.token_hex(6)}"
        secret, key = new_key(self.store.wall())

        def change(old: Subject) -> Subject:
            if old.key is not None:
                raise QuotaError(f"{name} is there already: rotate it, or choose another name")
            if old.blocked is not None:
                raise QuotaError(f"{name} is blocked ({old.blocked}): choose another name")
            if expires is not None and expires <= self.store.wall():
                raise QuotaError("a key must expire in the future")
            return replace(old, parent=parent, key=key, expires=expires)

        return await self._edit("create-key", name, change, why), secret

    async def rotate_key(self, name: str, *, why: Why) -> tuple[Written, str]:
        """Another secret for a key; the old one stops at once."""
        secret, key = new_key(self.store.wall())

        def change(old: Subject) -> Subject:
            if old.blocked is not None:
                raise QuotaError(f"{name} is {old.blocked}: create another key")
            if old.expires is not None and old.expires <= self.store.wall():
                raise QuotaError(f"{name} has expired: create another key")
            return _keyed(name, old, key=key)

        return await self._edit("rotate-key", name, change, why), secret

    async def revoke_key(self, name: str, *, why: Why) -> Written:
        """Refuse a key for good; its record stays, for the books."""
        return await self._edit(
            "revoke-key", name, lambda old: _keyed(name, old, blocked=REVOKED), why
        )

    async def adjust(
        self, name: str, limit: str, amount: int, *, model: str = "", why: Why
    ) -> list[Corrected]:
        """Charge a limit's counter by hand; a negative amount gives credit."""
        return await self._correct("adjust", name, limit, model, amount, why)

    async def reset(
        self, name: str, limit: str | None = None, *, model: str = "", why: Why
    ) -> list[Corrected]:
        """Nothing is used of a limit, or of any; open reservations still count."""
        return await self._correct("reset", name, limit, model, None, why)

    async def release(self, id: str, *, why: Why) -> bool:
        """Give a reservation back that nobody settles. False when there is none."""
        held = [each for each in await self.store.reservations() if each.id == id]
        if not held or why.dry_run:
            return bool(held)
        entry = self._entry("release", held[0].subject, held[0].lines, None, why)
        await self.store.correct([], [entry])
        return bool(await self.store.settle(id, FREE))

    async def apply(
        self, subjects: Mapping[str, Subject], *, prune: bool = False, why: Why
    ) -> Diff:
        """Make records what a document says, in one step; with `prune` there are no others."""
        async for name, subject in unhurried(subjects.items()):
            check(name, subject)
        for _ in range(MAX_TRIES):
            records = (await self.read()).records
            diff = Diff()
            changes, entries = [], []
            names = sorted(subjects.keys() | (records.keys() if prune else set()))
            async for name in unhurried(names):
                record = records.get(name)
                before = record.subject if record else None
                after = subjects.get(name)
                if before == after:
                    continue
                kind = (
                    diff.added
                    if before is None
                    else diff.removed
                    if after is None
                    else diff.changed
                )
                kind[name] = Pair(before, after)
                changes.append(Change(name, record.revision if record else 0, after))
                entries.append(self._entry("import", name, before, after, why))
            if diff.empty or why.dry_run:
                return diff
            try:
                await self.store.write(changes, entries)
                return diff
            except Conflict:
                continue
        raise QuotaError("others write all the time: try again")

    def _zoned(self, limit: Limit) -> Limit:
        """A limit with its zone written down, so that all who read it have the same days."""
        check_limit(limit)
        if limit.window not in CALENDAR:
            return limit
        zone = limit.zone or self._zone
        load_zone(zone)
        return replace(limit, zone="" if zone == UTC else zone)

    async def _edit(
        self, action: str, name: str, change: Callable[[Subject], Subject], why: Why
    ) -> Written:
        split(name)
        for attempt in range(MAX_TRIES):
            record = (await self.read()).records.get(name)
            revision = record.revision if record else 0
            if why.if_revision is not None and why.if_revision != revision:
                raise Conflict(name, why.if_revision, revision)
            before = record.subject if record else None
            changed = change(before or Subject())
            after = None if changed.empty else changed
            if after is not None:
                check(name, after)
            if before == after or why.dry_run:
                return Written(name, 0, before, after)
            entry = self._entry(action, name, before, after, why)
            try:
                await self.store.write([Change(name, revision, after)], [entry])
            except Conflict:
                if why.if_revision is not None or attempt == MAX_TRIES - 1:
                    raise
                continue
            written = (await self.read()).records.get(name)
            return Written(name, written.revision if written else 0, before, after)
        raise AssertionError("the last attempt returns or raises")

    async def _correct(
        self, action: str, name: str, limit: str | None, model: str, amount: int | None, why: Why
    ) -> list[Corrected]:
        plan = (await self.read()).plan(name, model, self.store.wall())
        checks = [
            each
            for each in plan.checks
            if each.subject == name
            and each.limit.model == model
            and limit in (None, each.limit.name)
            and (limit is not None or each.limit.window)
        ]
        if not checks:
            raise NotFound(f"{name} has no limit{f' {limit!r}' if limit else ''}{_for(model)}")
        lines = [line_of(each, self.store.wall()) for each in checks]
        keys = [line.key for line in lines]
        before = await self.store.counts(keys)
        if not why.dry_run:
            entries = [
                self._entry(action, name, (each.limit.name, *count), amount, why)
                for each, count in zip(checks, before, strict=True)
            ]
            corrections = [Correction(line.key, amount, line.rate, line.until) for line in lines]
            await self.store.correct(corrections, entries)
        after = await self.store.counts(keys)
        pairs = zip(checks, before, after, strict=True)
        return [Corrected(name, each.limit, old, new) for each, old, new in pairs]

    def _entry(self, action: str, name: str, before: object, after: object, why: Why) -> Entry:
        check_text(why.reason)
        check_text(why.request_id)
        now = self.store.wall()
        was, becomes = _text(before), _text(after)
        return Entry(now, self._actor, action, name, was, becomes, why.reason, why.request_id)


def _text(thing: object) -> str:
    return "" if thing is None else msgspec.json.encode(thing).decode()


def _keyed(name: str, subject: Subject, **changes: object) -> Subject:
    if subject.key is None:
        raise NotFound(f"{name} is no API key")
    return replace(subject, **changes)


def _for(model: str) -> str:
    return f" for {model}" if model else ""
