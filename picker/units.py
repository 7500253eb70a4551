"""Durations and sizes as people write them."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from picker.document import shown

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
BYTES = {"": 1} | {
    unit + tail: 1 << shift
    for unit, shift in (("Ki", 10), ("Mi", 20), ("Gi", 30))
    for tail in ("", "B")
}


def seconds(value: object) -> float:
    """A duration: `50ms`, `2s`, `5m`, `1h`, or a number of seconds.

    Raises:
        ValueError: it is none.
    """
    return scaled(value, SECONDS | {"": 1.0}, "a duration", "50ms, 2s, 5m or 1h")


def num_bytes(value: object) -> int:
    """A size: `16MiB`, `1Gi`, or a number of bytes.

    Raises:
        ValueError: it is none.
    """
    return int(scaled(value, BYTES, "a size", "256, 64KiB, 16MiB or 1GiB"))


def scaled(value: object, units: dict[str, Any], what: str, examples: str) -> float:
    """A number, or a text of one and a unit. Raises ValueError: it is neither."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", value)
        if match and match[2] in units:
            return float(match[1]) * float(units[match[2]])
    elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    raise ValueError(f"{shown(value)} is not {what}: write {examples}")
