"""Where the fewest prompt tokens are ahead, by a fixed measure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request
from scorers.scale import ZERO


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """1 - (tokens ahead + tokens to compute) / threshold; 0 from the threshold on.

    Tokens ahead are the uncached prompt tokens in flight to a pod; tokens to compute are this
    prompt's that the pod does not hold. `uncached` counts the same, but relative to the best pod.

    Source: token-load-scorer of llm-d.
    """

    threshold: float = 4_194_304.0  # tokens

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError("threshold must be above 0")

    def score(self, request: Request, pods: Pods) -> Column:
        tokens: Column = float(request.prompt_tokens) - pods.matched_tokens
        np.maximum(tokens, ZERO, out=tokens)
        tokens += pods.inflight_tokens
        tokens *= -1 / self.threshold
        tokens += 1
        return np.maximum(tokens, ZERO, out=tokens)
