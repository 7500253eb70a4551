"""Equal service: the paper's lemma and theorems on random traces, and what goes beyond it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.cost import PROFILED, Cost, TokenCost
from picker.vtc import Account, VirtualTokenCounter

TENANTS = "abcd"
EPSILON = 1e-6
PAPER = TokenCost()


@dataclass(eq=False)
class Request:
    tenant: str
    prompt: int
    output: int
    came: int = 0
    expected: int = 0
    account: Account | None = None

    @property
    def size(self) -> int:
        """Tokens of the memory that it is given."""
        return self.prompt + max(self.output, self.expected)


@dataclass
class Engine:
    """The paper's engine: one batch in a memory of tokens, one output token each per step."""

    vtc: VirtualTokenCounter
    memory: int
    expect: Callable[[Request], int] = lambda request: 0
    queues: dict[str, deque[Request]] = field(default_factory=dict)
    batch: list[Request] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=dict)
    cost: Cost = PAPER

    def submit(self, request: Request) -> None:
        queue = self.queues.setdefault(request.tenant, deque())
        if not queue:
            self.vtc.arrive(request.tenant)
        queue.append(request)

    def withdraw(self, tenant: str) -> None:
        """The client of the tenant's newest waiting request leaves."""
        if self.queues.get(tenant):
            self.queues[tenant].pop()
            if not self.queues[tenant]:
                self.vtc.leave(tenant)

    def waiting(self) -> set[str]:
        return {tenant for tenant, queue in self.queues.items() if queue}

    def admit(self) -> bool:
        """Move one request into the batch; False when none waits or the next does not fit."""
        tenant = self.vtc.least()
        if tenant is None:
            return False
        queue = self.queues[tenant]
        request = queue[0]
        request.expected = self.expect(request)
        if sum(running.size for running in (*self.batch, request)) > self.memory:
            return False
        queue.popleft()
        request.account = self.vtc.dispatch(tenant, request.prompt, request.expected)
        if not queue:
            self.vtc.leave(tenant)
        self.batch.append(request)
        self._serve(tenant, self.cost(request.prompt, 0))
        return True

    def decode(self) -> None:
        for request in list(self.batch):
            assert request.account is not None
            request.came += 1
            self.vtc.output(request.account, request.came)
            before = self.cost(request.prompt, request.came - 1)
            self._serve(request.tenant, self.cost(request.prompt, request.came) - before)
            if request.came == request.output:
                self.vtc.settle(request.account)
                self.batch.remove(request)

    def _serve(self, tenant: str, service: float) -> None:
        self.service[tenant] = self.service.get(tenant, 0.0) + service

    def fill(self) -> None:
        while self.admit():
            pass


LENGTHS = st.integers(1, 12)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(TENANTS), LENGTHS, LENGTHS),
        st.tuples(st.just("withdraw"), st.sampled_from(TENANTS)),
        st.tuples(st.just("step")),
    ),
    max_size=150,
)
MEMORY = 40


def run(
    events: list[tuple], engine: Engine, check: Callable[[str, tuple], None] = lambda *_: None
) -> None:
    for event in events:
        match event:
            case ("submit", tenant, prompt, output):
                engine.submit(Request(tenant, prompt, output))
            case ("withdraw", tenant):
                engine.withdraw(tenant)
            case ("step",):
                while engine.admit():
                    check("dispatch", event)
                engine.decode()
        check(event[0], event)


def spread(engine: Engine) -> float:
    """Of the counters of those who wait, by the queues and not by what VTC says of itself."""
    values = [
        counter.value
        for tenant in engine.waiting()
        if (counter := engine.vtc.find(tenant)) is not None
    ]
    return max(values) - min(values) if values else 0.0


