"""What each scorer says of a few pods."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorers import SCORERS
from scorers.active import Active
from scorers.context_length import ContextLength
from scorers.inflight import Inflight
from scorers.kv import KV
from scorers.label import Label
from scorers.load_aware import LoadAware
from scorers.lora import Lora
from scorers.no_hit_lru import NoHitLru
from scorers.pods import Adapters, Scorer
from scorers.prefix import Prefix
from scorers.queue import Queue
from scorers.running import Running
from scorers.session import Session
from scorers.token_load import TokenLoad
from scorers.uncached import Uncached
from tests.scorers.columns import Ask, pods


def scores(scorer: Scorer, request: Ask, count: int, **columns: Any) -> list[float]:
    return [round(float(score), 4) for score in scorer.score(request, pods(count, **columns))]


def test_prefix_is_the_matched_share_of_the_prompt():
    assert scores(Prefix(), Ask(1000), 4, matched_tokens=[0, 250, 1000, 1200]) == [0, 0.25, 1, 1]


def test_prefix_of_a_request_without_a_prompt_is_zero():
    assert scores(Prefix(), Ask(0), 2) == [0, 0]


@pytest.mark.parametrize(("scorer", "column"), [(Queue(), "waiting"), (Running(), "running")])
class TestMinMax:
    def test_the_shortest_has_one_and_the_longest_zero(self, scorer, column):
        assert scores(scorer, Ask(), 3, **{column: [10, 0, 5]}) == [0, 1, 0.5]

    def test_equal_pods_have_one(self, scorer, column):
        assert scores(scorer, Ask(), 2, **{column: [3, 3]}) == [1, 1]

    def test_one_that_never_told_is_unscored_and_no_bound(self, scorer, column):
        assert scores(scorer, Ask(), 3, **{column: [4, nan, 2]}) == [0, 0, 1]

    def test_told_zero_is_not_untold(self, scorer, column):
        assert scores(scorer, Ask(), 2, **{column: [0, nan]}) == [1, 0]

    def test_nobody_told(self, scorer, column):
        assert scores(scorer, Ask(), 2, **{column: [nan, nan]}) == [0, 0]


def test_token_load_counts_what_is_ahead_and_what_is_not_held():
    columns = {"inflight_tokens": [0, 500, 500, 9000], "matched_tokens": [0, 0, 1000, 0]}
    assert scores(TokenLoad(threshold=2000), Ask(1000), 4, **columns) == [0.5, 0.25, 0.75, 0]


def test_active_prefers_idle_pods_and_then_is_relative_to_the_busiest():
    columns = {"inflight": [0, 2, 3, 8]}
    assert scores(Active(), Ask(), 4, **columns) == [1, 0.75, 0.625, 0]
    assert scores(Active(idle=2, busy=0.5), Ask(), 4, **columns) == [1, 1, 0.3125, 0]
    assert scores(Active(), Ask(), 2) == [1, 1]


def test_load_aware_falls_from_a_half_to_nothing():
    columns = {"waiting": [0, 32, 128, 500, nan]}
    assert scores(LoadAware(), Ask(), 5, **columns) == [0.5, 0.375, 0, 0, 0]


def test_kv_is_the_free_share():
    assert scores(KV(), Ask(), 4, kv_usage=[0, 0.25, 1, nan]) == [1, 0.75, 0, 0]


def test_inflight_falls_by_the_same_step_whatever_the_worst_pod_has():
    scorer = Inflight(span=10)
    assert scores(scorer, Ask(), 3, inflight=[1, 2, 3]) == [1, 0.9, 0.8]
    assert scores(scorer, Ask(), 3, inflight=[1, 2, 100]) == [1, 0.9, 0]


class TestUncached:
    def test_an_idle_pool_prefers_what_is_cached(self):
        scorer = Uncached(span=1000, patience=1)
        assert scores(scorer, Ask(800), 3, matched_tokens=[0, 400, 800]) == [0.2, 0.6, 1]

    def test_waiting_as_long_as_a_recomputation_is_even_at_patience_one(self):
        scorer = Uncached(patience=1)
        warm = {"matched_tokens": [4000, 0], "inflight_tokens": [4000, 0]}
        assert scores(scorer, Ask(4000), 2, **warm) == [1, 1]

    def test_patience_waits_longer_for_a_warm_pod_and_then_gives_up(self):
        for ahead, best in ((7900, 0), (8100, 1)):
            columns = pods(2, matched_tokens=[4000, 0], inflight_tokens=[ahead, 0])
            assert Uncached(patience=2).score(Ask(4000), columns).argmax() == best

    def test_requests_of_others_in_the_queue_count(self):
        columns = pods(2, matched_tokens=[1000, 0], waiting=[50, 0])
        assert Uncached(waiting_tokens=100).score(Ask(1000), columns).argmax() == 1
        assert Uncached(waiting_tokens=0).score(Ask(1000), columns).argmax() == 0

    def test_own_tokens_are_not_counted_twice_for_their_place_in_the_queue(self):
        scorer = Uncached(span=1000, waiting_tokens=100)
        assert scores(scorer, Ask(0), 2, inflight_tokens=[500, 0], waiting=[3, 0]) == [0.5, 1]

    def test_a_queue_that_was_never_told_leaves_our_own_tokens(self):
        scorer = Uncached(span=1000)
        assert scores(scorer, Ask(0), 2, inflight_tokens=[500, 0], waiting=[nan, nan]) == [0.5, 1]

    def test_more_matched_than_estimated_is_no_bonus(self):
        scorer = Uncached(span=1000, patience=1)
        assert scores(scorer, Ask(100), 2, matched_tokens=[100, 160]) == [1, 1]


def test_lora_tells_loaded_free_waiting_and_full_apart():
    adapters = [
        Adapters(frozenset({"m", "x"}), frozenset(), 2),
        Adapters(frozenset({"x"}), frozenset(), 2),
        Adapters(frozenset({"x", "y"}), frozenset({"m"}), 2),
        Adapters(frozenset({"x"}), frozenset({"y"}), 2),
        Adapters(frozenset({"x"}), frozenset({"x"}), 2),  # one adapter, one slot
        Adapters(),
    ]
    assert scores(Lora(), Ask(), 6, adapters=adapters) == [1, 0.8, 0.6, 0, 0.8, 0]
    assert scores(Lora(), Ask(model=None), 6, adapters=adapters) == [0] * 6


def test_session_marks_its_pod():
    assert scores(Session(), Ask(), 3, session=[False, True, False]) == [0, 1, 0]


class TestNoHitLru:
    def test_the_least_recently_used_comes_first(self):
        assert scores(NoHitLru(), Ask(), 3, cold_at=[30, 10, 20]) == [0, 1, 0.5]

    def test_never_used_comes_before_all_and_is_even(self):
        assert scores(NoHitLru(), Ask(), 3, cold_at=[5, 0, 0]) == [0, 1, 1]

    def test_a_prompt_that_anybody_holds_is_neutral(self):
        columns = {"cold_at": [30, 10], "matched_tokens": [0, 16]}
        assert scores(NoHitLru(), Ask(), 2, **columns) == [0.5, 0.5]

    def test_a_single_pod_is_neutral(self):
        assert scores(NoHitLru(), Ask(), 1, cold_at=[3]) == [0.5]


def test_label_wants_what_the_header_says():
    scorer = Label(header="X-Zone", label="zone")
    labels = [{"zone": "a"}, {"zone": "b"}, {}]
    assert scores(scorer, Ask(headers={"x-zone": "b"}), 3, labels=labels) == [0, 1, 0]
    assert scores(scorer, Ask(), 3, labels=labels) == [0, 0, 0]


class TestContextLength:
    OURS, THEIRS = "warmpath.io/context-length-range", "llm-d.ai/context-length-range"

    def test_a_range_that_fits_beats_one_that_does_not(self):
        labels = [{self.OURS: "0-4096"}, {self.OURS: "4097-32768"}, {}]
        short = scores(ContextLength(), Ask(1000), 3, labels=labels)
        long = scores(ContextLength(), Ask(20_000), 3, labels=labels)
        assert short[0] > short[2] > short[1]
        assert long[1] > long[2] > long[0]

    def test_the_published_formula(self):
        labels = [{self.OURS: "0-10000"}, {self.OURS: "3000-4000"}]
        inside = 0.3 + 0.7 * (0.7 / 2 + 0.3 * 0.8)
        got = scores(ContextLength(), Ask(2000), 2, labels=labels)
        assert got == [pytest.approx(inside), pytest.approx(0.3 / 2)]

    def test_bounds_are_inside(self):
        labels = [{self.OURS: "10-10"}, {self.OURS: "0-9"}]
        assert scores(ContextLength(), Ask(10), 2, labels=labels)[0] > 0.7

    def test_the_label_of_llm_d_is_understood_and_ours_goes_first(self):
        labels = [{self.THEIRS: "0-4096"}, {self.THEIRS: "0-1", self.OURS: "0-4096"}]
        first, second = scores(ContextLength(), Ask(10), 2, labels=labels)
        assert first == second > 0.5

    @pytest.mark.parametrize(
        "text", ["", "5", "9-1", "a-b", "-5-9", "1-2-3", "1e3-2e3", "0-" + "9" * 5000]
    )
    def test_a_label_that_cannot_be_read_is_zero(self, text):
        assert scores(ContextLength(), Ask(10), 1, labels=[{self.OURS: text}]) == [0]


NUMBERS = st.floats(0, 1e6, width=32) | st.just(nan)
PARAMETERS = {"label": {"header": "x-zone", "label": "zone"}}


@pytest.mark.parametrize("name", list(SCORERS))
@given(data=st.data())
def test_every_score_is_a_float32_from_zero_to_one(name, data):
    count = data.draw(st.integers(1, 5))

    def draw(numbers: st.SearchStrategy[float]) -> list[float]:
        return data.draw(st.lists(numbers, min_size=count, max_size=count))

    candidates = pods(
        count,
        waiting=draw(NUMBERS),
        running=draw(NUMBERS),
        kv_usage=draw(st.floats(0, 1, width=32) | st.just(nan)),
        inflight=draw(st.integers(0, 10_000)),
        inflight_tokens=draw(st.integers(0, 10_000_000)),
        matched_tokens=draw(st.integers(0, 100_000)),
        cold_at=draw(st.floats(0, 1e9)),
    )
    before = [np.copy(column) for column in (candidates.waiting, candidates.inflight_tokens)]
    column = SCORERS[name](**PARAMETERS.get(name, {})).score(
        Ask(data.draw(st.integers(0, 100_000))), candidates
    )
    assert column.dtype == np.float32
    assert column.shape == (count,)
    assert ((column >= 0) & (column <= 1)).all()
    for was, now in zip(before, (candidates.waiting, candidates.inflight_tokens), strict=True):
        np.testing.assert_array_equal(was, now)
