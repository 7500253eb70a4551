"""Choosers pick by the totals, and leave to chance what is equal."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from picker.choosers import chooser
from picker.config import PickerSection

ROUNDS = 4000


def shares(totals: list[float], **settings: object) -> list[float]:
    """How often each row is chosen, of one."""
    choose = chooser(PickerSection(**settings))
    random = np.random.default_rng(1)
    column = np.array(totals, np.float32)
    counts = Counter(choose(column, random) for _ in range(ROUNDS))
    return [counts[row] / ROUNDS for row in range(len(totals))]


def close(shares: list[float]) -> object:
    return pytest.approx(shares, abs=0.03)


def test_max_score_takes_the_best_and_any_of_equals():
    assert shares([1, 3, 2]) == [0, 1, 0]
    assert shares([3, 1, 3, 3]) == close([1 / 3, 0, 1 / 3, 1 / 3])
    assert shares([0, 0]) == close([0.5, 0.5])


def test_weighted_random_follows_the_totals():
    assert shares([1, 3, 0], type="weightedRandom") == close([0.25, 0.75, 0])
    assert shares([0, 0, 0, 0], type="weightedRandom") == close([0.25] * 4)


def test_random_follows_nothing():
    assert shares([1, 3, 0], type="random") == close([1 / 3] * 3)


def test_softmax_follows_the_temperature():
    chance = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    assert shares([1, 2], type="softmax", temperature=1.0) == close(list(chance))
    assert shares([1, 2], type="softmax", temperature=0.001) == [0, 1]
    assert shares([1, 2], type="softmax", temperature=1e6) == close([0.5, 0.5])


def test_power_of_two_never_takes_the_worst_of_several():
    assert shares([1, 2, 3], type="powerOfTwo") == close([0, 1 / 3, 2 / 3])
    assert shares([1], type="powerOfTwo") == [1]


@pytest.mark.parametrize("kind", ["maxScore", "weightedRandom", "softmax", "powerOfTwo"])
def test_one_candidate_is_chosen(kind):
    assert shares([0], type=kind) == [1]
