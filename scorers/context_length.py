"""Pods that are meant for prompts of this length."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scorers.pods import Column, Pods, Request

OURS, LLM_D = "warmpath.io/context-length-range", "llm-d.ai/context-length-range"
UNLABELED, MALFORMED = 0.5, 0.0
_RANGE = re.compile(r"\s*([0-9]{1,9})\s*-\s*([0-9]{1,9})\s*")


@dataclass(frozen=True, slots=True)
class ContextLength:
    """Prompt tokens against the pod's label "min-max": narrow ranges with room left first.

    In range: 0.3 + 0.7 × (0.7 / (1 + width / 10000) + 0.3 × room / width). Outside: 0.3 / (1 +
    distance / 1000). Without the label: 0.5; with one that cannot be read: 0.

    Source: context-length-aware scorer of llm-d, whose label is understood as well.
    """

    def score(self, request: Request, pods: Pods) -> Column:
        tokens = request.prompt_tokens
        texts = [labels.get(OURS, labels.get(LLM_D)) for labels in pods.labels]
        fits = {text: _fit(tokens, text) for text in set(texts)}  # few ranges, many pods
        return np.array([fits[text] for text in texts], np.float32)


def _fit(tokens: int, text: str | None) -> float:
    if text is None:
        return UNLABELED
    bounds = _bounds(text)
    if bounds is None:
        return MALFORMED
    least, most = bounds
    if least <= tokens <= most:
        width = max(1, most - least)
        return 0.3 + 0.7 * (0.7 / (1 + width / 10_000) + 0.3 * (most - tokens) / width)
    return 0.3 / (1 + max(least - tokens, tokens - most) / 1000)


@lru_cache(maxsize=1024)
def _bounds(text: str) -> tuple[int, int] | None:
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    least, most = int(match[1]), int(match[2])
    return (least, most) if least <= most else None
