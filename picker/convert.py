"""Data of a configuration file as values of types: msgspec structs, and what they are made of.

What is wrong is told at its place in the file, in words for whoever wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from picker.document import ConfigError, Document, Place, nearest, shown

T = TypeVar("T")
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "str": "text (numbers and words like `on` need quotes)",
    "bool": "true or false",
    "array": "a list",
    "object": "keys with values",
    "null": "nothing",
}


def converted(
    document: Document,
    data: Any,
    kind: type[T],
    hook: Callable[[type, object], object],
    place: Place = (),
) -> T:
    """Data that stands at a place of a document, as a type.

    Args:
        hook: makes a value of a type that msgspec does not know, or raises ValueError.

    Raises:
        ConfigError: it cannot be that, at its place.
    """
    data = _known(document, data, kind, place)
    try:
        return msgspec.convert(data, kind, dec_hook=hook)
    except msgspec.ValidationError as problem:
        raise _explained(document, str(problem), kind, place) from None


def _known(document: Document, data: Any, kind: Any, place: Place) -> Any:
    """The data without keys that say nothing (null), once every key is found to be known."""
    if get_origin(kind) in (list, tuple) and isinstance(data, list):
        item = get_args(kind)[0]
        return [_known(document, each, item, (*place, i)) for i, each in enumerate(data)]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(data, dict)):
        return data
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key in data:
        if key not in fields:
            raise document.error((*place, key), f"unknown key; {nearest(key, fields)}")
    return {
        key: _known(document, value, fields[key], (*place, key))
        for key, value in data.items()
        if value is not None
    }


def _explained(document: Document, message: str, kind: Any, base: Place) -> ConfigError:
    """msgspec's error at its place in the file, below `base`, in this file's words."""
    what, _, where = message.partition(" - at `$")
    place = base
    for key, index in re.findall(r"\.([A-Za-z]+)|\[([0-9]+|\.\.\.)\]", where):
        if index == "...":  # some value of a mapping
            wrong = re.search(r"got `(\w+)`", what)
            place = (*place, _wrong_key(document.at(place), wrong[1] if wrong else ""))
        else:
            place = (*place, key or int(index))
    value = document.at(place)
    if match := re.match(r"Expected `(.+?)`(?: (>=|<=) (\S+))?", what):
        expected = " or ".join(EXPECTED.get(kind, kind) for kind in match[1].split(" | "))
        if match[2]:
            expected += f", at {'least' if match[2] == '>=' else 'most'} {match[3]}"
        elif isinstance(value, str) and re.fullmatch(r"-?[0-9.]+|true|false", value):
            expected += " (without quotes)"
        what = f"expected {expected}, got {shown(value)}"
    elif what.startswith("Invalid enum value"):
        what = (
            f"{shown(value)} is unknown; {nearest(str(value), _choices(kind, place[len(base) :]))}"
        )
    elif what.startswith("Object missing required field"):
        what = f"the key {what.split('`')[1]!r} is missing"
    return document.error(place, what)


def _wrong_key(mapping: Any, got: str) -> str:
    """The first key whose value has the type that msgspec refused."""
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "array": list, "object": dict}
    kind = kinds.get(got, type(None))
    return next((key for key, value in mapping.items() if type(value) is kind), "")


def _choices(kind: Any, place: Place) -> list[str]:
    """The words that a key takes."""
    for key in place:
        kind = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}[str(key)]
    return [str(word) for word in get_args(kind)]
