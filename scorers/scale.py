"""From a load to a score: the least loaded candidate first."""

from __future__ import annotations

import numpy as np

from scorers.pods import Column

# Bounds to clamp with. For a Python number NumPy makes such an array at each call, which takes as
# long as clamping the scores of 20 pods.
ZERO: Column = np.zeros((), np.float32)
ONE: Column = np.ones((), np.float32)


def min_max(loads: Column) -> Column:
    """(most - load) / (most - least): 1 for the least loaded, 0 for the most; all equal: 1.

    NaN, a pod that never told, is 0 and left out of least and most.
    """
    least, most = loads[loads.argmin()], loads[loads.argmax()]  # faster than min and max, or a NaN
    all_told = least == least
    if not all_told:
        least, most = np.fmin.reduce(loads), np.fmax.reduce(loads)
    if not most > least:  # equal, or nobody told
        told: Column = (loads == loads).astype(np.float32)
        return told
    scores: Column = (most - loads) / (most - least)
    return scores if all_told else np.fmax(scores, ZERO, out=scores)


def behind(loads: Column, span: float) -> Column:
    """1 - (load - least) / span: how far each is behind the least loaded; 0 from `span` on.

    Linear and independent of the worst candidate, so that a difference weighs the same in every
    request. NaN is 0 and left out of least.
    """
    least = loads[loads.argmin()]
    scores: Column = loads - (least if least == least else np.fmin.reduce(loads))
    scores *= -1 / span
    scores += ONE
    return np.fmax(scores, ZERO, out=scores)
