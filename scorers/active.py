"""Who is idle, and then where the fewest of our own requests are, relative to the most loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request


@dataclass(frozen=True, slots=True)
class Active:
    """1 up to `idle` requests of our own; above, (most - requests) / most * `busy`.

    `inflight` counts the same, but independent of the most loaded candidate.

    Source: active-request-scorer of llm-d.
    """

    idle: float = 0.0  # requests that a pod may have and be idle
    busy: float = 1.0  # what a pod that is not idle scores at most

    def __post_init__(self) -> None:
        if not self.idle >= 0:
            raise ValueError("idle must not be negative")
        if not 0 <= self.busy <= 1:
            raise ValueError("busy must be from 0 to 1")

    def score(self, request: Request, pods: Pods) -> Column:
        requests = pods.inflight
        most = max(1.0, float(requests.max()))
        scores = np.where(requests <= self.idle, 1, (most - requests) * (self.busy / most))
        return scores.astype(np.float32)
