"""Which pods each filter keeps."""

from __future__ import annotations

from math import nan

import pytest

from picker.filters import Capacity, Filter, Label, Warm
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
