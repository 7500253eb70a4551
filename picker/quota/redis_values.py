"""What the keys of the Redis store hold, as `lua/common.lua` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from picker.quota.bucket import Counter
from picker.quota.ledger import Reservation
from picker.quota.model import Subject
from picker.quota.plan import Line
from picker.quota.policy import Record
from picker.quota.store import Entry

_COUNTER = msgspec.msgpack.Decoder(list[float])
_HELD = msgspec.msgpack.Decoder(tuple[str, str, float, float, bool, str, list[int], list[int]])
_ENTRY = msgspec.json.Decoder(Entry)
_SUBJECT = msgspec.json.Decoder(Subject)


def counter_of(raw: bytes | None) -> Counter | None:
    """A counter from its value; None for a key that is not there."""
    if raw is None:
        return None
    value, settled, rate, level, at, seq, until, _, *flat = _COUNTER.decode(raw)
    lows = [(int(number), low) for number, low in zip(flat[::2], flat[1::2], strict=True)]
    return Counter(int(value), int(settled), rate, level, at, int(seq), lows, until)


def packed_counter(counter: Counter, lasts: float) -> list[float]:
    """A counter as it is packed; `lasts` is when its key expires (Unix seconds)."""
    numbers = [counter.value, counter.settled, counter.rate, counter.level, counter.at]
    lows = [number for low in counter.lows for number in low]
    return [*numbers, counter.seq, counter.until, lasts, *lows]


def flat_lines(lines: Sequence[Line]) -> str:
    """What lines are whatever they hold, as JSON."""
    flat: list[Any] = []
    for line in lines:
        flat += (line.key, line.what, line.draws, line.rate, line.until)
    return msgspec.json.encode(flat).decode()


def reservation_of(id: str, raw: bytes) -> Reservation:
    """A reservation from its value."""
    subject, model, ttl, expires, expired, text, amounts, seqs = _HELD.decode(raw)
    flat = msgspec.json.decode(text)
    lines = []
    for index, (amount, seq) in enumerate(zip(amounts, seqs, strict=True)):
        key, what, draws, rate, until = flat[5 * index : 5 * index + 5]
        lines.append(Line(key, amount, what, seq, draws, rate, until))
    return Reservation(id, subject, model, tuple(lines), ttl, expires, expired)


def packed_reservation(held: Reservation) -> list[Any]:
    """A reservation as it is packed."""
    amounts, seqs = [line.amount for line in held.lines], [line.seq for line in held.lines]
    lines = flat_lines(held.lines)
    return [
        held.subject,
        held.model,
        held.ttl,
        held.expires,
        held.expired,
        lines,
        amounts,
        seqs,
    ]


def record_of(raw: bytes) -> Record | None:
    """A record from its value, `REVISION:JSON`; None for one that was removed."""
    revision, _, text = raw.partition(b":")
    return Record(int(revision), _SUBJECT.decode(text)) if text else None


def entry_texts(entries: Sequence[Entry]) -> list[str]:
    """Audit entries as the scripts take them."""
    return [msgspec.json.encode(entry).decode() for entry in entries]


def entry_of(raw: bytes) -> Entry:
    """An audit entry from its value, `REVISION:JSON`."""
    revision, _, text = raw.partition(b":")
    return _ENTRY.decode(text)._replace(revision=int(revision))
