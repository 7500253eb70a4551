"""How urgent a request says to be, and how far it is believed."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.config import Duration
from picker.config import Flow as Settings
from picker.lengths import Lengths
from picker.objectives import Objectives

OBJECTIVE = "x-gateway-inference-objective"
DEADLINE = "x-slo-ttft-ms"


def test_an_objective_has_its_priority():
    objectives = Objectives(Settings(objectives={"chat": 10, "batch": -1}))
    assert objectives.priority({OBJECTIVE: "chat"}) == 10
    assert objectives.priority({OBJECTIVE: "batch"}) == -1
    assert objectives.priority({OBJECTIVE: "unknown"}) == 0
    assert objectives.priority({}) == 0
    assert objectives.headers == (OBJECTIVE,)


def test_a_priority_is_believed_only_from_a_header_that_is_named():
    assert Objectives(Settings()).priority({"x-priority": "50"}) == 0
    objectives = Objectives(Settings(priority_header="X-Priority", objectives={"chat": 10}))
    assert objectives.priority({"x-priority": "50", OBJECTIVE: "chat"}) == 50
    assert objectives.priority({"x-priority": "-3"}) == -3
    assert objectives.priority({"x-priority": "9999999"}) == 100
    assert objectives.priority({"x-priority": "soon", OBJECTIVE: "chat"}) == 10
    assert objectives.headers == ("x-priority", OBJECTIVE)


def test_a_deadline_orders_where_deadlines_do():
    objectives = Objectives(Settings(order="deadline"))
    assert objectives.patience({DEADLINE: "250"}) == 0.25
    assert objectives.patience({DEADLINE: "-1"}) == 60.0
    assert objectives.patience({}) == 60.0
    assert objectives.headers == (DEADLINE,)
    assert Objectives(Settings()).patience({DEADLINE: "250"}) == 60.0
    assert Objectives(Settings(ttl=Duration(0))).patience({}) == inf


@given(st.text(alphabet="0123456789-+eE._ \u0661", max_size=15))
@settings(deadline=None)
def test_whatever_a_header_says_it_is_a_priority_and_a_deadline(text: str):
    objectives = Objectives(Settings(order="deadline", priority_header="p"))
    assert -100 <= objectives.priority({"p": text}) <= 100
    assert 0 <= objectives.patience({DEADLINE: text}) <= 1e6


def test_what_is_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"flow\.objectives: 'chat' must be between -100 and 100"):
        Objectives(Settings(objectives={"chat": 101}))
    with pytest.raises(ValueError, match=r"flow\.weights: 'alice' must be between 0.001 and"):
        Objectives(Settings(weights={"alice": 0.0}))


def test_a_tenants_next_answer_is_expected_to_be_like_its_last_ones():
    lengths = Lengths()
    assert lengths.expected("a") == 0
    for tokens in (1000, 10, 20, 30, 40, 50):
        lengths.learn("a", tokens)
    assert lengths.expected("a") == 30
    assert lengths.expected("a", most=25) == 25
    assert lengths.expected("b") == 0


def test_the_lengths_of_few_tenants_are_kept():
    lengths = Lengths()
    for number in range(30_000):
        lengths.learn(f"t{number}", 5)
    assert lengths.expected("t29999") == 5
    assert lengths.expected("t0") == 0
    assert len(lengths._last) == 10_000


def test_of_several_headers_the_first_that_is_there_tells():
    objectives = Objectives(
        Settings(
            objectives={"chat": 5, "batch": -1},
            objective_header="x-new,x-old",
            deadline_header="x-due, x-slo-ttft-ms",
            order="deadline",
        )
    )
    assert objectives.headers == ("x-new", "x-old", "x-due", "x-slo-ttft-ms")
    assert objectives.priority({"x-old": "chat"}) == 5
    assert objectives.priority({"x-old": "chat", "x-new": "batch"}) == -1
    assert objectives.priority({}) == 0
    assert objectives.patience({"x-slo-ttft-ms": "1500"}) == 1.5


def test_other_settings_keep_what_else_is_told():
    objectives = Objectives(Settings(objectives={"chat": 5}))
    objectives.update({"batch": -1, "chat": 9})
    objectives.reconfigure(Settings(objectives={"bulk": -2}, objective_header="x-o"))
    named = [objectives.priority({"x-o": name}) for name in ("batch", "chat", "bulk", "other")]
    assert named == [-1, 9, -2, 0]
    with pytest.raises(ValueError, match="'bulk' must be between"):
        objectives.reconfigure(Settings(objectives={"bulk": -101}))
    assert objectives.priority({"x-o": "bulk"}) == -2
