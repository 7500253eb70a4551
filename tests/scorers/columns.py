"""Requests and pods for tests of scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scorers.pods import Adapters, Pods


@dataclass
class Ask:
    """A request as scorers see it."""

    prompt_tokens: int = 1000
    model: str | None = "m"
    headers: Mapping[str, str] = field(default_factory=dict)


def pods(
    count: int,
    *,
    labels: Sequence[Mapping[str, str]] | None = None,
    adapters: Sequence[Adapters] | None = None,
    fresh: Sequence[bool] | None = None,
    cold_at: Sequence[float] | None = None,
    session: Sequence[bool] | None = None,
    **columns: Any,
) -> Pods:
    """`count` idle fresh pods a:1, a:2, ... but for the columns given."""

    def column(name: str) -> np.ndarray:
        return np.array(columns.pop(name, [0.0] * count), np.float32)

    made = Pods(
        [f"a:{number}" for number in range(1, count + 1)],
        labels or [{}] * count,
        adapters or [Adapters()] * count,
        np.array([True] * count if fresh is None else fresh),
        column("waiting"),
        column("running"),
        column("kv_usage"),
        column("inflight"),
        column("inflight_tokens"),
        column("matched_tokens"),
        np.array(cold_at or [0.0] * count, np.float64),
        np.array([False] * count if session is None else session),
    )
    assert not columns, f"unknown columns {columns}"
    return made
