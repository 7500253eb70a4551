"""Who has the shortest queue."""

from __future__ import annotations

from dataclasses import dataclass

from scorers.pods import Column, Pods, Request
from scorers.scale import min_max


@dataclass(frozen=True, slots=True)
class Queue:
    """(most - waiting) / (most - least) over the candidates; all equal: 1; never told: 0.

    Source: queue-scorer of the reference picker and of llm-d.
    """

    def score(self, request: Request, pods: Pods) -> Column:
        return min_max(pods.waiting)
