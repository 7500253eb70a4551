"""Where the first token is the fewest uncached tokens away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request
from scorers.scale import ZERO, behind


def backlog(pods: Pods, waiting_tokens: float) -> Column:
    """Uncached prompt tokens that each pod computes before it comes to a new request.

    At least `waiting_tokens` for each request in its queue: those of other gateways are not among
    our own, and one that waits for KV memory waits for more than its tokens.
    """
    waiting: Column = pods.waiting * waiting_tokens
    return np.fmax(pods.inflight_tokens, waiting, out=waiting)


@dataclass(frozen=True, slots=True)
class Uncached:
    """1 - (cost - least cost) / span, with cost = tokens ahead + patience × tokens to compute.

    Tokens ahead are the uncached prompt tokens in flight to a pod; tokens to compute are this
    prompt's that the pod does not hold. `patience` says how much longer than a recomputation a
    request may wait for its warm pod: above 1, since a recomputation also takes the time of those
    who come after it, and its blocks the place of other blocks.

    Source: token-load-scorer of llm-d, 1 - min(1, cost / threshold) with patience 1. Relative to
    the best candidate instead, a difference of tokens weighs the same for short and long prompts.
    """

    span: float = 65_536.0  # tokens more than the best candidate
    patience: float = 2.0
    waiting_tokens: float = 256.0  # that a request in a pod's queue counts at least

    def __post_init__(self) -> None:
        if not self.span > 0:
            raise ValueError("span must be above 0")
        if self.patience < 0 or self.waiting_tokens < 0:
            raise ValueError("patience and waitingTokens must not be negative")

    def score(self, request: Request, pods: Pods) -> Column:
        uncached: Column = float(request.prompt_tokens) - pods.matched_tokens
        np.maximum(uncached, ZERO, out=uncached)
        uncached *= self.patience
        uncached += backlog(pods, self.waiting_tokens)
        return behind(uncached, self.span)
