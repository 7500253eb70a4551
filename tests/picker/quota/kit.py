"""What the tests of quotas share: a clock that they set, and a few words for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from picker.quota.model import Limit, Subject, parse_limit
from picker.quota.plan import Amounts, Denied, Granted, Plan, Spent
from picker.quota.policy import Policy
from picker.quota.reader import Reader
from picker.quota.store import Change, Stale, Store

START = 1_772_366_400.0  # 2026-03-01 12:00 UTC
TTL = 600.0


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = START

    def __call__(self) -> float:
        return self.now


def tokens(amount: int) -> Amounts:
    """A request of so many prompt tokens, and no output."""
    return (1, amount, 0, amount, 1)


def spent(prompt: int, completion: int = 0, cached: int = 0) -> Spent:
    return Spent((1, prompt, completion, prompt + completion, 0), prompt, cached, completion)


def limits(*texts: str, model: str = "") -> tuple[Limit, ...]:
    return tuple(parse_limit(text, model) for text in texts)


@dataclass
class Desk:
    """A store with what a picker keeps beside it."""

    store: Store
    clock: Clock
    policy: Policy = field(default_factory=Policy)
    _ids: count[int] = field(default_factory=count)

    async def write(self, subjects: Mapping[str, Subject]) -> None:
        """Make the records what is given; others stay."""
        await self.read()
        changes = [Change(name, self.revision(name), subject) for name, subject in subjects.items()]
        await self.store.write(changes, [])
        await self.read()

    async def limit(self, name: str, *texts: str, parent: str = "") -> None:
        await self.write({name: Subject(parent=parent, limits=limits(*texts))})

    async def read(self) -> None:
        await Reader(self.store, self.policy).read()

    def revision(self, name: str) -> int:
        record = self.policy.records.get(name)
        return record.revision if record else 0

    def plan(self, subject: str, model: str = "") -> Plan:
        return self.policy.plan(subject, model, self.clock.now)

    async def ask(
        self,
        subject: str,
        amounts: Amounts,
        *,
        model: str = "",
        ttl: float = TTL,
    ) -> tuple[str, Granted | Denied]:
        """A request, and the id that its reservation has if it is granted."""
        id = f"r{next(self._ids)}"
        answer = await self.store.reserve(id, self.plan(subject, model), amounts, model, ttl)
        assert not isinstance(answer, Stale)
        return id, answer

    async def granted(self, subject: str, amounts: Amounts, **more: object) -> str:
        id, answer = await self.ask(subject, amounts, **more)  # type: ignore[arg-type]
        assert isinstance(answer, Granted), answer
        return id

    async def denied(self, subject: str, amounts: Amounts, **more: object) -> Denied:
        _, answer = await self.ask(subject, amounts, **more)  # type: ignore[arg-type]
        assert isinstance(answer, Denied), answer
        return answer

    async def used(self, subject: str, model: str = "") -> list[float]:
        """What is used of each limit that a subject meets."""
        found = await self.store.counts(self.keys(self.plan(subject, model)))
        return [count.value if count.level is None else count.level for count in found]

    def keys(self, plan: Plan) -> list[str]:
        return [
            check.key
            if check.calendar is None
            else f"{check.key}\t{check.calendar.span(self.clock.now)[0]}"
            for check in plan.checks
        ]


def named(answer: Denied, plan: Plan) -> str:
    check = plan.checks[answer.check]
    return f"{check.subject} {check.limit.name}"


def whole(found: Sequence[float]) -> list[int]:
    return [round(number) for number in found]
