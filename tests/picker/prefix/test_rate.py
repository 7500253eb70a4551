"""The rate that is shown for each publisher."""

from __future__ import annotations

import pytest

from picker.prefix.rate import SPAN, Rate


def test_what_goes_on_for_long_is_shown_as_it_is() -> None:
    rate = Rate(100.0)
    for step in range(1, 200):
        rate.update(4 * step, 100.0 + step / 2)
    assert rate.per_second == pytest.approx(8.0, rel=0.01)


def test_what_was_fades_however_often_it_is_looked_at() -> None:
    seldom, often = Rate(0.0), Rate(0.0)
    for rate in (seldom, often):
        rate.update(100, 1.0)
    assert seldom.per_second > 5
    seldom.update(100, 1.0 + SPAN)
    for step in range(1, 11):
        often.update(100, 1.0 + step * SPAN / 10)
    assert often.per_second == pytest.approx(seldom.per_second)
    assert seldom.per_second < 4


def test_a_clock_that_stands_still_changes_nothing() -> None:
    rate = Rate(5.0)
    rate.update(3, 5.0)
    assert rate.per_second == 0.0
    rate.update(3, 6.0)
    assert rate.per_second > 0
