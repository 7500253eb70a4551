"""The leaking bucket gives back exactly what a true charge would not have taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.quota.bucket import MAX_LOWS, Counter

RATE = 10.0

steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 3.0, 20.0]),  # seconds that pass
        st.integers(1, 100),  # then a charge
        st.integers(0, 100),  # of which so much is given back
        st.integers(0, 9),  # so many steps later
    ),
    max_size=40,
)


def replayed(charges: list[tuple[float, int]], now: float) -> float:
    level, last = 0.0, 0.0
    for at, amount in charges:
        level = max(0.0, level - (at - last) * RATE) + amount
        last = at
    return max(0.0, level - (now - last) * RATE)


def run(plan: list[tuple[float, int, int, int]]) -> list[tuple[float, float]]:
    """The level after each step, as the bucket has it and as a replay of the truth does."""
    counter = Counter(rate=RATE)
    charges: list[tuple[float, int]] = []
    due: list[tuple[int, int, int, int]] = []  # step, charge, number, surplus
    now = 0.0
    levels = []
    for step, (seconds, amount, surplus, delay) in enumerate(plan):
        now += seconds
        counter.leak(now)
        seq = counter.charge(amount)
        charges.append((now, amount))
        due.append((step + delay, len(charges) - 1, seq, min(surplus, amount)))
        for each in [each for each in due if each[0] <= step]:
            due.remove(each)
            _, index, number, back = each
            counter.give_back(back, number)
            at, held = charges[index]
            charges[index] = at, held - back
        levels.append((counter.level, replayed(charges, now)))
    return levels


@given(steps)
def test_the_level_is_that_of_a_replay(plan: list[tuple[float, int, int, int]]) -> None:
    for level, wanted in run(plan[:MAX_LOWS]):
        assert level == pytest.approx(wanted, abs=1e-6)


@given(steps)
def test_it_never_gives_back_too_much_however_long_its_history(
    plan: list[tuple[float, int, int, int]],
) -> None:
    for level, wanted in run(plan):
        assert level >= wanted - 1e-6


def test_an_idle_hour_is_not_given_back() -> None:
    counter = Counter(rate=1.0)
    held = counter.charge(100)
    counter.leak(1000.0)
    counter.charge(80)
    counter.give_back(100, held)
    assert counter.level == 80


def test_it_remembers_little() -> None:
    counter = Counter(rate=1.0)
    for second in range(1000):
        counter.leak(float(second))
        counter.charge(1 + second % 7)
    assert len(counter.lows) <= MAX_LOWS
