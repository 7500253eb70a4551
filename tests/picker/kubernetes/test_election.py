"""Never two leaders: any order of messages, losses, delays, crashes and clocks that drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.kubernetes.election import LONGEST, NOBODY, Election, Lease

DURATION, DEADLINE, RETRY = 15.0, 10.0, 2.0
DRIFT = 0.15  # of a clock: the deadline allows for a fifth


@dataclass(eq=False)
class Candidate:
    """A picker with a clock of its own."""

    rate: float
    start: float
    election: Election

    def clock(self, now: float) -> float:
        return self.start + self.rate * now

    def leads(self, now: float) -> bool:
        return self.election.leads(self.clock(now))


class World:
    """Two candidates, one Lease, the network between them. At most one leads, after each step."""

    def __init__(self, rates: tuple[float, float]) -> None:
        self.now = 0.0
        self.lease = NOBODY
        self.versions = 0
        self.late: list[Lease] = []  # writes that are still on their way: nobody waits for them
        self.made = 0
        self.candidates = [self.stand(rate) for rate in rates]

    def stand(self, rate: float) -> Candidate:
        self.made += 1
        election = Election(f"picker-{self.made}", duration=DURATION, deadline=DEADLINE)
        return Candidate(rate, 1000.0 * self.made, election)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.check()

    def check(self) -> None:
        assert sum(each.leads(self.now) for each in self.candidates) <= 1

    def put(self, lease: Lease) -> Lease | None:
        """What the API server answers to a write; None: a conflict."""
        if lease.version != self.lease.version:
            return None
        self.versions += 1
        self.lease = replace(lease, version=str(self.versions))
        return self.lease

    # What candidates do; `who` is 0 or 1

    def looks(self, who: int) -> None:
        candidate = self.candidates[who]
        candidate.election.read(self.lease, candidate.clock(self.now))
        self.check()

    def attempts(self, who: int) -> None:
        """As leader.py does it, without any trouble."""
        self.looks(who)
        self.writes(who)

    def writes(
        self,
        who: int,
        way: float = 0.0,
        back: float = 0.0,
        meanwhile: Sequence[str] = ("nothing",) * 4,
        fate: str = "answered",
    ) -> None:
        """Writes what it would, if anything.

        Args:
            way, back: seconds that the call and its answer take.
            meanwhile: what the other does before and after each of these.
            fate: `lost` on the way, `delayed` there until later, `unanswered`, or answered.
        """
        candidate = self.candidates[who]
        asked = candidate.clock(self.now)
        proposal = candidate.election.proposal(asked)
        if proposal is None:
            return
        self.other(who, meanwhile[0])
        self.passes(way)
        self.other(who, meanwhile[1])
        if fate == "delayed":
            self.late.append(proposal)
        answer = self.put(proposal) if fate in ("answered", "unanswered") else None
        self.other(who, meanwhile[2])
        self.passes(back)
        self.other(who, meanwhile[3])
        if answer is not None and fate == "answered":
            candidate.election.wrote(answer, asked, candidate.clock(self.now))
        self.check()

    def other(self, who: int, does: str) -> None:
        if does != "nothing":
            getattr(self, does)(1 - who)

    def resigns(self, who: int, heard: bool) -> None:
        resignation = self.candidates[who].election.resign()
        if resignation is not None:
            if heard:
                self.put(resignation)
            else:
                self.late.append(resignation)
        self.check()

    def crashes_and_comes_back(self, who: int) -> None:
        self.candidates[who] = self.stand(self.candidates[who].rate)

    def arrives_late(self, which: int) -> None:
        if which < len(self.late):
            self.put(self.late.pop(which))

    def leader(self) -> str:
        return "".join(e.election.identity for e in self.candidates if e.leads(self.now))


def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.tuples(*arguments))


WHO = st.integers(0, 1)
SECONDS = st.sampled_from([0.0, 3.0, 7.0, 9.5, 12.0, 14.5, 17.0])
MEANWHILE = st.sampled_from(["nothing", "looks", "attempts"])
FATE = st.sampled_from(["answered", "unanswered", "lost", "delayed"])
STEPS = st.one_of(
    step("passes", SECONDS),
    step("looks", WHO),
    step("attempts", WHO),
    step("writes", WHO, SECONDS, SECONDS, st.tuples(*[MEANWHILE] * 4), FATE),
    step("resigns", WHO, st.booleans()),
    step("crashes_and_comes_back", WHO),
    step("arrives_late", st.integers(0, 2)),
)
RATE = st.sampled_from([1 - DRIFT, 1.0, 1 + DRIFT])


@settings(max_examples=500, deadline=None)
@given(rates=st.tuples(RATE, RATE), steps=st.lists(STEPS, max_size=12))
def test_nobody_leads_beside_another(rates: tuple[float, float], steps: list[Any]) -> None:
    world = World(rates)
    for name, arguments in steps:
        getattr(world, name)(*arguments)
    # Where all goes well, somebody leads in the end, and goes on to.
    leaders = []
    for _ in range(12):
        world.passes(RETRY)
        for who in (0, 1):
            world.attempts(who)
        leaders.append(world.leader())
    assert leaders[-1]
    assert leaders[-3:] == [leaders[-1]] * 3


def test_clocks_may_drift_as_far_as_the_duration_exceeds_the_deadline() -> None:
    """Before the slowest one ceases to lead, the fastest one must not begin."""
    for drift, two in ((0.15, False), (0.25, True)):
        world = World((1 - drift, 1 + drift))
        world.attempts(0)
        world.looks(1)
        world.now += DURATION / (1 + drift) + 0.01
        try:
            world.attempts(1)
        except AssertionError:
            assert two
        else:
            assert not two


def test_an_answer_that_took_long_is_believed_the_shorter() -> None:
    mine = election()
    mine.read(NOBODY, 0)
    mine.wrote(Lease("me", DURATION, "1"), 0, 7)
    assert mine.leads(9.9)
    assert not mine.leads(10)
    mine.wrote(Lease("me", DURATION, "2"), 5, 30)
    assert not mine.leads(30)


# Its parts


def election(name: str = "me") -> Election:
    return Election(name, duration=DURATION, deadline=DEADLINE)


def test_a_lease_that_nobody_has_is_taken() -> None:
    for found in (NOBODY, Lease(version="7", transitions=3)):
        mine = election()
        assert mine.proposal(0) is None  # not before it was looked at
        mine.read(found, 0)
        proposal = mine.proposal(0)
        assert proposal is not None
        assert (proposal.holder, proposal.duration) == ("me", DURATION)
        assert (proposal.version, proposal.transitions) == (
            found.version,
            0 if not found.version else 4,
        )
        assert not mine.leads(0)
        mine.wrote(replace(proposal, version="8"), 0, 1)
        assert mine.leads(9.99)
        assert not mine.leads(10)


def test_another_is_waited_for_from_when_it_was_seen_to_change() -> None:
    mine = election()
    held = Lease("you", 30, "1")
    mine.read(held, 1000)
    mine.read(held, 1020)
    assert mine.proposal(1029.9) is None
    assert mine.proposal(1030) is not None
    mine.read(replace(held, version="2"), 1030)
    assert mine.proposal(1059.9) is None
    assert mine.holder == "you"


@pytest.mark.parametrize(("told", "believed"), [(0.0, 1.0), (-5.0, 1.0), (1e12, LONGEST)])
def test_a_duration_that_makes_no_sense_is_bounded(told: float, believed: float) -> None:
    mine = election()
    mine.read(Lease("you", told, "1"), 0)
    assert mine.proposal(believed - 0.1) is None
    assert mine.proposal(believed) is not None


def test_who_sees_another_hold_it_leads_no_more() -> None:
    mine = leading()
    mine.read(Lease("you", 15, "2"), 1)
    assert not mine.leads(1)
    assert mine.resign() is None


def test_a_renewal_keeps_since_when_it_is_held() -> None:
    proposal = leading().proposal(2)
    assert proposal is not None
    assert (proposal.acquired, proposal.transitions, proposal.version) == ("then", 1, "1")


def test_who_resigns_lets_the_next_one_lead_at_once() -> None:
    mine, yours = leading(), election("you")
    resignation = mine.resign()
    assert resignation is not None
    assert not mine.leads(0)
    yours.read(replace(resignation, version="2"), 0)
    assert yours.proposal(0) is not None


def leading() -> Election:
    mine = election()
    mine.read(NOBODY, 0)
    mine.wrote(Lease("me", DURATION, "1", 1, "then"), 0, 0)
    assert mine.leads(0)
    return mine
