"""Pods whose label is what a header asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request


@dataclass(frozen=True, slots=True)
class Label:
    """1 where the pod's label equals the request's header, 0 elsewhere and without the header.

    Source: header-label-affinity-scorer of llm-d.
    """

    header: str  # of the request
    label: str  # of the pod

    def __post_init__(self) -> None:
        if not self.header or not self.label:
            raise ValueError("header and label must not be empty")

    def score(self, request: Request, pods: Pods) -> Column:
        wanted = request.headers.get(self.header.lower())
        if wanted is None:
            return np.zeros(len(pods), np.float32)
        label = self.label
        return np.array([labels.get(label) == wanted for labels in pods.labels], np.float32)
