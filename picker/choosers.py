"""Choosers take one candidate by the totals of their scores.

The reference picker calls them pickers, and so does warmpath.yaml (`scheduling.picker`); here the
picker is the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from picker.config import PickerSection
from scorers.pods import Column

Chooser = Callable[[Column, np.random.Generator], int]
"""Totals of at least one candidate, and randomness -> its row."""


def max_score(totals: Column, random: np.random.Generator) -> int:
    """The highest total; one at random among equals, or a row of idle pods would fill from one end.

    Source: max-score-picker of the reference picker.
    """
    first, last = int(totals.argmax()), len(totals) - 1 - int(totals[::-1].argmax())
    if first == last:  # nearly always, and found sooner than all equals
        return first
    best = (totals == totals[first]).nonzero()[0]
    return int(best[int(random.random() * len(best))])


def weighted_random(totals: Column, random: np.random.Generator) -> int:
    """Each with a chance in proportion to its total; all 0: each with the same.

    Efraimidis and Spirakis, Weighted random sampling with a reservoir (A-Res), in its form with
    exponential variables: the least E / total wins.
    """
    candidates = (totals > 0).nonzero()[0]
    if not len(candidates):
        return int(random.integers(len(totals)))
    race = random.standard_exponential(len(candidates)) / totals[candidates]
    return int(candidates[race.argmin()])


def softmax(temperature: float) -> Chooser:
    """Each with a chance in proportion to exp(total / temperature).

    Source: Dynamo's router: towards 0 it becomes the highest total, above 1 nearly uniform.
    """

    def choose(totals: Column, random: np.random.Generator) -> int:
        heights = (totals.astype(np.float64) - totals.max()) / temperature
        return int((heights + random.gumbel(size=len(heights))).argmax())

    return choose


def power_of_two(totals: Column, random: np.random.Generator) -> int:
    """The better of two at random: pickers that see the same loads do not all take the same pod.

    Source: Mitzenmacher, The power of two choices in randomized load balancing.
    """
    count = len(totals)
    first = int(random.random() * count)
    if count == 1:
        return first
    second = (first + 1 + int(random.random() * (count - 1))) % count
    return first if totals[first] >= totals[second] else second


def uniform(totals: Column, random: np.random.Generator) -> int:
    """Any, whatever the totals: random-picker of the reference picker."""
    return int(random.random() * len(totals))


def chooser(settings: PickerSection) -> Chooser:
    """The one that is configured; what config.py checks is not checked again."""
    match settings.type:
        case "maxScore":
            return max_score
        case "weightedRandom":
            return weighted_random
        case "softmax":
            return softmax(settings.temperature)
        case "powerOfTwo":
            return power_of_two
        case "random":
            return uniform
