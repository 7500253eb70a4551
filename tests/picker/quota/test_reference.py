"""Random interleavings against a model that replays all of history each time it is asked."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from picker.quota.bucket import MAX_LOWS
from picker.quota.ledger import LATE_SECONDS
from picker.quota.model import BUCKETS, Subject
from picker.quota.plan import FREE, Check, Denied, Granted, Spent
from tests.picker.quota.conftest import STORES, opened
from tests.picker.quota.kit import Clock, Desk, limits

SUBJECTS = ("tenant/a", "tenant/b")
MODELS = ("", "m")


@dataclass
class Charge:
    """What was charged, and by whom: when it is settled, it is as if it had been so at first."""

    at: float
    amount: int
    id: str


@dataclass
class Book:
    """All that was ever charged to one limit."""

    charges: list[Charge] = field(default_factory=list)

    def level(self, rate: float, now: float) -> float:
        """A bucket's, from the beginning of time."""
        level, last = 0.0, 0.0
        for charge in self.charges:
            level = max(0.0, level - (charge.at - last) * rate) + charge.amount
            last = charge.at
        return max(0.0, level - (now - last) * rate)

    def total(self, since: float) -> int:
        return sum(charge.amount for charge in self.charges if charge.at >= since)

    def held(self, id: str) -> Charge:
        return next(charge for charge in self.charges if charge.id == id)


class Books(RuleBasedStateMachine):
    kind = "memory"

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.opened = opened(self.kind, self.clock)
        self.store = self.loop.run_until_complete(self.opened.__aenter__())
        self.desk = Desk(self.store, self.clock)
        self.books: dict[str, Book] = {}
        self.open: dict[str, tuple[list[Check], float]] = {}  # with the time of expiry
        self.late: dict[str, tuple[list[Check], float]] = {}  # until when it is remembered
        self.over: list[str] = []
        self.charges = 0
        subjects = {
            "org/o": Subject(limits=limits("total-tokens=500/minute", "requests=6/day")),
            "tenant/a": Subject(
                "org/o",
                (
                    *limits("total-tokens=300/minute", "concurrency=2"),
                    *limits("input-tokens=200/second", model="m"),
                ),
            ),
            "tenant/b": Subject("org/o", limits("output-tokens=400/day", "input-tokens=90/hour")),
            "model/m": Subject(limits=limits("total-tokens=700/hour")),
        }
        self.loop.run_until_complete(self.desk.write(subjects))

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            self.loop.run_until_complete(self.opened.__aexit__(None, None, None))
            self.loop.close()

    def used(self, check: Check) -> float:
        book = self.books.setdefault(check.key, Book())
        if check.limit.window in BUCKETS:
            return book.level(check.capacity / BUCKETS[check.limit.window], self.clock.now)
        if check.limit.window == "day":
            return book.total(self.clock.now // 86400 * 86400)
        return sum(check.key in {each.key for each in held} for held, _ in self.open.values())

    @precondition(lambda self: self.charges < MAX_LOWS)
    @rule(
        subject=st.sampled_from(SUBJECTS),
        model=st.sampled_from(MODELS),
        prompt=st.integers(0, 150),
        output=st.integers(0, 250),
        ttl=st.sampled_from([5.0, 200.0]),
    )
    def ask(self, subject: str, model: str, prompt: int, output: int, ttl: float) -> None:
        amounts = (1, prompt, output, prompt + output, 1)
        checks = self.desk.plan(subject, model).checks
        waits = {}
        for index, check in enumerate(checks):
            need = min(amounts[check.what], check.capacity)
            over = self.used(check) + need - check.capacity
            if need and over > 1e-6:
                if check.limit.window == "day":
                    waits[index] = 86400 - self.clock.now % 86400
                elif check.limit.window:
                    waits[index] = over * BUCKETS[check.limit.window] / check.capacity
                else:
                    waits[index] = 1.0
        id, answer = self.loop.run_until_complete(
            self.desk.ask(subject, amounts, model=model, ttl=ttl)
        )
        if waits:
            assert isinstance(answer, Denied), waits
            assert answer.wait == pytest.approx(max(waits.values()), abs=1e-4)
            assert waits[answer.check] == pytest.approx(answer.wait, abs=1e-4)
            return
        assert isinstance(answer, Granted)
        self.charges += 1
        for check in checks:
            need = min(amounts[check.what], check.capacity)
            self.books[check.key].charges.append(Charge(self.clock.now, need, id))
        self.open[id] = list(checks), self.clock.now + ttl

    @precondition(lambda self: self.open or self.late or self.over)
    @rule(
        data=st.data(),
        prompt=st.integers(0, 150),
        output=st.integers(0, 250),
        nothing=st.booleans(),
    )
    def end(self, data: st.DataObject, prompt: int, output: int, nothing: bool) -> None:
        id = data.draw(st.sampled_from([*self.open, *self.late, *self.over]))
        amounts = (1, prompt, output, prompt + output, 0)
        usage = FREE if nothing else Spent(amounts, prompt, 0, output)
        first = self.loop.run_until_complete(self.store.settle(id, usage))
        if id in self.over:
            assert not first or usage == FREE  # to give nothing back once more does nothing
            return
        assert first
        checks, _ = self.late.pop(id) if id in self.late else self.open.pop(id)
        self.over.append(id)
        self.charges += 1
        for check in checks:
            charge = self.books[check.key].held(id)
            actual = usage.amounts[check.what]
            debt = actual - charge.amount
            charge.amount = min(actual, charge.amount)
            if debt > 0:
                late = charge.at if check.limit.window == "day" else self.clock.now
                self.books[check.key].charges.append(Charge(late, debt, ""))
                self.books[check.key].charges.sort(key=lambda each: each.at)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.integers(0, 100))
    def shrink(self, data: st.DataObject, share: int) -> None:
        id = data.draw(st.sampled_from([*self.open]))
        checks, _ = self.open[id]
        assert self.loop.run_until_complete(
            self.store.shrink(id, (share, share, share, share, 1), 100.0)
        )
        for check in checks:
            charge = self.books[check.key].held(id)
            charge.amount = min(charge.amount, share)
        self.open[id] = checks, self.clock.now + 100

    @rule(seconds=st.sampled_from([0.001, 0.25, 1.0, 7.0, 60.0, 900.0, 43200.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        for id, (checks, expires) in list(self.open.items()):
            if expires <= self.clock.now:
                del self.open[id]
                for check in checks:
                    self.books[check.key].held(id).amount = 0
                self.late[id] = checks, self.clock.now + LATE_SECONDS
        for id, (_, forgotten) in list(self.late.items()):
            if forgotten <= self.clock.now:
                del self.late[id]
                self.over.append(id)

    @invariant()
    def balanced(self) -> None:
        assert self.loop.run_until_complete(self.store.verify()) == []

    @invariant()
    def as_replayed(self) -> None:
        for subject in SUBJECTS:
            for model in MODELS:
                found = self.loop.run_until_complete(self.desk.used(subject, model))
                wanted = [self.used(check) for check in self.desk.plan(subject, model).checks]
                assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("kind", STORES)
def test_any_interleaving_leaves_what_a_replay_of_the_truth_would(kind: str) -> None:
    machine = type("Books", (Books,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60 if kind == "memory" else 15,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
