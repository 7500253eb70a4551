"""Numbers that are cheap to count, and Prometheus' text format for them.

prometheus_client's own counters and histograms would cost more per request than the pick, and its
writer more than ten times as much for each line, on the loop that picks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Labels = tuple[str, ...]


class Spec(NamedTuple):
    """One metric: its type, name, the names of its labels, help, and a histogram's bounds."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    labels: Labels
    help: str
    bounds: str = ""


class Histogram:
    """Observations counted between ascending bounds, a bound itself with what is below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: str) -> None:
        self.bounds = _numbers(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def write(spec: Spec, rows: Iterable[tuple[Labels, float | Histogram]]) -> Iterator[str]:
    """A metric's values by labels as text, one piece for each row."""
    yield f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {spec.kind}\n"
    for values, number in rows:
        labels = ",".join(
            f'{name}="{value.translate(ESCAPES)}"'
            for name, value in zip(spec.labels, values, strict=True)
        )
        if isinstance(number, Histogram):
            yield _histogram(spec.name, labels, number)
        else:
            yield f"{spec.name}{{{labels}}} {number!r}\n" if labels else f"{spec.name} {number!r}\n"


def _histogram(name: str, labels: str, histogram: Histogram) -> str:
    head = f'{name}_bucket{{{labels}{"," if labels else ""}le="'
    lines, count = [], 0
    for bound, more in zip(histogram.bounds, histogram.counts, strict=False):
        count += more
        lines.append(f'{head}{bound!r}"}} {count}\n')
    count += histogram.counts[-1]
    lines.append(f'{head}+Inf"}} {count}\n')
    braced = f"{{{labels}}}" if labels else ""
    lines.append(f"{name}_count{braced} {count}\n{name}_sum{braced} {histogram.total!r}\n")
    return "".join(lines)


@cache
def _numbers(bounds: str) -> tuple[float, ...]:
    return tuple(map(float, bounds.split()))
