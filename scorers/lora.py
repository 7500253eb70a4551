"""Where the request's LoRA adapter is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Adapters, Column, Pods, Request


@dataclass(frozen=True, slots=True)
class Lora:
    """1.0 adapter loaded, 0.8 a slot is free for it, 0.6 it waits for one already, 0 otherwise.

    Source: lora-affinity-scorer of the reference picker and of llm-d. An adapter is asked for by
    its name as the model.
    """

    def score(self, request: Request, pods: Pods) -> Column:
        model = request.model
        if model is None:
            return np.zeros(len(pods), np.float32)
        return np.array([_affinity(model, adapters) for adapters in pods.adapters], np.float32)


def _affinity(model: str, adapters: Adapters) -> float:
    if model in adapters.running:
        return 1.0
    running, waiting, limit = adapters.running, adapters.waiting, adapters.limit
    if len(running) < limit and (not waiting or len(running | waiting) < limit):
        return 0.8
    return 0.6 if model in waiting else 0.0
