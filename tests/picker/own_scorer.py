"""A scorer that a user wrote, and things that are none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scorers.pods import Column, Pods, Request


@dataclass
class LongestName:
    """Wild on purpose: beyond 1, below 0, and NaN."""

    uses_sessions = True
    times_ten: float = 1.0

    def score(self, request: Request, pods: Pods) -> Column:
        wild = [10 * self.times_ten, -5.0, np.nan, 0.5]
        return np.array(wild[: len(pods)], np.float32)


@dataclass
class Failing:
    def score(self, request: Request, pods: Pods) -> Column:
        raise ZeroDivisionError("no score today")


class NoDataclass:
    pass


not_a_class = 3