@given(EVENTS)
@settings(max_examples=300, deadline=None)
def test_counters_of_those_who_wait_stay_together(events: list[tuple]) -> None:
    """Lemma 4.3, after every event."""
    engine = Engine(VirtualTokenCounter(), MEMORY)
    bound = PAPER.most(MEMORY, MEMORY)
    assert bound == 2 * MEMORY

    def check(what: str, event: tuple) -> None:
        assert spread(engine) <= bound
        assert engine.vtc.spread == spread(engine)
        assert engine.vtc.num_waiting == len(engine.waiting())

    run(events, engine, check)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0}


@given(EVENTS, st.sampled_from([TokenCost(), PROFILED, TokenCost(3, 1), TokenCost(0, 1)]))
@settings(max_examples=300, deadline=None)
def test_weighted_counters_of_any_cost_stay_together(events: list[tuple], cost: TokenCost) -> None:
    engine = Engine(VirtualTokenCounter(cost, WEIGHTS.__getitem__), MEMORY, cost=cost)
    bound = cost.most(MEMORY, MEMORY) / min(WEIGHTS.values())
    run(events, engine, lambda *_: _within(spread(engine), bound))


@given(EVENTS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_expected_lengths_do_not_part_the_counters(
    events: list[tuple], chance: random.Random
) -> None:
    """However wrong they are, as long as what is expected would fit."""
    engine = Engine(VirtualTokenCounter(), MEMORY, lambda request: chance.randint(0, 12))
    bound = PAPER.most(MEMORY, MEMORY)
    run(events, engine, lambda *_: _within(spread(engine), bound))


def _within(value: float, bound: float) -> None:
    assert value <= bound + EPSILON


@given(EVENTS)
@settings(max_examples=300, deadline=None)
def test_the_service_of_two_that_wait_all_the_time_differs_by_no_more_than_2u(
    events: list[tuple],
) -> None:
    """Theorem 4.4, over every interval in which both wait."""
    engine = Engine(VirtualTokenCounter(), MEMORY)
    bound = 2 * PAPER.most(MEMORY, MEMORY)
    since: dict[frozenset[str], tuple[float, float]] = {}  # least and most of their difference

    def check(what: str, event: tuple) -> None:
        waiting = engine.waiting()
        for f in TENANTS:
            for g in TENANTS:
                if f >= g:
                    continue
                pair = frozenset((f, g))
                if not {f, g} <= waiting:
                    since.pop(pair, None)
                    continue
                now = engine.service.get(f, 0.0) - engine.service.get(g, 0.0)
                least, most = since.get(pair, (now, now))
                since[pair] = min(least, now), max(most, now)
                assert since[pair][1] - since[pair][0] <= bound

    run(events, engine, check)


@given(EVENTS)
@settings(deadline=None)
def test_all_that_is_dispatched_is_charged_to_the_token(events: list[tuple]) -> None:
    engine = Engine(VirtualTokenCounter(), MEMORY, lambda request: 5)
    run(events, engine)
    while engine.waiting() or engine.batch:
        engine.fill()
        engine.decode()
    charged = {counter.tenant: counter.service for counter in engine.vtc if counter.service}
    assert charged == engine.service
    assert all(counter.open == 0 for counter in engine.vtc)


@given(EVENTS)
@settings(deadline=None)
def test_the_next_one_is_always_the_one_with_the_smallest_counter(events: list[tuple]) -> None:
    engine = Engine(VirtualTokenCounter(), MEMORY, lambda request: request.output + 2)

    def check(what: str, event: tuple) -> None:
        least = engine.vtc.least()
        waiting = engine.waiting()
        assert (least is None) == (not waiting)
        if least is not None:
            values = {counter.tenant: counter.value for counter in engine.vtc}
            assert values[least] == min(values[tenant] for tenant in waiting)

    run(events, engine, check)


def shares(
    vtc: VirtualTokenCounter, requests: Mapping[str, tuple[int, int]], steps: int = 1000
) -> dict[str, float]:
    """Each tenant's share of the service while all of them always wait."""
    engine = Engine(vtc, 400)
    for _ in range(steps):
        for tenant, (prompt, output) in requests.items():
            while len(engine.queues.get(tenant, ())) < 60:
                engine.submit(Request(tenant, prompt, output))
        engine.fill()
        engine.decode()
    total = sum(engine.service.values())
    return {tenant: engine.service[tenant] / total for tenant in requests}


def test_tokens_are_shared_and_not_turns() -> None:
    """cases.md 42: long prompts of one tenant, short ones of another."""
    assert shares(VirtualTokenCounter(), {"long": (100, 4), "short": (1, 4)}) == {
        "long": pytest.approx(0.5, abs=0.01),
        "short": pytest.approx(0.5, abs=0.01),
    }


def test_service_is_shared_by_weight() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 3.0}
    vtc = VirtualTokenCounter(weight=weights.__getitem__)
    got = shares(vtc, dict.fromkeys(weights, (8, 8)))
    assert got == {tenant: pytest.approx(w / 6, abs=0.01) for tenant, w in weights.items()}


