from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picker.director import Outcome
from picker.tickets import LEASE, MAX_ENDED, Tickets
from picker.usage import Usage

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])


class Picked:
    """A pick that counts its ends."""

    def __init__(self) -> None:
        self.ends: list[Outcome] = []

    def response_started(self, status: int, served_by: str | None = None) -> None: ...
    def first_token(self, after: float | None = None) -> None: ...

    def end(
        self, outcome: Outcome, usage: Usage | None = None, *, after: float | None = None
    ) -> None:
        self.ends.append(outcome)


def test_who_closes_a_ticket_ends_its_pick() -> None:
    tickets, pick = Tickets(), Picked()
    tickets.open("a", pick)
    assert tickets.renew("a") is pick
    assert tickets.close("a") is pick
    assert tickets.close("a") is None
    assert tickets.renew("a") is None
    assert pick.ends == []
    assert len(tickets) == 0


def test_a_pick_whose_request_is_already_over_ends_as_it_opens() -> None:
    tickets, pick = Tickets(), Picked()
    tickets.ended_early("a")
    tickets.open("a", pick)
    assert pick.ends == [Outcome.ABORTED]
    assert len(tickets) == 0


def test_names_that_ended_are_remembered_within_bounds() -> None:
    tickets, late, long_gone = Tickets(), Picked(), Picked()
    for number in range(MAX_ENDED + 1):
        tickets.ended_early(str(number))
    tickets.open("0", long_gone)
    tickets.open("1", late)
    assert long_gone.ends == []
    assert late.ends == [Outcome.ABORTED]


def test_a_request_that_is_asked_about_twice_counts_once() -> None:
    tickets, first, second = Tickets(), Picked(), Picked()
    tickets.open("a", first)
    tickets.open("a", second)
    assert first.ends == [Outcome.ABORTED]
    assert tickets.close("a") is second


def test_a_ticket_without_news_ends_and_one_with_news_stays() -> None:
    tickets, silent, told = Tickets(), Picked(), Picked()
    tickets.open("silent", silent)
    tickets.open("told", told)
    for _ in range(LEASE):
        tickets.sweep()
        tickets.renew("told")
    assert silent.ends == []
    tickets.sweep()
    assert silent.ends == [Outcome.ABORTED]
    assert told.ends == []
    assert len(tickets) == 1


def test_a_log_that_never_came_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for told in (False, True):
        caplog.clear()
        tickets = Tickets()
        if told:
            tickets.close("other")
        tickets.open("a", Picked())
        for _ in range(LEASE + 1):
            tickets.sweep()
        assert ("access log" in caplog.text) is not told
        assert "1 requests" in caplog.text


def test_the_table_is_bounded() -> None:
    tickets, picks = Tickets(max_open=2), [Picked() for _ in range(3)]
    for number, pick in enumerate(picks[:2]):
        tickets.open(str(number), pick)
    tickets.renew("0")
    tickets.open("2", picks[2])
    assert [pick.ends for pick in picks] == [[], [Outcome.ABORTED], []]
    assert len(tickets) == 2


def test_abandoned_picks_end() -> None:
    tickets, picks = Tickets(), [Picked(), Picked()]
    for number, pick in enumerate(picks):
        tickets.open(str(number), pick)
    tickets.abandon()
    assert [pick.ends for pick in picks] == [[Outcome.ABORTED]] * 2
    assert len(tickets) == 0


class Orders(RuleBasedStateMachine):
    """Whatever is told, in whatever order, no pick ends twice, and none that is not open stays."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets = Tickets(max_open=3)
        self.picks: list[Picked] = []

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        self.picks.append(Picked())
        self.tickets.open(name, self.picks[-1])

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        pick = self.tickets.close(name)
        if pick is not None:
            pick.end(Outcome.COMPLETED)
        else:
            self.tickets.ended_early(name)

    @rule(name=NAMES)
    def renew(self, name: str) -> None:
        pick = self.tickets.renew(name)
        assert pick is None or (isinstance(pick, Picked) and not pick.ends)

    @rule(times=st.integers(1, LEASE + 1))
    def sweep(self, times: int) -> None:
        for _ in range(times):
            self.tickets.sweep()

    @invariant()
    def ended_once(self) -> None:
        assert all(len(pick.ends) <= 1 for pick in self.picks)
        assert sum(not pick.ends for pick in self.picks) == len(self.tickets) <= 3


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=60, deadline=None)
