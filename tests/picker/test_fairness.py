"""The numbers that tell how fair it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.cost import TokenCost
from picker.fairness import WINDOW, BandNumbers, FairnessWatch, jain
from tests.picker.test_flow import Desk


def look(desk: Desk, watch: FairnessWatch) -> BandNumbers:
    (band,) = watch.look(pod_tokens=500)
    return band


def test_what_tenants_got_while_they_all_waited():
    desk = Desk(weights={"gold": 2.0})
    watch = FairnessWatch(desk.flow, TokenCost(), desk.loop.time)
    for tenant in ("gold", "plain"):
        for _ in range(50):
            desk.come(tenant, prompt_tokens=30, size=10)
    look(desk, watch)
    desk.give(9)
    desk.come("late", prompt_tokens=30)
    band = look(desk, watch)
    assert (band.waiting, band.waiting_bytes) == (92, 910)
    assert band.bound == 1000.0
    assert band.spread <= 30.0
    assert band.gap <= 30.0
    assert band.jain == pytest.approx(1.0, abs=0.02)
    numbers = {tenant.tenant: tenant for tenant in band.tenants}
    assert (numbers["gold"].running, numbers["plain"].running) == (6, 3)
    assert numbers["gold"].service == numbers["plain"].service == 90.0
    assert (numbers["late"].lifts, numbers["late"].lifted) == (1, 90.0)


def test_service_is_compared_over_a_window_among_those_who_waited_all_of_it():
    desk = Desk()
    watch = FairnessWatch(desk.flow, TokenCost(), desk.loop.time)
    for tenant in ("a", "b", "b"):
        desk.come(tenant, prompt_tokens=100)
    look(desk, watch)
    desk.give(2)  # `a` waits no longer
    desk.come("a", prompt_tokens=100)
    desk.come("b", prompt_tokens=100)
    band = look(desk, watch)
    assert (band.gap, band.jain) == (0.0, 1.0), "there is only one who waited all the time"
    desk.loop.run(WINDOW - 1)
    look(desk, watch)
    desk.loop.run(WINDOW - 0.5)
    desk.give(1)
    assert look(desk, watch).gap == 0.0


def test_the_highest_priority_is_told_first():
    desk = Desk(sheddable="queue")
    for priority in (0, 5, -1):
        desk.come(priority=priority)
    watch = FairnessWatch(desk.flow, TokenCost(), desk.loop.time)
    assert [band.priority for band in watch.look(1)] == [5, 0, -1]
    assert watch.look(1, most_tenants=0)[0].tenants == []


@given(st.lists(st.integers(0, 10**9), min_size=1))
@settings(deadline=None)
def test_jains_index_is_one_for_equals_and_less_for_others(service: list[int]):
    assert 1 / len(service) - 1e-9 <= jain(service) <= 1 + 1e-9
    assert jain([service[0]] * 5) == pytest.approx(1.0)


def test_jains_index_of_all_for_one():
    assert jain([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) == 1.0
