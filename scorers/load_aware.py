"""Whose queue is short, by a fixed measure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request
from scorers.scale import ZERO


@dataclass(frozen=True, slots=True)
class LoadAware:
    """0.5 * (1 - waiting / threshold); 0 from the threshold on, and for a pod that never told.

    Source: load-aware-scorer of llm-d.
    """

    threshold: float = 128.0  # requests in a pod's queue

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError("threshold must be above 0")

    def score(self, request: Request, pods: Pods) -> Column:
        scores: Column = pods.waiting * (-0.5 / self.threshold)
        scores += 0.5
        return np.fmax(scores, ZERO, out=scores)
