"""Cold prompts in turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request


@dataclass(frozen=True, slots=True)
class NoHitLru:
    """A prompt that nobody holds: 1 - rank / (pods - 1), least recently given such a prompt first.

    Never given one shares the first rank. A prompt that some candidate holds: 0.5 for all.

    Source: no-hit-lru-scorer of llm-d. New prefixes spread evenly, and so do the requests that
    will follow them.
    """

    def score(self, request: Request, pods: Pods) -> Column:
        if len(pods) == 1 or np.count_nonzero(pods.matched_tokens):
            return np.full(len(pods), 0.5, np.float32)
        ranks = np.sort(pods.cold_at).searchsorted(pods.cold_at)
        return (1 - ranks / (len(pods) - 1)).astype(np.float32)
