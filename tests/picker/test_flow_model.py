"""The flow queue against a model of it that is too slow and too simple to be wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from bench.loop import VirtualLoop
from picker.config import Duration, Size
from picker.config import Flow as Settings
from picker.flow import Flow
from picker.refusal import Refusal
from picker.waiting import Stage, Visit


@dataclass
class Pods:
    """So many places; the load knows of those that were picked."""

    places: int
    taken: int = 0
    num_pods: int = 1

    def room(self) -> int:
        return max(0, self.places - self.taken)


TTL = 10.0
REQUESTS = st.tuples(
    st.sampled_from("abc"),  # tenant
    st.sampled_from([-1, 0, 0, 0, 1]),  # priority
    st.integers(0, 9),  # prompt tokens
    st.integers(0, 9),  # bytes
    st.sampled_from([1.0, 2.0, 3.0, inf]),  # deadline
)


class FlowMachine(RuleBasedStateMachine):
    """What is seen of the flow from outside, told to a model that checks each step."""

    visits = Bundle("visits")

    @initialize(
        places=st.integers(0, 3),
        by_deadline=st.booleans(),
        sheddable=st.sampled_from(["reject", "queue", "queue"]),
        requests=st.sampled_from([0, 3, 6, 9]),
        size=st.sampled_from([0, 12, 30]),
        tenant_requests=st.sampled_from([0, 3]),
        tenant_size=st.sampled_from([0, 15]),
    )
    def start(
        self,
        places: int,
        by_deadline: bool,
        sheddable: str,
        requests: int,
        size: int,
        tenant_requests: int,
        tenant_size: int,
    ) -> None:
        self.settings = Settings(
            order="deadline" if by_deadline else "fcfs",
            ttl=Duration(TTL),
            sheddable=sheddable,
            max_requests=requests,
            max_bytes=Size(size),
            tenant_requests=tenant_requests,
            tenant_bytes=Size(tenant_size),
        )
        self.pods = Pods(places)
        self.loop = VirtualLoop()
        self.flow = Flow(self.settings, self.pods, loop=lambda: self.loop)
        self.waiting: list[Visit] = []  # as they came
        self.counters: dict[tuple[int, str], float] = {}
        self.arrivals: dict[tuple[int, str], int] = {}
        self.refundable: dict[tuple[int, str], float] = {}
        self.epoch: dict[Visit, int] = {}  # arrivals of its tenant, when it was let go
        self.last: dict[int, tuple[int, str]] = {}  # of each priority: who last stopped waiting
        self.open: dict[Visit, float] = {}  # let go -> what they were charged
        self.outcomes: dict[Visit, list[str]] = {}
        self.ended: list[tuple[Visit, str]] = []  # since the last look, in order

    # What the model believes

    def key(self, visit: Visit) -> tuple[int, str]:
        return visit.priority, visit.tenant

    def lift(self, visit: Visit) -> None:
        """The visit is about to wait."""
        key = self.key(visit)
        level = self.counters.get(self.last.get(visit.priority, key), 0.0)
        band = {self.key(other) for other in self.waiting if other.priority == visit.priority}
        if key in band:
            return
        if band:
            level = min(self.counters[other] for other in band)
        value = self.counters[key] = max(self.counters.get(key, 0.0), level)
        self.arrivals[key] = self.arrivals.get(key, 0) + 1
        self.refundable[key] = value - level if band or visit.priority in self.last else inf

    def drop(self, visit: Visit) -> None:
        """The visit waits no longer."""
        self.waiting.remove(visit)
        if all(self.key(other) != self.key(visit) for other in self.waiting):
            self.last[visit.priority] = self.key(visit)

    def charge(self, visit: Visit) -> None:
        """The visit is let go."""
        cost = float(visit.prompt_tokens)
        key = self.key(visit)
        self.counters[key] += cost
        self.open[visit] = cost
        self.epoch[visit] = self.arrivals[key]

    def recharge(self, visit: Visit, cost: float) -> None:
        """It was charged something else until now."""
        key = self.key(visit)
        more = cost - self.open[visit]
        self.open[visit] = cost
        if more < 0 and self.epoch[visit] != self.arrivals[key]:
            more = -min(-more, self.refundable[key])  # the lift has made up for the rest
            self.refundable[key] += more
        self.counters[key] += more

    def order(self, visit: Visit) -> tuple[float, int]:
        deadline = visit.deadline if self.settings.order == "deadline" else 0.0
        return deadline, self.waiting.index(visit)

    def check_next(self, visit: Visit) -> None:
        """Of all that wait, this one has every right to be the next."""
        assert visit.priority == max(other.priority for other in self.waiting)
        band = [other for other in self.waiting if other.priority == visit.priority]
        assert self.counters[self.key(visit)] == min(
            self.counters[self.key(other)] for other in band
        )
        own = [other for other in band if other.tenant == visit.tenant]
        assert visit is min(own, key=self.order)

    def look(self) -> None:
        """Follow what came of those that waited."""
        self.loop.settle()
        ended, self.ended = self.ended, []
        for visit, outcome in ended:
            self.outcomes[visit].append(outcome)
            if outcome == "dispatched":
                self.check_next(visit)
                self.drop(visit)
                self.charge(visit)
                assert visit.waited == self.loop.time() - visit.arrived
            elif outcome == "queue_timeout":
                assert self.loop.time() >= visit.arrived + TTL
                self.drop(visit)
            elif outcome != "displaced":  # which `arrive` has followed
                raise AssertionError(outcome)

    def over(self, held: list[Visit], visit: Visit, requests: int, size: int) -> bool:
        count, sizes = len(held) + 1, sum(other.size for other in held) + visit.size
        return bool((requests and count > requests) or (size and sizes > size))

    def overfull(self, visit: Visit, tenant: bool) -> bool:
        if tenant:
            own = [other for other in self.waiting if other.tenant == visit.tenant]
            limits = self.settings.tenant_requests, self.settings.tenant_bytes
            return self.over(own, visit, *limits)
        limits = self.settings.max_requests, self.settings.max_bytes
        return self.over(self.waiting, visit, *limits)

    def fits_without(self, gone: list[Visit], visit: Visit, tenant: bool) -> bool:
        kept = self.waiting
        self.waiting = [other for other in kept if other not in gone]
        try:
            return not self.overfull(visit, tenant)
        finally:
            self.waiting = kept

    def displaced(self, visit: Visit, gone: list[Visit]) -> None:
        """These made room for a visit: they had to, and each was the right one."""
        for victim in gone:
            tenant = self.overfull(visit, True)
            assert tenant or self.overfull(visit, False)
            lower = [other for other in self.waiting if other.priority < visit.priority]
            if tenant:
                lower = [other for other in lower if other.tenant == visit.tenant]
            band = [other for other in self.waiting if other.priority == victim.priority]
            own = [other for other in band if other.tenant == victim.tenant]
            assert victim is own[-1], "the newest goes"
            if victim.priority < visit.priority:
                assert victim.priority == min(other.priority for other in lower)
                assert victim in lower
            else:
                assert not tenant
                mine = sum(other.tenant == visit.tenant for other in band)
                assert len(own) > mine + 1, "who has more gives way"
                assert self.fits_without([victim], visit, False)
            if not tenant:
                counts = [sum(o.tenant == other.tenant for o in band) for other in band]
                assert len(own) == max(counts), "of the longest queue"
            self.drop(victim)

    def refused_rightly(self, visit: Visit, reason: str) -> None:
        if reason == "saturated":
            assert visit.priority < 0 and self.settings.sheddable == "reject"
            return
        tenant = reason == "tenant_queue_full"
        assert self.overfull(visit, tenant)
        lower = [
            other
            for other in self.waiting
            if other.priority < visit.priority and (not tenant or other.tenant == visit.tenant)
        ]
        assert not self.fits_without(lower, visit, tenant)

    # What happens

    @rule(target=visits, requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def arrive(self, requests: list[tuple[str, int, int, int, float]]) -> MultipleResults[Visit]:
        visits = []
        for request in requests:
            visits.append(self.come(*request))
            self.look()
        return multiple(*visits)

    def come(self, tenant: str, priority: int, tokens: int, size: int, deadline: float) -> Visit:
        visit = Visit(tenant, priority, tokens, size, deadline=deadline)
        self.outcomes[visit] = []
        room = self.pods.room() - sum(v.stage is Stage.SENT for v in self.open)
        before = list(self.waiting)
        try:
            future = self.flow.wait(visit)
        except Refusal as refusal:
            self.outcomes[visit].append(refusal.reason)
            assert refusal.status == 429 and (refusal.retry_after or 0) >= 1
            assert before or room <= 0
            assert not self.flow_displaced()
            self.refused_rightly(visit, refusal.reason)
            return visit
        self.displaced(visit, self.flow_displaced())
        self.lift(visit)
        self.waiting.append(visit)
        assert not self.overfull_now()
        if future is None:
            assert not before and room > 0
            self.outcomes[visit].append("passed")
            self.check_next(visit)
            self.drop(visit)
            self.charge(visit)
        else:
            assert before or room <= 0
            future.add_done_callback(lambda done, v=visit: self.on_end(v, done))
        return visit

    def flow_displaced(self) -> list[Visit]:
        """Visits that made room just now."""
        self.loop.settle()
        return [visit for visit, outcome in self.ended if outcome == "displaced"]

    def overfull_now(self) -> bool:
        *others, last = self.waiting
        if last.future is None:
            return False
        self.waiting, kept = others, self.waiting
        try:
            return self.overfull(last, True) or self.overfull(last, False)
        finally:
            self.waiting = kept

    def on_end(self, visit: Visit, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            return
        problem = future.exception()
        outcome = problem.reason if isinstance(problem, Refusal) else "dispatched"
        self.ended.append((visit, outcome))

    @rule(visit=visits)
    def pick(self, visit: Visit) -> None:
        if visit.stage is Stage.SENT:
            self.pods.taken += 1
        self.flow.picked(visit)

    @rule(visit=visits, tokens=st.integers(0, 9))
    def stream(self, visit: Visit, tokens: int) -> None:
        self.flow.streamed(visit, tokens)
        if visit.stage is Stage.PICKED:
            self.recharge(visit, max(self.open[visit], visit.prompt_tokens + 2.0 * tokens))

    @rule(visit=visits, tokens=st.integers(0, 9), cancel=st.booleans())
    def leave(self, visit: Visit, tokens: int, cancel: bool) -> None:
        """It ends, or its client goes away; the second time changes nothing."""
        if visit.stage is Stage.WAITING:
            if cancel and visit.future is not None:
                visit.future.cancel()
            self.drop(visit)
            self.outcomes[visit].append("left")
        elif visit in self.open and visit.stage is not Stage.OVER:
            served = visit.stage is Stage.PICKED
            if served:
                self.pods.taken -= 1
            self.recharge(visit, visit.prompt_tokens + 2.0 * tokens if served else 0.0)
            del self.open[visit]
        self.flow.left(visit, None, tokens)

    @rule(places=st.integers(0, 4))
    def more_or_less_room(self, places: int) -> None:
        self.pods.places = places
        self.flow.wake()

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, TTL]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run(self.loop.time() + seconds)

    @invariant()
    def all_is_as_the_model_has_it(self) -> None:
        if not hasattr(self, "flow"):
            return
        self.look()
        self.nothing_waits_while_there_is_room()
        self.nobody_waits_longer_than_allowed()
        self.each_has_one_outcome()
        self.counters_are_right()

    def nothing_waits_while_there_is_room(self) -> None:
        assert self.flow.waiting == len(self.waiting)
        assert self.flow.waiting_bytes == sum(visit.size for visit in self.waiting)
        assert {v for v in self.outcomes if v.stage is Stage.WAITING} == set(self.waiting)
        sent = sum(visit.stage is Stage.SENT for visit in self.open)
        assert not self.waiting or self.pods.room() <= sent
        assert self.flow.running == len(self.open)

    def nobody_waits_longer_than_allowed(self) -> None:
        assert all(visit.arrived + TTL > self.loop.time() for visit in self.waiting)
        assert self.loop.num_timers <= 1

    def each_has_one_outcome(self) -> None:
        for visit, outcomes in self.outcomes.items():
            assert len(outcomes) == (visit.stage is not Stage.WAITING), outcomes

    def counters_are_right(self) -> None:
        for band in self.flow.bands:
            for counter in band.vtc:
                key = band.priority, counter.tenant
                assert counter.value == self.counters.get(key, 0.0), key


TestFlow = FlowMachine.TestCase
TestFlow.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
