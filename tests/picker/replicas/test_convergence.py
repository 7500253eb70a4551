"""Pickers whose updates are lost, late, repeated and mixed up come to know the same."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.picker.replicas.parts import ADDRESSES, Clock, Picker, sent

NUMBERS = (0, 1, 2)
KEYS = [[100 * prompt + block for block in range(5)] for prompt in range(4)]
TENANTS = ("ann", "bob", "cat")
SESSIONS = [bytes([number]) * 16 for number in range(3)]

pickers = st.sampled_from(NUMBERS)
others = st.permutations(NUMBERS).map(lambda order: (order[0], order[1]))
pods = st.sampled_from(ADDRESSES)


class Cluster(RuleBasedStateMachine):
    """Three pickers; between each two of them updates are in a bag, taken out in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.run(self._set_up())
        self.bags: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.lossy: set[tuple[int, int]] = set()  # pairs of teller and hearer
        self.running: list[tuple[int, str, int]] = []
        # What really was
        self.service: dict[tuple[int, str], float] = defaultdict(float)
        self.learnt: set[tuple[int, str]] = set()  # prompt and pod

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def _set_up(self) -> None:
        self.pickers = [Picker(number + 1, self.clock) for number in NUMBERS]
        self.outboxes = {
            (teller, hearer): self.pickers[teller].news.follow(hearer + 1)
            for teller in NUMBERS
            for hearer in NUMBERS
            if teller != hearer
        }
        # They have found each other before anything happens.
        for teller, hearer in self.outboxes:
            self.outboxes[teller, hearer].begin()
            for message in self.pickers[teller].snapshot():
                self.pickers[hearer].hear(message)

    def teardown(self) -> None:
        self.heal()

        async def stop() -> None:
            for picker in self.pickers:
                picker.news.stop()

        self.run(stop())
        self.loop.close()

    # What happens at one of them

    @rule(picker=pickers, pod=pods, tokens=st.integers(0, 1000))
    def pick(self, picker: int, pod: str, tokens: int) -> None:
        async def work() -> None:
            self.pickers[picker].pick(pod, tokens)

        self.run(work())
        self.running.append((picker, pod, tokens))

    @rule(data=st.data())
    def end(self, data) -> None:
        if self.running:
            ended = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            picker, pod, tokens = ended

            async def work() -> None:
                self.pickers[picker].end(pod, tokens)

            self.run(work())

    @rule(picker=pickers, pod=pods, prompt=st.sampled_from(range(len(KEYS))))
    def learn(self, picker: int, pod: str, prompt: int) -> None:
        async def work() -> None:
            self.pickers[picker].learn(pod, KEYS[prompt])

        self.run(work())
        self.learnt.add((prompt, pod))

    @rule(picker=pickers, tenant=st.sampled_from(TENANTS), tokens=st.integers(1, 100))
    def serve(self, picker: int, tenant: str, tokens: int) -> None:
        async def work() -> None:
            self.pickers[picker].serve(tenant, tokens)

        self.run(work())
        self.service[0, tenant] += tokens

    @rule(picker=pickers, pod=pods, session=st.sampled_from(SESSIONS))
    def keep(self, picker: int, pod: str, session: bytes) -> None:
        async def work() -> None:
            self.pickers[picker].sessions.keep(session, self.pickers[picker][pod])

        self.run(work())

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    # What happens to updates

    @rule(picker=pickers)
    def tell(self, picker: int) -> None:
        async def work() -> None:
            self.pickers[picker].news.flush()

        self.run(work())
        for pair, outbox in self.outboxes.items():
            if pair[0] == picker:
                self.bags[pair] += sent(outbox)

    @rule(pair=others, data=st.data(), times=st.integers(1, 3))
    def arrive(self, pair: tuple[int, int], data, times: int) -> None:
        bag = self.bags[pair]
        if bag:
            message = bag.pop(data.draw(st.integers(0, len(bag) - 1)))

            async def work() -> None:
                for _ in range(times):
                    self.pickers[pair[1]].hear(message)

            self.run(work())

    @rule(pair=others)
    def lose(self, pair: tuple[int, int]) -> None:
        if self.bags[pair]:
            self.bags[pair].clear()
            self.lossy.add(pair)

    @rule(pair=others)
    def tell_anew(self, pair: tuple[int, int]) -> None:
        async def work() -> None:
            self.bags[pair] += self.pickers[pair[0]].snapshot()

        self.run(work())

    @rule(pair=others)
    def fall_silent(self, pair: tuple[int, int]) -> None:
        self.pickers[pair[1]].told.gone(pair[0] + 1)
        self.lossy.add(pair)

    @rule(backwards=st.booleans())
    def heal(self, backwards: bool = True) -> None:
        """Whatever is on its way arrives, and who lost something is told all that there is."""
        for picker in NUMBERS:
            self.tell(picker)

        async def work() -> None:
            for (_, hearer), bag in self.bags.items():
                for message in reversed(bag) if backwards else bag:
                    self.pickers[hearer].hear(message)
                bag.clear()
            for teller, hearer in self.lossy:
                for message in self.pickers[teller].snapshot():
                    self.pickers[hearer].hear(message)
            self.lossy.clear()

        self.run(work())
        self.check()

    def check(self) -> None:
        loads = {address: [0, 0] for address in ADDRESSES}
        for _, pod, tokens in self.running:
            loads[pod][0] += 1
            loads[pod][1] += tokens
        homes = [picker.homes() for picker in self.pickers]
        for picker in self.pickers:
            assert picker.loads() == {pod: tuple(counts) for pod, counts in loads.items()}
            service = picker.service()
            assert {who: round(value, 6) for who, value in service.items()} == dict(self.service)
            for prompt, keys in enumerate(KEYS):
                held = {pod: 5 * ((prompt, pod) in self.learnt) for pod in ADDRESSES}
                assert picker.holds(keys) == held
        assert homes[0] == homes[1] == homes[2]


class TestCluster(Cluster.TestCase):
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
