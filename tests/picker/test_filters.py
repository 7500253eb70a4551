"""Which pods each filter keeps."""

from __future__ import annotations

from math import nan

import pytest

from picker.filters import Capacity, Expression, Filter, Label, LabelIn, Named, Session, Warm
from tests.scorers.columns import Ask, pods


def kept(kind: Filter, request: Ask, count: int, **columns: object) -> list[int]:
    return [int(row) for row in kind.keep(request, pods(count, **columns)).nonzero()[0]]


class TestWarm:
    def test_keeps_the_pods_that_hold_enough_of_the_prompt(self):
        assert kept(Warm(share=0.5), Ask(1000), 4, matched_tokens=[0, 499, 500, 1000]) == [2, 3]

    def test_keeps_nothing_of_cold_prompts_and_of_none(self):
        assert kept(Warm(), Ask(1000), 2) == []
        assert kept(Warm(), Ask(0), 2) == []

    def test_lets_go_when_all_warm_pods_are_behind_by_more_than_the_slack(self):
        columns = {"matched_tokens": [100, 100, 0]}
        filter_ = Warm(slack=500)
        assert kept(filter_, Ask(100), 3, inflight_tokens=[501, 500, 0], **columns) == [0, 1]
        assert kept(filter_, Ask(100), 3, inflight_tokens=[501, 502, 0], **columns) == [0, 1, 2]

    def test_stays_when_the_others_are_as_busy(self):
        columns = {"matched_tokens": [100, 0], "inflight_tokens": [9000, 9000]}
        assert kept(Warm(slack=500), Ask(100), 2, **columns) == [0]

    def test_a_deep_queue_counts_whoever_filled_it(self):
        columns = {"matched_tokens": [100, 0], "waiting": [50, 0]}
        assert kept(Warm(slack=500), Ask(100), 2, **columns) == [0, 1]


def test_capacity_keeps_what_is_below_every_limit():
    filter_ = Capacity(waiting=5, kv_usage=0.8)
    columns = {"waiting": [4, 5, 0, nan], "kv_usage": [0.7, 0.1, 0.8, nan]}
    assert kept(filter_, Ask(), 4, **columns) == [0, 3]
    assert kept(Capacity(running=2), Ask(), 3, running=[1, 2, 3]) == [0]
    assert kept(Capacity(inflight=2), Ask(), 3, inflight=[3, 2, 1]) == [2]
    assert kept(Capacity(), Ask(), 2, waiting=[1e9, 0]) == [0, 1]


def test_label_wants_every_label():
    labels = [{"role": "decode", "zone": "a"}, {"role": "decode"}, {"role": "prefill", "zone": "a"}]
    assert kept(Label({"role": "decode"}), Ask(), 3, labels=labels) == [0, 1]
    assert kept(Label({"role": "decode", "zone": "a"}), Ask(), 3, labels=labels) == [0]
    assert kept(Label({"role": "x"}), Ask(), 3, labels=labels) == []


@pytest.mark.parametrize("share", [0, -1, 1.1, nan])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        Warm(share=share)


@pytest.mark.parametrize(
    ("operator", "rows"),
    [("In", [0]), ("NotIn", [1, 2]), ("Exists", [0, 1]), ("DoesNotExist", [2])],
)
def test_label_selects_as_kubernetes_does(operator, rows):
    labels = [{"gpu": "h100"}, {"gpu": "t4"}, {}]
    values = ("h100", "a100") if "In" in operator else ()
    selector = Label(match_expressions=[Expression("gpu", operator, values)])
    assert kept(selector, Ask(), 3, labels=labels) == rows


def test_every_part_of_a_selector_counts():
    labels = [{"app": "a", "gpu": "t4"}, {"app": "a"}, {"app": "b", "gpu": "t4"}]
    selector = Label({"app": "a"}, [Expression("gpu", "Exists")])
    assert kept(selector, Ask(), 3, labels=labels) == [0]
    with pytest.raises(ValueError, match="must say something"):
        Label()


def test_label_in_takes_one_of_some_values_and_if_asked_pods_without_the_label():
    labels = [{"role": "decode"}, {"role": "prefill"}, {}]
    assert kept(LabelIn("role", ("decode", "both")), Ask(), 3, labels=labels) == [0]
    assert kept(LabelIn("role", ("decode",), missing=True), Ask(), 3, labels=labels) == [0, 2]


def test_session_keeps_its_pod_or_says_nothing():
    assert kept(Session(), Ask(), 3, session=[False, True, False]) == [1]
    assert kept(Session(), Ask(), 2) == []


@pytest.mark.parametrize(
    ("told", "rows"), [("a:2", [1]), ("a", [0, 1, 2]), (" a:3 ,a:1,x", [0, 2]), ("b:1", [])]
)
def test_named_pods_are_kept(told, rows):
    ask = Ask(headers={"test-epp-endpoint-selection": told})
    assert kept(Named(), ask, 3) == rows
    assert kept(Named(), Ask(), 3) == [0, 1, 2]
