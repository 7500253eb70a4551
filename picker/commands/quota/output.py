"""What `warmpath quota` prints: the same rows as a table or for programs.

Data goes to stdout, and nothing else does. Messages go to stderr. In json, yaml and csv numbers are
exact, durations are seconds and times are ISO 8601 in UTC; tables shorten them for people.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import yaml

from picker.quota.model import shown_quantity

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C: thousands of subjects
MAX_DIGITS = 7  # of a quantity in a table, with its sign and point
NUM_DIGITS = 4  # of one that would have more
FORMATS = ("table", "wide", "json", "yaml", "csv", "name")

Row = Mapping[str, Any]
"""By the keys of the columns; None: there is no value."""


@dataclass(frozen=True, slots=True)
class Column:
    """One value of each row."""

    key: str  # in json, yaml and csv
    heading: str  # in tables; empty: not there
    show: Callable[[Any], str] = str  # for people
    right: bool = False  # aligned; numbers are
    wide: bool = False  # only in wide tables


def listing(columns: Sequence[Column], rows: Sequence[Row], output: str, name: str = "") -> str:
    """Rows in one of FORMATS.

    Args:
        name: the key of what `-o name` lists, each once; empty: the first column's.
    """
    if output == "json":
        return as_json([_machine(columns, row) for row in rows])
    if output == "yaml":
        return as_yaml([_machine(columns, row) for row in rows])
    if output == "csv":
        return _csv(columns, rows)
    if output == "name":
        key = name or columns[0].key
        return "".join(f"{each}\n" for each in dict.fromkeys(row[key] for row in rows))
    return table([column for column in columns if output == "wide" or not column.wide], rows)


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Aligned columns under headings, two spaces apart."""
    shown = [column for column in columns if column.heading]
    lines = [[column.heading for column in shown]]
    lines += [[cell(column, row) for column in shown] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = ""
    for line in lines:
        cells = [
            value.rjust(width) if column.right else value.ljust(width)
            for column, value, width in zip(shown, line, widths, strict=True)
        ]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def cell(column: Column, row: Row) -> str:
    value = row[column.key]
    return "-" if value is None or value == "" else column.show(value)


def as_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def as_yaml(value: Any) -> str:
    return str(yaml.dump(value, Dumper=DUMPER, sort_keys=False, allow_unicode=True))


def document(value: Mapping[str, Any], output: str, text: str) -> str:
    """One thing: for programs as json or yaml, for people as `text`."""
    if output == "json":
        return as_json(value)
    return as_yaml(value) if output == "yaml" else text


def _machine(columns: Iterable[Column], row: Row) -> dict[str, Any]:
    return {column.key: row[column.key] for column in columns}


def _csv(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    for row in rows:
        values = [row[column.key] for column in columns]
        writer.writerow(
            [str(value).lower() if isinstance(value, bool) else value for value in values]
        )
    return text.getvalue()


# How values are shown to people.


def safe(text: str) -> str:
    """Somebody's words without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def amount(value: float) -> str:
    """Exactly where that is short, else its first digits: 999.9M of 999,999,972."""
    exact = shown_quantity(round(value))
    digits = exact.rstrip("kMGT")
    if len(digits) <= MAX_DIGITS:
        return exact
    scale = 10 ** (len(str(abs(round(value)))) - NUM_DIGITS)
    return shown_quantity(math.trunc(round(value) / scale) * scale)


def percent(value: float) -> str:
    return f"{value:.0f}%"


def yes(value: bool) -> str:
    return "yes" if value else "-"


def duration(seconds: float) -> str:
    """The two largest units: `3d 4h`, `1h 5m`, `12s`; below a second `0.25s`."""
    if seconds < 1:
        return f"{seconds:.2g}s"
    whole = round(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def iso(at: float) -> str:
    """A time (Unix seconds) for programs, to the millisecond, in UTC."""
    moment = datetime.fromtimestamp(at, UTC)
    unit = "milliseconds" if moment.microsecond else "seconds"
    return moment.isoformat(timespec=unit).replace("+00:00", "Z")


def clock(at: str) -> str:
    """What `iso` gave, for people: to the second."""
    return at[:19].replace("T", " ") + "Z"
