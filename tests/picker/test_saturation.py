"""How much more the pods can take."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.loop import VirtualLoop
from picker.config import EndpointSpec
from picker.config import Flow as FlowSettings
from picker.config import Saturation as Settings
from picker.engines import LoadReport
from picker.flow import Flow
from picker.pool import Endpoint
from picker.saturation import Saturation
from picker.waiting import Visit
from tests.picker.core import Core

A, B = "127.0.0.1:1", "127.0.0.1:2"


def scene(*addresses: str, **settings: float) -> tuple[Core, Saturation]:
    core = Core(addresses)
    return core, Saturation(core.pool, core.load, Settings(**settings))


def tell(core: Core, address: str, waiting: float, kv: float = 0.0, running: float = 0.0) -> None:
    core.now += 0.05
    report = LoadReport(waiting=waiting, running=running, kv_usage=kv)
    core.load.report(core.endpoint(address), report, core.now)


def send(core: Core, address: str, requests: int = 1) -> None:
    for _ in range(requests):
        core.load.credit(core.endpoint(address), 10)
        core.load.picked(core.endpoint(address), False)


def test_each_pod_takes_as_many_as_its_queue_may_hold():
    core, saturation = scene(A, B, waiting=5)
    assert saturation.room() == 10
    tell(core, A, waiting=3)
    assert saturation.room() == 7


def test_no_more_than_its_room_however_full_another_is():
    """cases.md 37: a mean over pods hides one that is full."""
    core, saturation = scene(A, B, waiting=5)
    tell(core, A, waiting=50)
    assert saturation.room() == 5
    slots = core.pool.slots
    assert list(saturation.with_room(slots)) == [core.endpoint(B).slot]
    tell(core, B, waiting=5)
    assert saturation.room() == 0
    assert list(saturation.with_room(slots)) == list(slots)


def test_what_was_sent_since_a_pod_told_counts():
    """cases.md 37: between two scrapes no burst gets past."""
    core, saturation = scene(A, waiting=5)
    tell(core, A, waiting=2)
    send(core, A, 2)
    assert saturation.room() == 1
    send(core, A)
    assert saturation.room() == 0


def test_what_is_on_its_way_while_a_pod_is_asked_counts():
    core, saturation = scene(A, waiting=5)
    send(core, A, 4)
    tell(core, A, waiting=0, running=1)  # it has seen one of the four
    assert saturation.room() == 2
    tell(core, A, waiting=0, running=4)
    assert saturation.room() == 5


def test_a_request_that_ended_since_makes_room_before_the_pod_tells():
    core, saturation = scene(A, waiting=5)
    core.load.credit(core.endpoint(A), 10)
    sent_at = core.load.picked(core.endpoint(A), False)
    assert saturation.room() == 4
    core.load.release(core.endpoint(A), 10)
    core.load.waits_no_more(core.endpoint(A), sent_at)
    assert saturation.room() == 5


def test_a_full_kv_cache_takes_no_more():
    core, saturation = scene(A, kv=0.8)
    tell(core, A, waiting=0, kv=0.79, running=9)
    assert saturation.room() == 5
    tell(core, A, waiting=0, kv=0.8, running=9)
    assert saturation.room() == 0


def test_a_pod_without_any_work_takes_one_whatever_it_tells_of_its_cache():
    core, saturation = scene(A)
    tell(core, A, waiting=0, kv=0.95, running=0)
    assert saturation.room() == 1
    send(core, A)
    assert saturation.room() == 0


def test_requests_in_flight_can_be_limited():
    core, saturation = scene(A, waiting=5, inflight=3)
    assert saturation.room() == 3
    send(core, A, 2)
    tell(core, A, waiting=0, running=2)
    assert saturation.room() == 1


def test_a_pod_that_tells_nothing_new_takes_no_more():
    core, saturation = scene(A, B)
    core.load.asked(core.endpoint(B))
    core.now += 2.5
    tell(core, A, waiting=0)
    assert saturation.room() == 5
    assert saturation.level == pytest.approx(0.5)


def test_of_a_pod_that_does_not_tell_its_queue_all_of_ours_wait():
    core, saturation = scene(A, waiting=5)
    tell(core, A, waiting=nan, running=nan)
    send(core, A, 3)
    assert saturation.room() == 2


def test_no_pods_have_no_room():
    _, saturation = scene()
    assert (saturation.room(), saturation.num_pods, saturation.level) == (0, 0, 1.0)


def test_the_level_is_one_where_all_are_saturated():
    core, saturation = scene(A, B, waiting=4, kv=0.8)
    assert saturation.level == 0.0
    tell(core, A, waiting=2)
    tell(core, B, waiting=0, kv=0.8, running=3)
    assert saturation.level == pytest.approx(0.75)


def test_a_burst_between_two_scrapes_is_held_back():
    """cases.md 37: pods tell that their queues are empty, and then nothing for a while."""
    core, saturation = scene(A, B, waiting=10)
    loop = VirtualLoop()
    flow = Flow(FlowSettings(), saturation, loop=lambda: loop)
    sent = []
    for n in range(500):
        visit = Visit(f"t{n % 7}")
        if flow.wait(visit) is None:
            send(core, A if n % 2 else B)
            flow.picked(visit)
            sent.append(visit)
    assert len(sent) == 20
    assert flow.waiting == 480


ADDRESSES = [f"127.0.0.1:{port}" for port in range(1, 5)]
numbers = st.integers(0, 4) | st.just(nan)
shares = st.sampled_from([0.0, 0.5, 0.8, nan])


@settings(deadline=None)
@given(
    limits=st.sampled_from([{}, {"inflight": 3}, {"waiting": 1, "kv": 0.4}]),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("tell"), st.sampled_from(ADDRESSES), numbers, numbers, shares),
            st.tuples(
                st.sampled_from(["send", "end", "ask", "refuse"]), st.sampled_from(ADDRESSES)
            ),
            st.tuples(st.just("wait"), st.floats(0.0, 2.5)),
            st.tuples(st.just("pool"), st.frozensets(st.sampled_from(ADDRESSES))),
            st.just(("look",)),
        ),
        max_size=40,
    ),
)
def test_room_is_what_each_pod_has_now_whatever_happened(
    limits: dict[str, float], steps: list[tuple[Any, ...]]
) -> None:
    core, saturation = scene(*ADDRESSES[:2], **limits)
    told = Settings(**limits)
    sent: list[tuple[Endpoint, float]] = []

    def room_of(endpoint: Endpoint) -> float:
        load = core.load.describe(endpoint)
        queue = [load.waiting, load.inflight - load.running, 0.0]
        if isnan(load.waiting) and isnan(load.running):
            queue = [load.inflight]
        room = told.waiting - max(each for each in queue if not isnan(each))
        if load.kv_usage >= told.kv:
            idle = room >= told.waiting and not load.inflight and not load.running > 0
            room = 1 if idle else 0
        if told.inflight:
            room = min(room, told.inflight - load.inflight)
        return max(0, room) if load.fresh else 0

    for step, *arguments in steps:
        endpoint = core.pool.endpoints.get(arguments[0]) if arguments else None
        match step:
            case "wait":
                core.now += arguments[0]
            case "pool":
                core.pool.update([EndpointSpec(address=each) for each in arguments[0]])
            case "end" if sent:
                there, at = sent.pop()
                core.load.release(there, 10)
                core.load.waits_no_more(there, at)
            case "tell" if endpoint is not None:
                _, waiting, running, kv = arguments
                report = LoadReport(waiting=waiting, running=running, kv_usage=kv)
                core.load.report(endpoint, report, core.now)
            case "send" if endpoint is not None:
                core.load.credit(endpoint, 10)
                sent.append((endpoint, core.load.picked(endpoint, False)))
            case "ask" if endpoint is not None:
                core.load.asked(endpoint)
            case "refuse" if endpoint is not None:
                core.load.failed(endpoint, "gone", unreachable=True)
            case "look":
                saturation.room()
    rooms = {each.slot: room_of(each) for each in core.pool.endpoints.values()}
    assert saturation.room() == sum(rooms.values())
    slots = core.pool.slots
    having = [slot for slot in slots if rooms[slot]]
    assert list(saturation.with_room(slots)) == (having or list(slots))


def test_other_numbers_hold_at_once_although_no_pod_tells():
    core, saturation = scene(A, B, waiting=5)
    tell(core, A, waiting=3)
    assert saturation.room() == 7
    saturation.reconfigure(Settings(waiting=3))
    assert saturation.room() == 3
    assert list(saturation.with_room(core.pool.slots)) == [core.endpoint(B).slot]
