"""Where the prompt's prefix is cached."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request
from scorers.scale import ONE


@dataclass(frozen=True, slots=True)
class Prefix:
    """matched tokens / prompt tokens; 0 without a prompt.

    Source: prefix-cache-scorer of the reference picker and of llm-d.
    """

    def score(self, request: Request, pods: Pods) -> Column:
        scores: Column = pods.matched_tokens * (1 / max(1, request.prompt_tokens))
        return np.minimum(scores, ONE, out=scores)
