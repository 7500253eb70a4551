"""Values from files that strangers wrote: read with their type and range checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast


class ModelError(ValueError):
    """A model that cannot be used; the message is one line naming the file and the reason."""

    def __init__(self, message: str) -> None:
        # Names out of a file may hold line breaks, or codes that a terminal would obey.
        super().__init__("".join(each if each.isprintable() else "?" for each in message))


class Fields(NamedTuple):
    """A table of named values, and where it came from for error messages."""

    source: str
    values: Mapping[str, object]

    def has(self, name: str) -> bool:
        """Whether the value is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, high: int = 1 << 24) -> int:
        """A whole number from 1 to `high`."""
        value = self._value(name, default)
        if type(value) is not int or not 1 <= value <= high:
            raise self.wrong(name, f"a whole number from 1 to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if type(value) not in (int, float):
            raise self.wrong(name, "a number above 0")
        number = _as_float(cast(float, value))
        if not (math.isfinite(number) and number > 0):
            raise self.wrong(name, "a number above 0")
        return number

    def string(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def list(self, name: str) -> list[object]:
        value = self._value(name, None)
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def table(self, name: str) -> Fields:
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(f"{self.source}: {name}", value)

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error for a value that is not what it should be."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelError(f"{self.source}: {name} must be {wanted}, got {shown}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return value


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def read_json(path: Path, *, max_bytes: int = 32 << 20) -> Fields:
    """The JSON object in a file, or ModelError."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path}: {size} bytes is too large; the limit is {max_bytes}")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: is nested too deeply") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return Fields(str(path), value)


def one_line(error: object, limit: int = 200) -> str:
    """What an error says, fit for the end of a line."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
