"""All subjects as one document, for files: to keep, to compare, to write again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from picker.quota.model import (
    Grant,
    Key,
    Limit,
    QuotaError,
    Subject,
    check,
    quantity,
    shown_quantity,
)
from picker.quota.policy import Policy

SCHEMA_VERSION = 1


def export(policy: Policy) -> dict[str, Any]:
    """Subjects by name, in order, as plain data; the same subjects give the same document.

    Amounts are quantities, `100k`, and times ISO 8601. Keys are there as hashes.
    """
    subjects = {}
    for name in sorted(policy.records):
        data = msgspec.to_builtins(policy.records[name].subject)
        limits, grants = data.get("limits", ()), data.get("grants", ())
        for sized in (*limits, *grants):
            text = shown_quantity(sized["amount"])
            sized["amount"] = int(text) if text.isdigit() else text
        for timed, key in _timed(data, grants):
            timed[key] = _shown_time(timed[key])
        subjects[name] = data
    return {"schemaVersion": SCHEMA_VERSION, "subjects": subjects}


def load(document: object) -> dict[str, Subject]:
    """The subjects of a document.

    Raises:
        QuotaError: naming what is wrong in it.
    """
    if not isinstance(document, Mapping) or document.get("schemaVersion") != SCHEMA_VERSION:
        raise QuotaError(f"this is no export of quotas with schemaVersion {SCHEMA_VERSION}")
    if unknown := document.keys() - {"schemaVersion", "subjects"}:
        raise QuotaError(f"unknown key {sorted(map(str, unknown))[0]!r} beside subjects")
    subjects = document.get("subjects") or {}
    if not isinstance(subjects, Mapping):
        raise QuotaError("subjects: expected names with what is known of each")
    return {str(name): _subject(str(name), data) for name, data in subjects.items()}


def _subject(name: str, data: object) -> Subject:
    fields = dict(_known(name, {} if data is None else data, Subject))
    for part, kind in (("limits", Limit), ("grants", Grant)):
        items = fields.get(part, [])
        if not isinstance(items, list | tuple):
            raise QuotaError(f"{name}: {part}: expected a list")
        fields[part] = [_with_amount(name, _known(name, item, kind)) for item in items]
    if fields.get("key") is not None:
        fields["key"] = dict(_known(name, fields["key"], Key))
    for timed, key in _timed(fields, fields["grants"]):
        timed[key] = _seconds(name, timed[key])
    try:
        subject = msgspec.convert(fields, Subject)
    except msgspec.ValidationError as problem:
        raise QuotaError(f"{name}: {problem}") from None
    check(name, subject)
    return subject


def _timed(data: dict[str, Any], grants: Iterable[Any]) -> list[tuple[dict[str, Any], str]]:
    """Where times stand in a subject's data."""
    places = [(grant, "expires") for grant in grants]
    places += [(data, "expires"), (data.get("key") or {}, "created")]
    return [(part, key) for part, key in places if part.get(key) is not None]


def _shown_time(seconds: float) -> Any:
    """A time as people read it, if that is exactly the same time."""
    shown = datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    return shown if _seconds("", shown) == seconds else seconds


def _seconds(name: str, value: Any) -> Any:
    """Unix seconds of a text; what is none is left to the check of types."""
    if not isinstance(value, str):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise QuotaError(f"{name}: {value!r} is no time: write 2026-04-01T09:30Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _known(name: str, data: object, kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The data, whose keys are all of a kind's."""
    if not isinstance(data, Mapping):
        raise QuotaError(f"{name}: expected keys with values, got {data!r}")
    if unknown := data.keys() - set(kind.__struct_encode_fields__):
        fields = ", ".join(kind.__struct_encode_fields__)
        raise QuotaError(f"{name}: unknown key {sorted(map(str, unknown))[0]!r}; known: {fields}")
    return data


def _with_amount(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    amount = data.get("amount")
    if isinstance(amount, str):
        try:
            return {**data, "amount": quantity(amount)}
        except QuotaError as problem:
            raise QuotaError(f"{name}: {problem}") from None
    return dict(data)
