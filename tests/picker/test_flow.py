"""What tenants and their clients notice of flow control."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from math import inf

import msgspec
import pytest

from bench.loop import VirtualLoop
from picker.config import Duration, Size
from picker.config import Flow as Settings
from picker.flow import Flow
from picker.refusal import Refusal
from picker.waiting import Stage, Visit


@dataclass
class Pods:
    """Pods with so much room, which a picked request takes until it ends."""

    places: int = 0
    num_pods: int = 1

    def room(self) -> int:
        return max(0, self.places)


class Desk:
    """A flow, and who was served in which order."""

    def __init__(self, places: int = 0, **settings: object) -> None:
        self.pods = Pods(places)
        self.loop = VirtualLoop()
        self.settings = msgspec.convert(settings, Settings)
        self.flow = Flow(self.settings, self.pods, loop=lambda: self.loop)
        self.served: list[Visit] = []
        self.refused: dict[Visit, Refusal] = {}

    def come(self, tenant: str = "a", priority: int = 0, **fields: object) -> Visit:
        visit = replace(Visit(tenant, priority), **fields)
        try:
            future = self.flow.wait(visit)
        except Refusal as refusal:
            self.refused[visit] = refusal
            return visit
        if future is None:
            self.serve(visit)
        else:
            future.add_done_callback(lambda done: self.end(visit, done))
        return visit

    def serve(self, visit: Visit) -> None:
        self.served.append(visit)
        self.pods.places -= 1
        self.flow.picked(visit)

    def end(self, visit: Visit, future: asyncio.Future[None]) -> None:
        problem = None if future.cancelled() else future.exception()
        if isinstance(problem, Refusal):
            self.refused[visit] = problem
        elif not future.cancelled():
            self.serve(visit)

    def give(self, places: int) -> None:
        """The pods have room for more."""
        self.pods.places += places
        self.flow.wake()
        self.loop.settle()

    def why(self, visit: Visit) -> tuple[int, str]:
        self.loop.settle()
        refusal = self.refused[visit]
        return int(refusal.status), refusal.reason


def test_while_there_is_room_nobody_waits_and_nothing_is_kept():
    desk = Desk(places=3)
    visits = [desk.come("a"), desk.come("b"), desk.come("c")]
    assert desk.served == visits
    assert [visit.waited for visit in visits] == [0.0, 0.0, 0.0]
    assert (desk.flow.passed, desk.flow.waiting, desk.loop.num_timers) == (3, 0, 0)


def test_who_waits_goes_as_soon_as_there_is_room():
    desk = Desk()
    first, second = desk.come(), desk.come()
    desk.loop.run(2.5)
    desk.give(1)
    assert desk.served == [first]
    assert first.waited == 2.5
    assert second.stage is Stage.WAITING


def test_the_end_of_a_request_makes_room():
    desk = Desk(places=1)
    first, second = desk.come(), desk.come()
    desk.pods.places += 1
    desk.flow.left(first)
    desk.loop.settle()
    assert desk.served == [first, second]


def test_a_newcomer_does_not_overtake_those_who_wait():
    desk = Desk()
    first = desk.come()
    desk.pods.places = 1  # and nobody has told
    second = desk.come()
    desk.flow.wake()
    desk.loop.settle()
    assert desk.served == [first]
    assert second.stage is Stage.WAITING


def test_tenants_take_turns_however_many_requests_one_sends():
    desk = Desk()
    for _ in range(6):
        desk.come("greedy", prompt_tokens=10)
    for _ in range(2):
        desk.come("modest", prompt_tokens=10)
    desk.give(4)
    assert sorted(visit.tenant for visit in desk.served) == ["greedy", "greedy", "modest", "modest"]


def test_output_counts_twice_and_while_it_comes():
    desk = Desk(places=2)
    wordy, brief = desk.come("wordy", prompt_tokens=1), desk.come("brief", prompt_tokens=100)
    desk.flow.streamed(wordy, 60)
    next_one = desk.come("brief")
    desk.come("wordy")
    desk.give(1)
    assert desk.served == [wordy, brief, next_one]


def test_estimated_output_is_no_more_than_the_request_allows():
    desk = Desk(places=2)
    limited = desk.come("limited", prompt_tokens=1, most_output=10)
    desk.come("other", prompt_tokens=30)
    desk.flow.streamed(limited, 500)
    next_one = desk.come("limited")
    desk.come("other")
    desk.give(1)
    assert desk.served[-1] is next_one
    assert limited.account is not None and limited.account.charged == 21.0


def test_the_real_usage_replaces_the_estimate():
    desk = Desk(places=2)
    one = desk.come("one", prompt_tokens=100)
    desk.come("other", prompt_tokens=50)
    desk.flow.left(one, prompt_tokens=20, output_tokens=5)
    next_one = desk.come("one")
    desk.come("other")
    desk.give(1)
    assert desk.served[-1] is next_one


def test_higher_priorities_go_first():
    desk = Desk(sheddable="queue")
    low, middle, high = desk.come("a", -5), desk.come("b", 0), desk.come("a", 7)
    desk.give(3)
    assert desk.served == [high, middle, low]


def test_earliest_deadline_first_within_a_tenant():
    desk = Desk(order="deadline")
    never, late, soon = (desk.come(deadline=deadline) for deadline in (inf, 9.0, 3.0))
    desk.give(3)
    assert desk.served == [soon, late, never]


def test_deadlines_do_not_matter_unless_asked_for():
    desk = Desk()
    late, soon = desk.come(deadline=9.0), desk.come(deadline=3.0)
    desk.give(2)
    assert desk.served == [late, soon]


# Refusals: DESIGN.md 3


def test_who_waits_too_long_is_told_so():
    desk = Desk(ttl=Duration(5.0))
    first = desk.come()
    desk.loop.run(1.0)
    second = desk.come()
    desk.loop.run(5.0)
    assert desk.why(first) == (429, "queue_timeout")
    assert second not in desk.refused
    desk.loop.run(6.0)
    assert desk.why(second) == (429, "queue_timeout")
    assert desk.loop.num_timers == 0
    desk.give(1)
    assert desk.served == []


def test_without_pods_it_is_nobodys_limit():
    """cases.md 36: 503 when there is no capacity at all, 429 when others have it."""
    desk = Desk()
    desk.pods.num_pods = 0
    assert desk.why(desk.come()) == (503, "no_endpoints")
    desk = Desk(scaleFromZero="queue", ttl=Duration(5.0), maxRequests=1)
    desk.pods.num_pods = 0
    waits, too_many, batch = desk.come(), desk.come(), desk.come(priority=-1)
    assert desk.why(too_many) == desk.why(batch) == (503, "no_endpoints")
    assert waits.stage is Stage.WAITING
    desk.loop.run(6.0)
    assert desk.why(waits) == (503, "no_endpoints")


def test_queued_from_zero_until_a_pod_comes():
    desk = Desk(scaleFromZero="queue")
    desk.pods.num_pods = 0
    visit = desk.come()
    desk.pods.num_pods = 1
    desk.give(1)
    assert desk.served == [visit]


def test_below_zero_waits_only_where_asked_for():
    desk = Desk()
    assert desk.why(desk.come(priority=-1)) == (429, "saturated")
    desk.give(1)
    assert desk.come(priority=-1) in desk.served


def test_nothing_set_is_bounded_all_the_same():
    """cases.md 40."""
    desk = Desk()
    tenants = [f"t{n}" for n in range(10)]
    for n in range(10_000):
        desk.come(tenants[n % 10])
    assert desk.flow.waiting == 5000
    desk.loop.run(60.0)
    assert desk.flow.waiting == 0


def test_zero_is_no_limit():
    settings = {"ttl": Duration(0), "maxRequests": 0, "tenantRequests": 0}
    desk = Desk(**settings, maxBytes=Size(0), tenantBytes=Size(0))
    for _ in range(6000):
        desk.come(size=1 << 30)
    desk.loop.run(1e9)
    assert desk.flow.waiting == 6000
    assert desk.flow.waiting_bytes == 6000 << 30


def test_one_tenant_does_not_shut_the_others_out():
    desk = Desk(maxRequests=4)
    flood = [desk.come("flood") for _ in range(6)]
    assert [desk.why(visit) for visit in flood[4:]] == [(429, "queue_full")] * 2
    modest = desk.come("modest")
    assert desk.why(flood[3]) == (429, "displaced")
    other = desk.come("modest")
    assert desk.why(flood[2]) == (429, "displaced")
    assert desk.why(desk.come("modest")) == (429, "queue_full"), "each has two now"
    desk.give(4)
    assert set(desk.served) == {*flood[:2], modest, other}


def test_a_tenants_own_bound():
    desk = Desk(tenantRequests=2, tenantBytes=Size(100))
    desk.come("a", size=60)
    assert desk.why(desk.come("a", size=41)) == (429, "tenant_queue_full")
    desk.come("a", size=40)
    assert desk.why(desk.come("a")) == (429, "tenant_queue_full")
    assert desk.why(desk.come("b", size=101)) == (429, "tenant_queue_full")
    assert desk.flow.waiting == 2


def test_when_the_queue_is_full_the_lowest_priority_gives_way():
    desk = Desk(sheddable="queue", maxRequests=3)
    lowest, low, middle = desk.come("a", -2), desk.come("a", -1), desk.come("a", 0)
    high = desk.come("b", 1)
    assert desk.why(lowest) == (429, "displaced")
    desk.come("b", 1)
    assert desk.why(low) == (429, "displaced")
    assert {high, middle}.isdisjoint(desk.refused)


def test_a_full_tenant_gives_way_to_itself_before_others_do():
    desk = Desk(sheddable="queue", maxRequests=3, tenantRequests=2)
    other, low, high = desk.come("b", -2), desk.come("a", -1), desk.come("a", 0)
    higher = desk.come("a", 1)
    assert desk.why(low) == (429, "displaced")
    assert {other, high, higher}.isdisjoint(desk.refused)


def test_a_tenants_lowest_priority_gives_way_first():
    desk = Desk(sheddable="queue", tenantRequests=2)
    lowest, low = desk.come("a", -2), desk.come("a", -1)
    desk.come("a", 1)
    assert desk.why(lowest) == (429, "displaced")
    assert low not in desk.refused


def test_nobody_gives_way_in_vain():
    desk = Desk(sheddable="queue", maxBytes=Size(100), tenantBytes=Size(90))
    low, high = desk.come("a", -1, size=40), desk.come("b", 1, size=50)
    assert desk.why(desk.come("a", 0, size=60)) == (429, "queue_full")
    assert {low, high}.isdisjoint(desk.refused)


def test_as_many_give_way_as_have_to():
    desk = Desk(sheddable="queue", maxBytes=Size(100))
    small = [desk.come(tenant, -1, size=30) for tenant in "abc"]
    desk.come("d", 0, size=60)
    desk.loop.settle()
    assert len(set(small) & set(desk.refused)) == 2
    assert desk.flow.waiting_bytes == 90


def test_retry_after_is_as_long_as_the_queue_takes():
    desk = Desk(maxRequests=10)
    for _ in range(60):
        desk.come()
        desk.loop.run(desk.loop.time() + 0.5)
        desk.give(1)
    for _ in range(10):
        desk.come()
    refusal = desk.refused[desk.come()]
    assert refusal.retry_after == 5
    desk = Desk(maxRequests=1)
    desk.come()
    assert desk.refused[desk.come()].retry_after == 1, "nothing is known of the pace"


def test_when_the_picker_ends_nobody_is_left_waiting():
    desk = Desk()
    visits = [desk.come(), desk.come("b", 3)]
    desk.flow.close()
    visits.append(desk.come())
    assert [desk.why(visit) for visit in visits] == [(503, "draining")] * 3
    assert desk.loop.num_timers == 0


# Clients that leave


def test_who_leaves_while_waiting_holds_no_place():
    desk = Desk(maxRequests=1)
    first = desk.come()
    assert first.future is not None
    first.future.cancel()
    desk.flow.left(first)
    second = desk.come()
    desk.give(1)
    assert desk.served == [second]


def test_room_is_not_given_to_a_client_that_has_just_left():
    desk = Desk()
    first, second = desk.come(), desk.come()
    assert first.future is not None
    first.future.cancel()
    desk.give(1)
    assert desk.served == [second]
    desk.flow.left(first)
    desk.flow.left(first)
    assert desk.flow.running == 1


def test_who_leaves_between_its_turn_and_its_pod_costs_nothing():
    desk = Desk()
    gone, waits = Visit("a", prompt_tokens=100), desk.come("b")
    assert desk.flow.wait(gone) is not None
    desk.flow.left(waits)
    desk.pods.places = 1
    desk.flow.wake()  # its turn, but it is not picked
    assert gone.stage is Stage.SENT
    behind = desk.come("c")
    desk.flow.left(gone)
    desk.loop.settle()
    assert desk.served == [behind]
    (band,) = desk.flow.bands
    counter = band.vtc.find("a")
    assert counter is not None and counter.service == 0.0


def test_a_burst_does_not_pass_before_the_load_knows_of_it():
    """Requests that were let go and not picked yet take their room."""
    desk = Desk()
    visits = [Visit("a") for _ in range(5)]
    for visit in visits:
        desk.flow.wait(visit)
    desk.pods.places = 2
    for _ in range(3):
        desk.flow.wake()
    assert [visit.stage for visit in visits].count(Stage.SENT) == 2


async def test_in_a_real_loop():
    pods = Pods()
    flow = Flow(Settings(ttl=Duration(0.01)), pods)
    expires = flow.wait(Visit("a"))
    assert expires is not None
    with pytest.raises(Refusal, match=r"within 0\.01 s"):
        await expires
    goes = flow.wait(Visit("a"))
    assert goes is not None
    pods.places = 1
    flow.wake()
    await goes


def test_timers_of_the_served_do_not_pile_up():
    desk = Desk(places=0, ttl=Duration(3600.0))
    for _ in range(5000):
        desk.come()
        desk.give(1)
    assert len(desk.flow._by_arrival) < 200


def test_a_visit_is_made_of_what_the_request_says():
    desk = Desk(order="deadline", objectives={"chat": 5}, weights={"gold": 2.0})
    desk.loop.run(100.0)
    headers = {"x-gateway-inference-objective": "chat", "x-slo-ttft-ms": "1500"}
    visit = desk.flow.visit("a", headers, prompt_tokens=7, size=80, most_output=16)
    assert (visit.tenant, visit.priority, visit.deadline) == ("a", 5, 101.5)
    assert (visit.prompt_tokens, visit.size, visit.most_output) == (7, 80, 16)
    assert desk.flow.visit("a", {}).deadline == 160.0


def test_weights_are_those_that_are_set():
    desk = Desk(weights={"gold": 3.0})
    for _ in range(12):
        desk.come("gold", prompt_tokens=10)
        desk.come("plain", prompt_tokens=10)
    desk.give(12)
    assert [visit.tenant for visit in desk.served].count("gold") == 9


def test_output_is_expected_as_before_where_asked_for():
    desk = Desk(places=9, expect="history")
    for tokens in (10, 30):
        visit = desk.come()
        desk.flow.left(visit, output_tokens=tokens)
    assert desk.flow.visit("a", {}).expected == 20
    assert desk.flow.visit("a", {}, most_output=5).expected == 5
    assert Desk().flow.visit("a", {}).expected == 0


def test_who_has_most_is_known_only_while_it_matters():
    desk = Desk(maxRequests=20)
    for _ in range(25):
        desk.come("flood")
    desk.come("modest")
    for number in range(1000):
        desk.give(1)
        desk.come(f"tenant-{number % 7}")
    (band,) = desk.flow.bands
    assert band._longest is None


def test_without_a_queue_nobody_waits_and_what_is_sheddable_is_refused():
    desk = Desk(places=1, queue=False)
    first, second, third = desk.come(), desk.come(), desk.come(priority=7)
    assert desk.served == [first, second, third]
    shed = desk.come(priority=-1)
    assert desk.why(shed) == (429, "saturated")
    desk.pods.places = 1
    assert desk.come(priority=-1) in desk.served
    assert desk.flow.waiting == 0


def test_without_a_queue_what_is_sheddable_may_still_wait():
    desk = Desk(queue=False, sheddable="queue")
    waiting = desk.come(priority=-1)
    assert desk.come() in desk.served
    assert waiting.stage is Stage.WAITING
    desk.give(2)
    assert waiting in desk.served


def test_without_pods_nobody_goes_without_a_queue_either():
    desk = Desk(queue=False)
    desk.pods.num_pods = 0
    assert desk.why(desk.come()) == (503, "no_endpoints")