def serve(vtc: VirtualTokenCounter, tenant: str, prompt: int, more: bool = True) -> Account:
    """A request of a tenant is dispatched; `more`: others of it go on waiting."""
    counter = vtc.find(tenant)
    if counter is None or not counter.waiting:
        vtc.arrive(tenant)
    account = vtc.dispatch(tenant, prompt)
    if not more:
        vtc.leave(tenant)
    return account


def test_who_comes_back_is_lifted_to_the_least_of_those_who_wait() -> None:
    vtc = VirtualTokenCounter()
    serve(vtc, "busy", 70)
    serve(vtc, "busier", 30)
    serve(vtc, "busier", 60)
    vtc.arrive("new")
    counter = vtc.find("new")
    assert counter is not None
    assert (counter.value, counter.lifts, counter.lifted) == (70.0, 1, 70.0)
    assert counter.service == 0.0, "a lift is no service"


def test_who_is_ahead_is_not_lowered() -> None:
    vtc = VirtualTokenCounter()
    serve(vtc, "ahead", 90, more=False)
    serve(vtc, "busy", 30)
    vtc.arrive("ahead")
    assert vtc.least() == "busy"


def test_when_nobody_waits_a_tenant_is_lifted_to_the_last_that_did() -> None:
    """The branch that the paper's own code leaves out: an idle queue forgives no debt and keeps no
    credit."""
    vtc = VirtualTokenCounter()
    serve(vtc, "gone", 50, more=False)
    vtc.arrive("new")
    new = vtc.find("new")
    assert new is not None and new.value == 50.0
    vtc.leave("new")
    vtc.arrive("gone")
    gone = vtc.find("gone")
    assert gone is not None and (gone.value, gone.lifts) == (50.0, 0)


def test_a_tenant_that_stayed_away_gets_its_share_and_no_more() -> None:
    engine = Engine(VirtualTokenCounter(), 400)
    for step in range(2000):
        for tenant in ("stays",) if step < 1000 else ("stays", "returns"):
            while len(engine.queues.get(tenant, ())) < 3:
                engine.submit(Request(tenant, 8, 8))
        engine.fill()
        engine.decode()
        if step == 1000:
            before = dict(engine.service)
    got = {tenant: engine.service[tenant] - before.get(tenant, 0.0) for tenant in engine.service}
    assert got["returns"] / sum(got.values()) == pytest.approx(0.5, abs=0.03)


def test_what_was_expected_and_did_not_come_is_given_back() -> None:
    vtc = VirtualTokenCounter()
    vtc.arrive("a")
    vtc.arrive("b")
    first = vtc.dispatch("a", 10, expected=100)
    assert vtc.least() == "b"
    vtc.dispatch("b", 100)
    vtc.output(first, 20)
    counter = vtc.find("a")
    assert counter is not None and counter.value == 210.0, "expected tokens are charged once"
    assert vtc.least() == "b"
    vtc.settle(first)
    assert counter.value == counter.service == 50.0
    assert vtc.least() == "a"


