"""The fields of a JSON object as they came, decoded only where somebody acts on them.

Finding where each field's value ends costs about 0.5 µs/KB; it is a quarter of decoding it all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from random import randrange
from typing import Any, TypeVar

import msgspec

from picker.refusal import Refusal

Fields = Mapping[str, msgspec.Raw]
T = TypeVar("T")

SMALL = 1 << 18  # bytes, which cannot hold so many things that it matters
LARGE = 4 << 20  # bytes, which take long to read whatever is in them
MAX_NAMES = 1 << 15  # outside of what is acted on; each costs 0.3 µs and 200 bytes
MAX_SPARE = 1 << 20  # bytes of spaces between fields
_STEP = randrange(1000, 4000)  # bytes; nobody can foresee which ones are looked at
_LISTED_UP_TO = 1 << 16  # bytes: a larger body may repeat no field, even one that nobody acts on

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str | None)

_BEFORE_VALUE = re.compile(rb'\s*[{,]\s*"(?:[^"\\]++|\\.)*+"\s*:\s*', re.DOTALL)
_END = re.compile(rb"\s*\}\s*")


def num_names(body: bytes) -> int:
    """Names and objects that a body may hold, at most; 0 for a small one."""
    return body.count(b":") + body.count(b"{") if len(body) > SMALL else 0


def is_stuffed(value: bytes) -> bool:
    """Whether a large value is more numbers or spaces than a prompt is, by looking here and there.

    Text has one comma in 40 bytes and one space in 6.
    """
    if len(value) <= LARGE:
        return False
    sample = value[::_STEP]
    stuff = len(sample) - len(sample.translate(None, b" \t\r\n"))
    return 2 * stuff > len(sample) or 16 * sample.count(b",") > len(sample)


def fields(body: bytes, acted_on: frozenset[str], names: int) -> dict[str, msgspec.Raw]:
    """The fields of the object that a body is; each value is a piece of the body.

    Args:
        body: UTF-8, as it came.
        acted_on: names that may be there only once, since two readers of a repeated field can
            take different values. Other repeated fields are nobody's business here.
        names: `num_names` of the body.

    Raises:
        Refusal: 400: no JSON (RFC 8259), no object, nested too deeply, too many names, or a
            field of `acted_on` is repeated. Large bodies may repeat nothing.
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise _invalid(f"not UTF-8 at byte {error.start}") from None
    if names > MAX_NAMES:
        _check_names(body, acted_on)
    found = decoded(_FIELDS.decode, body)
    # What a body is longer than its fields, written without spaces, is spaces or more fields.
    spare = len(body) - 1 - 4 * len(found) - sum(map(len, found)) - sum(map(len, found.values()))
    if spare > MAX_SPARE:
        raise _invalid("a field is repeated, or too much of it is spaces")
    if spare >= _SHORTEST and _repeats(body, found):
        _check_repeated(body, acted_on)
    return found


_SHORTEST = len(',"":0')  # a repeated field takes at least this many bytes


def decoded(decode: Callable[[bytes | msgspec.Raw], T], value: bytes | msgspec.Raw) -> T:
    """What a decoder makes of a body.

    Raises:
        Refusal: 400, saying what is wrong with it.
    """
    try:
        return decode(value)
    except RecursionError:
        raise _invalid("nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _invalid(str(error)) from None


def string(found: Fields, name: str, max_length: int) -> str | None:
    """A field that is a string of at most `max_length` characters, null or missing.

    Raises:
        Refusal: 400, it is something else.
    """
    value = _value(found, name, _STRING.decode, "a string")
    if value is not None and len(value) > max_length:
        raise wrong(name, f"at most {max_length} characters long, not {len(value)}")
    return value


def wrong(name: str, must_be: str) -> Refusal:
    """The refusal of a field with a wrong value."""
    return Refusal(400, "invalid_field", f"`{name}` must be {must_be}")


def _value(found: Fields, name: str, decode: Callable[[msgspec.Raw], T], must_be: str) -> T | None:
    raw = found.get(name)
    if raw is None:
        return None
    try:
        return decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise wrong(name, must_be) from None


def _invalid(why: str) -> Refusal:
    return Refusal(400, "invalid_json", f"the request body is no valid JSON object: {why}")


def _check_names(body: bytes, acted_on: frozenset[str]) -> None:
    """Refuse a body with more names than can be kept, beside those in what is acted on."""
    found = decoded(_only(acted_on).decode, body)
    names = body.count(b":") - sum(bytes(raw).count(b":") for raw in msgspec.structs.astuple(found))
    if names > MAX_NAMES:
        raise _invalid("it holds too many names")


@lru_cache(maxsize=16)
def _only(names: frozenset[str]) -> msgspec.json.Decoder[Any]:
    """A decoder that passes over other fields."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Only", fields))


def _repeats(body: bytes, found: Fields) -> bool:
    """Whether a body holds more than the fields found in it.

    A decoder keeps the first place and the last value of a repeated name. So walking the body,
    value after value, comes to its end if and only if no name is repeated.
    """
    position = 0
    for raw in found.values():
        before = _BEFORE_VALUE.match(body, position)
        if before is None or not body.startswith(raw, before.end()):
            return True
        position = before.end() + len(raw)
    return _END.fullmatch(body, position) is None


def _check_repeated(body: bytes, acted_on: frozenset[str]) -> None:
    if len(body) > _LISTED_UP_TO:
        raise Refusal(400, "repeated_field", "a field of the request body is repeated")
    try:
        pairs = json.loads(
            body, object_pairs_hook=list, parse_int=str, parse_float=str, parse_constant=str
        )
    except (ValueError, RecursionError):
        raise _invalid("nested too deeply") from None
    counts = Counter(name for name, _ in pairs)
    for name in acted_on:
        if counts[name] > 1:
            raise Refusal(400, "repeated_field", f"`{name}` is there more than once")
