"""Who has KV memory free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request
from scorers.scale import ONE, ZERO


@dataclass(frozen=True, slots=True)
class KV:
    """1 - share of the KV blocks that running requests hold; never told: 0.

    Source: kv-cache-utilization-scorer of the reference picker and of llm-d.
    """

    def score(self, request: Request, pods: Pods) -> Column:
        scores: Column = ONE - pods.kv_usage
        return np.fmax(scores, ZERO, out=scores)
