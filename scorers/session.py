"""Where the request's session lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scorers.pods import Column, Pods, Request


@dataclass(frozen=True, slots=True)
class Session:
    """1 for the pod that last served the request's session, 0 for the others.

    Source: session-affinity-scorer of llm-d, with a table by session id.
    """

    uses_sessions: ClassVar[bool] = True  # sessions are remembered only if a scorer says so

    def score(self, request: Request, pods: Pods) -> Column:
        return pods.session.astype(np.float32)