def test_tokens_beyond_the_expected_are_charged_as_they_come() -> None:
    vtc = VirtualTokenCounter()
    vtc.arrive("a")
    account = vtc.dispatch("a", 10, expected=5)
    vtc.output(account, 8)
    counter = vtc.find("a")
    assert counter is not None and counter.value == 26.0


def test_a_settled_request_costs_what_it_really_was() -> None:
    vtc = VirtualTokenCounter()
    vtc.arrive("a")
    account = vtc.dispatch("a", 10)
    vtc.output(account, 3)
    vtc.settle(account, prompt_tokens=12, output_tokens=7)
    counter = vtc.find("a")
    assert counter is not None and counter.service == 26.0


def test_an_answer_that_begins_again_is_not_charged_twice() -> None:
    vtc = VirtualTokenCounter()
    vtc.arrive("a")
    account = vtc.dispatch("a", 10)
    for tokens in (1, 2, 3, 1, 2, 3, 4):
        vtc.output(account, tokens)
    counter = vtc.find("a")
    assert counter is not None and counter.value == 18.0


def test_a_request_that_got_nothing_costs_nothing() -> None:
    vtc = VirtualTokenCounter(PROFILED)
    vtc.arrive("a")
    vtc.cancel(vtc.dispatch("a", 10, expected=10))
    counter = vtc.find("a")
    assert counter is not None and (counter.value, counter.service) == (0.0, 0.0)


def test_a_refund_after_a_lift_is_no_credit() -> None:
    """The lift made up for it already."""
    vtc = VirtualTokenCounter()
    vtc.arrive("a")
    early = vtc.dispatch("a", 0, expected=50)
    vtc.leave("a")
    serve(vtc, "b", 300)
    vtc.arrive("a")
    counter = vtc.find("a")
    assert counter is not None and counter.value == 400.0
    vtc.settle(early, output_tokens=0)
    assert counter.value == 400.0
    assert counter.service == 0.0


def test_a_refund_is_credit_as_far_as_there_was_no_lift() -> None:
    vtc = VirtualTokenCounter()
    serve(vtc, "b", 60)
    vtc.arrive("a")
    early = vtc.dispatch("a", 0, expected=50)  # at 60 + 100
    vtc.leave("a")
    serve(vtc, "b", 60)  # at 120
    vtc.arrive("a")
    counter = vtc.find("a")
    assert counter is not None and counter.value == 160.0
    vtc.dispatch("a", 30)
    vtc.settle(early, output_tokens=0)  # it would have been at 60, and lifted to 120
    assert counter.value == 150.0


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 50)), max_size=60))
@settings(deadline=None)
def test_memory_is_bounded_and_a_forgotten_tenant_gains_no_credit(
    served: list[tuple[str, int]],
) -> None:
    vtc = VirtualTokenCounter(max_idle=3)
    serve(vtc, "always", 10)
    for tenant, prompt in served:
        vtc.settle(serve(vtc, tenant, prompt, more=False))
        vtc.settle(serve(vtc, "always", 10))
        assert len(vtc) <= 4
    vtc.arrive("new")
    counters = {counter.tenant: counter for counter in vtc}
    assert counters["new"].value >= counters["always"].value


def test_a_tenant_with_requests_on_pods_is_not_forgotten() -> None:
    vtc = VirtualTokenCounter(max_idle=1)
    account = serve(vtc, "a", 10, more=False)
    for tenant in "bcd":
        vtc.settle(serve(vtc, tenant, 1, more=False))
    vtc.output(account, 5)
    counter = vtc.find("a")
    assert counter is not None and counter.service == 20.0
    vtc.settle(account)
    assert len(vtc) == 1


def test_the_heap_does_not_grow_with_refunds() -> None:
    vtc = VirtualTokenCounter()
    vtc.arrive("a")
    vtc.arrive("b")
    for _ in range(10_000):
        tenant = vtc.least()
        assert tenant is not None
        vtc.cancel(vtc.dispatch(tenant, 5, expected=5))
    assert len(vtc._heap) < 200
