"""Scorers and filters by name and parameters, as they stand in warmpath.yaml."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from picker.document import nearest

T = TypeVar("T")


def build(kind: str, name: str, registry: Mapping[str, type[T]], parameters: dict[str, Any]) -> T:
    """The `kind` called `name`: one of the registry, or anybody's own as `package.module:Class`.

    Parameters are the fields of its dataclass, camelCase in the file.

    Raises:
        ValueError: naming what is unknown or wrong, and the nearest known name.
    """
    cls: type[T] | None = _load(kind, name) if ":" in name else registry.get(name)
    if cls is None:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(name, registry)}")
    fields = _fields(cls)
    if fields is None:
        raise ValueError(f"{kind} {name!r} must be a dataclass: its fields are its parameters")
    for key in parameters:
        if key not in fields:
            raise ValueError(
                f"unknown parameter {key!r} of {kind} {name!r}; {nearest(key, fields)}"
            )
    try:
        return msgspec.convert({fields[key]: parameters[key] for key in parameters}, type=cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind} {name!r}: {_with_file_names(str(error))}") from None
    except Exception as error:
        raise ValueError(f"{kind} {name!r} cannot be made: {_one_line(error)}") from error


def _load(kind: str, name: str) -> type[Any]:
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # it is anybody's code
        raise ValueError(f"cannot load {kind} {name!r}: {_one_line(error)}") from error
    if not isinstance(cls, type):
        raise ValueError(f"{kind} {name!r} is not a class")
    return cls


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _fields(cls: type[Any]) -> dict[str, str] | None:
    """Names in the file to names in the class; None for what is no dataclass."""
    if not dataclasses.is_dataclass(cls):
        return None
    return {_camel(field.name): field.name for field in dataclasses.fields(cls) if field.init}


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _with_file_names(message: str) -> str:
    return re.sub(r"[`$.]([a-z]+(?:_[a-z]+)+)", lambda m: m[0][0] + _camel(m[1]), message)
