"""Quantities as Kubernetes writes them, and durations as Go does."""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil, isfinite

from picker.document import shown

MOST = (1 << 63) - 1
_SCALES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(
    r"([+-]?)([0-9]{0,20})(?:\.([0-9]{0,20}))?(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,3}))?"
)
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_UNITS["h"] = 3600.0
_SPAN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(ns|us|µs|μs|ms|s|m|h)")


class Quantity(int):
    """A whole number of 0 or more, rounded up: `4Gi`, `10k`, `1G`, `1.5e3`."""


class GoDuration(float):
    """Seconds, 0 or more: `200ms`, `1m30s`."""


def quantity(value: object) -> Quantity:
    """Of a resource, as resource.Quantity of Kubernetes reads it.

    Raises:
        ValueError: it is none, or not within 0 and 2^63 - 1.
    """
    if isinstance(value, float) and isfinite(value):
        value = repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) <= MOST else "-"
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or not (match[2] or match[3]):
        raise ValueError(f"{shown(value)} is not a quantity: write 5000, 10k, 4Gi or 1G")
    sign, whole, part, unit, exponent = match.groups()
    number = Fraction(int((whole or "0") + (part or "")), 10 ** len(part or ""))
    number *= Fraction(10) ** int(exponent) if exponent else _SCALES[unit or ""]
    if (sign == "-" and number) or number > MOST:
        raise ValueError(f"{shown(value)} must be between 0 and 2^63 - 1")
    return Quantity(ceil(number))


def duration(value: object) -> GoDuration:
    """As time.ParseDuration of Go reads it, but not below 0.

    Raises:
        ValueError: it is none.
    """
    if value == "0":
        return GoDuration(0.0)
    text = value.removeprefix("+") if isinstance(value, str) else ""
    spans = list(_SPAN.finditer(text[:200]))
    if not text or "".join(span[0] for span in spans) != text:
        raise ValueError(f"{shown(value)} is not a duration: write 200ms, 30s or 1m30s")
    return GoDuration(sum(float(span[1]) * _UNITS[span[2]] for span in spans))


def hook(kind: type, value: object) -> object:
    """Makes these two for msgspec."""
    if kind is Quantity:
        return quantity(value)
    if kind is GoDuration:
        return duration(value)
    raise NotImplementedError(kind)
