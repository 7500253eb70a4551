"""Filters, scorers, chooser and fallbacks together: where requests go, and what is told of it."""

from __future__ import annotations

import sys
from collections import Counter
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.config import PickerSection, Scheduling
from picker.refusal import Refusal
from picker.schedule import EXPLAINED, Decision, Scheduler
from scorers.pods import Pods
from tests.scorers.columns import Ask, pods

REFERENCE = {"prefix": 3, "queue": 2, "kv": 2}  # the reference picker's weights
OWN = "tests.picker.own_scorer:LongestName"


def scheduler(
    scorers: dict[str, Any] | None = None, filters: list[Any] | None = None, **picker: Any
) -> Scheduler:
    settings = Scheduling(
        scorers=scorers or {}, filters=filters or [], picker=PickerSection(**picker)
    )
    return Scheduler(settings, random=np.random.default_rng(7))


def picks(made: Scheduler, request: Ask, candidates: Pods, rounds: int = 200) -> set[str]:
    """Everyone who is ever picked first."""
    return {made.schedule(request, candidates).endpoints[0] for _ in range(rounds)}


class TestWeights:
    def test_the_weighted_sum_decides(self):
        columns = {"waiting": [4, 0], "kv_usage": [0.0, 0.9]}
        assert picks(scheduler({"queue": 2, "kv": 1}), Ask(), pods(2, **columns)) == {"a:2"}
        assert picks(scheduler({"queue": 1, "kv": 2}), Ask(), pods(2, **columns)) == {"a:1"}

    def test_the_decision_tells_scores_weights_totals_and_matches(self):
        columns = {"waiting": [4, 0, 2], "kv_usage": [0.5, 0, 1], "matched_tokens": [500, 0, 100]}
        decision = scheduler(REFERENCE).schedule(Ask(1000), pods(3, **columns))
        assert list(decision.candidates) == ["a:1", "a:2", "a:3"]
        assert decision.considered == 3
        assert decision.weights == (("prefix", 3), ("queue", 2), ("kv", 2))
        assert decision.scores["prefix"] == pytest.approx([0.5, 0, 0.1])
        assert decision.scores["queue"] == pytest.approx([0, 1, 0.5])
        assert decision.scores["kv"] == pytest.approx([0.5, 1, 0])
        assert decision.total == pytest.approx([2.5, 4, 1.3])
        assert list(decision.matched) == [500, 0, 100]
        assert decision.endpoints == ("a:2", "a:1")

    def test_zero_is_off_and_a_missing_weight_is_one(self):
        made = scheduler({"queue": 0, "kv": {}, "running": {"weight": 0}})
        columns = pods(2, waiting=[0, 9], kv_usage=[0.9, 0])
        decision = made.schedule(Ask(), columns)
        assert decision.weights == (("kv", 1),)
        assert decision.endpoints[0] == "a:2"

    def test_with_everything_off_each_pod_is_as_good(self):
        assert picks(scheduler({"queue": 0}), Ask(), pods(3)) == {"a:1", "a:2", "a:3"}

    def test_parameters_reach_the_scorer(self):
        columns = pods(2, matched_tokens=[1000, 0], inflight_tokens=[1500, 0])
        patient = {"uncached": {"weight": 2, "patience": 2, "span": 10_000}}
        hasty = {"uncached": {"patience": 1, "waitingTokens": 0}}
        assert picks(scheduler(patient), Ask(1000), columns) == {"a:1"}
        assert picks(scheduler(hasty), Ask(1000), columns) == {"a:2"}

    def test_what_a_scorer_says_is_clamped_and_nan_is_nothing(self):
        decision = scheduler({OWN: 2}).schedule(Ask(), pods(4))
        assert list(decision.scores[OWN]) == [1, 0, 0, 0.5]
        assert list(decision.total) == [2, 0, 0, 1]

    def test_a_scorer_of_ones_own_takes_parameters(self):
        decision = scheduler({OWN: {"timesTen": 0.05}}).schedule(Ask(), pods(1))
        assert list(decision.total) == [0.5]

    @given(data=st.data())
    def test_equal_pods_have_equal_totals_wherever_they_stand(self, data):
        """Or a tie would always have the same winner."""
        count = data.draw(st.integers(2, 70))
        one = {
            "waiting": data.draw(st.integers(0, 50)),
            "kv_usage": data.draw(st.floats(0, 1, width=32)),
            "inflight_tokens": data.draw(st.integers(0, 10**6)),
            "inflight": data.draw(st.integers(0, 300)),
        }
        columns = {name: [value] * (count - 1) + [0] for name, value in one.items()}
        made = scheduler({"queue": 0.7, "kv": 0.3, "uncached": 1.1, "inflight": 0.13})
        totals = made.schedule(Ask(), pods(count, **columns)).total
        assert len(set(totals[:-1].tolist())) == 1


class TestFresh:
    def test_a_pod_that_does_not_tell_is_never_picked_as_idle(self):
        columns = {"waiting": [2, nan], "kv_usage": [0.9, nan], "inflight": [5, 0]}
        candidates = pods(2, fresh=[True, False], **columns)
        for made in (scheduler(), scheduler(REFERENCE), scheduler({"inflight": 1}, ["warm"])):
            decision = made.schedule(Ask(), candidates)
            assert decision.endpoints == ("a:1",)
            assert decision.dropped[0] == ("fresh", 1)

    def test_not_even_where_it_is_warm_or_listed_last(self):
        candidates = pods(2, fresh=[True, False], matched_tokens=[0, 1000])
        made = scheduler(filters=["warm", "fresh"])
        assert made.schedule(Ask(1000), candidates).endpoints == ("a:1",)

    def test_if_none_tells_one_is_picked_all_the_same(self):
        candidates = pods(3, fresh=[False] * 3, waiting=[nan] * 3, kv_usage=[nan] * 3)
        decision = scheduler(REFERENCE).schedule(Ask(), candidates)
        assert decision.endpoints[0] in candidates.addresses
        assert decision.dropped == ()


class TestFilters:
    LABELS = ({"role": "decode"}, {"role": "prefill"}, {"role": "decode"})

    def test_a_label_is_required_for_fallbacks_too(self):
        made = scheduler(
            filters=[{"type": "label", "matchLabels": {"role": "decode"}}], fallbacks=5
        )
        decision = made.schedule(Ask(), pods(3, labels=self.LABELS))
        assert set(decision.endpoints) == {"a:1", "a:3"}
        assert decision.dropped == (("label", 1),)
        assert list(decision.candidates) == ["a:1", "a:3"]

    def test_a_label_that_nobody_has_is_503(self):
        made = scheduler(filters=[{"type": "label", "matchLabels": {"role": "x"}}])
        with pytest.raises(Refusal) as refused:
            made.schedule(Ask(), pods(3, labels=self.LABELS))
        assert refused.value.status == 503
        assert refused.value.reason == "no_endpoints"
        assert refused.value.retry_after == 1

    def test_a_stale_pod_that_may_serve_beats_a_fresh_one_that_may_not(self):
        made = scheduler(filters=[{"type": "label", "matchLabels": {"role": "decode"}}])
        candidates = pods(2, labels=[{"role": "decode"}, {}], fresh=[False, True])
        decision = made.schedule(Ask(), candidates)
        assert decision.endpoints == ("a:1",)
        assert decision.dropped == (("label", 1),)
        both = pods(3, labels=[{"role": "decode"}] * 2 + [{}], fresh=[False, True, True])
        assert made.schedule(Ask(), both).endpoints == ("a:2",)

    def test_warm_pods_are_preferred_and_cold_ones_are_fallbacks(self):
        columns = {"matched_tokens": [0, 1000, 0], "waiting": [0, 3, 1]}
        made = scheduler({"queue": 1}, ["warm"], fallbacks=2)
        decision = made.schedule(Ask(1000), pods(3, **columns))
        assert decision.endpoints == ("a:2", "a:1", "a:3")
        assert decision.dropped == (("warm", 2),)
        assert decision.considered == 1

    def test_a_preference_that_keeps_nobody_is_ignored(self):
        made = scheduler({"queue": 1}, ["warm", {"type": "capacity", "waiting": 1}])
        decision = made.schedule(Ask(), pods(2, waiting=[5, 3]))
        assert decision.endpoints[0] == "a:2"
        assert decision.dropped == ()

    def test_a_preference_sees_only_pods_that_are_allowed(self):
        """The idle pod with another role does not make the warm one look saturated."""
        filters = ["warm", {"type": "label", "matchLabels": {"role": "decode"}}]
        columns = {"matched_tokens": [1000, 0, 0], "inflight_tokens": [50_000, 0, 50_000]}
        made = scheduler({"inflight": 1}, filters)
        candidates = pods(3, labels=self.LABELS, **columns)
        assert made.schedule(Ask(1000), candidates).endpoints == ("a:1", "a:3")

    def test_without_pods_it_is_503(self):
        with pytest.raises(Refusal, match="no endpoint"):
            scheduler().schedule(Ask(), pods(0))


class TestFallbacks:
    def test_they_are_the_next_best_and_distinct(self):
        made = scheduler({"queue": 1}, fallbacks=2)
        assert made.schedule(Ask(), pods(4, waiting=[3, 0, 1, 2])).endpoints == (
            "a:2",
            "a:3",
            "a:4",
        )

    def test_no_more_than_there_are(self):
        assert scheduler(fallbacks=3).schedule(Ask(), pods(1)).endpoints == ("a:1",)
        assert scheduler(fallbacks=0).schedule(Ask(), pods(3)).endpoints[1:] == ()

    def test_equal_ones_take_turns(self):
        made = scheduler({"queue": 1})
        candidates = pods(4, waiting=[0, 1, 1, 1])
        seconds = {made.schedule(Ask(), candidates).endpoints[1] for _ in range(100)}
        assert seconds == {"a:2", "a:3", "a:4"}

    @pytest.mark.parametrize("kind", ["maxScore", "weightedRandom", "softmax", "powerOfTwo"])
    def test_every_chooser_has_them(self, kind):
        made = scheduler({"queue": 1}, type=kind, fallbacks=2)
        for _ in range(50):
            endpoints = made.schedule(Ask(), pods(4, waiting=[3, 0, 1, 2])).endpoints
            assert len(set(endpoints)) == 3


class TestManyPods:
    def test_of_many_candidates_the_best_are_told(self):
        count = 3 * EXPLAINED
        waiting = np.arange(count)
        decision = scheduler({"queue": 1}).schedule(Ask(), pods(count, waiting=waiting))
        assert decision.considered == count
        assert set(decision.candidates) == {f"a:{n}" for n in range(1, EXPLAINED + 1)}
        told = dict(zip(decision.candidates, decision.scores["queue"], strict=True))
        assert told["a:1"] == 1
        assert told["a:31"] == pytest.approx(1 - 30 / (count - 1))

    def test_the_chosen_is_told_however_bad(self):
        count = 3 * EXPLAINED
        made = scheduler({"queue": 1}, type="softmax", temperature=1e6)
        for _ in range(20):
            decision = made.schedule(Ask(), pods(count, waiting=np.arange(count)))
            assert set(decision.endpoints) <= set(decision.candidates)
            assert len(decision.candidates) == EXPLAINED

    def test_a_thousand_decisions_about_a_thousand_pods_stay_small(self):
        count = 1000
        made = scheduler(dict.fromkeys(("prefix", "queue", "kv", "running", "inflight"), 1))
        candidates = pods(count, waiting=np.arange(count))
        assert _bytes(made.schedule(Ask(), candidates), candidates) < 30_000

    def test_a_decision_does_not_change_with_the_pods(self):
        candidates = pods(2, matched_tokens=[7, 0])
        decision = scheduler().schedule(Ask(), candidates)
        candidates.matched_tokens[:] = 99
        assert list(decision.matched) == [7, 0]


def _bytes(decision: Decision, candidates: Pods) -> int:
    """Memory of what a decision alone keeps alive."""
    assert decision.candidates is not candidates.addresses
    columns = decision.total.base
    base = columns.base if columns.base is not None else columns
    return base.nbytes + sys.getsizeof(decision.candidates) + 1000


class TestDefaultPolicy:
    def test_idle_equal_pods_get_equal_shares_of_distinct_prompts(self):
        made = scheduler()
        counts = Counter(made.schedule(Ask(), pods(4)).endpoints[0] for _ in range(400))
        assert set(counts) == {"a:1", "a:2", "a:3", "a:4"}
        assert all(60 <= count <= 140 for count in counts.values())

    def test_a_prompt_goes_where_its_prefix_is(self):
        candidates = pods(3, matched_tokens=[0, 900, 0], inflight=[0, 3, 0])
        assert picks(scheduler(), Ask(1000), candidates) == {"a:2"}

    def test_among_warm_pods_to_the_less_busy(self):
        candidates = pods(3, matched_tokens=[900, 900, 0], inflight=[5, 2, 0])
        assert picks(scheduler(), Ask(1000), candidates) == {"a:2"}

    def test_a_cold_prompt_does_not_go_to_the_busy_pod(self):
        for busy in ({"waiting": [50, 0]}, {"inflight": [9, 0]}, {"inflight_tokens": [3000, 0]}):
            assert picks(scheduler(), Ask(), pods(2, **busy)) == {"a:2"}, busy

    def test_a_warm_pod_with_a_deep_queue_loses_once_waiting_costs_more_than_recomputing(self):
        for ahead, best in ((3000, "a:1"), (20_000, "a:2")):
            candidates = pods(2, matched_tokens=[4000, 0], inflight_tokens=[ahead, 0])
            assert picks(scheduler(), Ask(4000), candidates) == {best}
        queue = pods(2, matched_tokens=[4000, 0], waiting=[50, 0])
        assert picks(scheduler(), Ask(4000), queue) == {"a:2"}

    def test_a_prefix_that_everybody_shares_does_not_overload_its_pod(self):
        candidates = pods(4, matched_tokens=[1000, 0, 0, 0], inflight=[60, 2, 1, 2])
        assert picks(scheduler(), Ask(1000), candidates) == {"a:3"}

    def test_a_burst_between_two_scrapes_spreads(self):
        """Metrics stand still; only our own counts move."""
        made, candidates = scheduler(), pods(2)
        counts: Counter[str] = Counter()
        for _ in range(500):
            endpoint = made.schedule(Ask(500), candidates).endpoints[0]
            row = candidates.addresses.index(endpoint)
            candidates.waiting[row] += 1
            candidates.inflight[row] += 1
            candidates.inflight_tokens[row] += 500
            counts[endpoint] += 1
        assert max(counts.values()) - min(counts.values()) <= 2

    def test_a_burst_of_one_new_prompt_stays_together_while_that_is_cheaper(self):
        made, candidates = scheduler(), pods(4)
        counts: Counter[int] = Counter()
        for _ in range(6):
            endpoint = made.schedule(Ask(4000), candidates).endpoints[0]
            row = candidates.addresses.index(endpoint)
            candidates.inflight[row] += 1
            candidates.waiting[row] += 1
            candidates.inflight_tokens[row] += 4000 - candidates.matched_tokens[row]
            candidates.matched_tokens[row] = 4000  # learnt from the pick
            counts[row] += 1
        assert list(counts.values()) == [6]

    def test_filters_alone_keep_the_default_scorers(self):
        made = scheduler(filters=[{"type": "capacity", "inflight": 100}])
        candidates = pods(2, matched_tokens=[900, 0])
        assert picks(made, Ask(1000), candidates) == {"a:1"}

    def test_it_needs_no_sessions(self):
        assert not scheduler().uses_sessions


def test_sessions_are_needed_once_a_scorer_reads_them():
    assert scheduler({"session": 1}).uses_sessions
    assert scheduler({OWN: 1}).uses_sessions
    assert not scheduler({"session": 0, "queue": 1}).uses_sessions


def test_the_same_seed_picks_the_same():
    candidates = pods(5)
    first, second = ([scheduler().schedule(Ask(), candidates).endpoints] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scorers": {"prefx": 1}}, ["'prefx'", "did you mean 'prefix'"]),
        ({"scorers": {"zzz": 1}}, ["'zzz'", "known: active, contextLength"]),
        ({"scorers": {"uncached": {"patiense": 1}}}, ["'patiense'", "did you mean 'patience'"]),
        ({"scorers": {"queue": {"depth": 1}}}, ["'depth'", "it takes none"]),
        ({"scorers": {"uncached": {"span": "x"}}}, ["'uncached'", "span", "float"]),
        ({"scorers": {"uncached": {"waitingTokens": []}}}, ["waitingTokens", "float"]),
        ({"scorers": {"uncached": {"span": 0}}}, ["span must be above 0"]),
        ({"scorers": {"inflight": {"span": -1}}}, ["span must be above 0"]),
        ({"scorers": {"uncached": {"patience": -1}}}, ["must not be negative"]),
        ({"scorers": {"label": 1}}, ["'label'", "header"]),
        ({"scorers": {"label": {"header": "", "label": "a"}}}, ["must not be empty"]),
        ({"scorers": {"queue": -1}}, ["'queue'", "weight must be 0 or more"]),
        ({"scorers": {"queue": nan}}, ["'queue'", "weight must be 0 or more"]),
        ({"scorers": {"queue": float("inf")}}, ["weight must be 0 or more"]),
        ({"scorers": {"queue": {"weight": "2"}}}, ["weight must be a number", "'2'"]),
        ({"scorers": {"queue": {"weight": True}}}, ["weight must be a number"]),
        ({"scorers": {"no.such.module:Class": 1}}, ["cannot load", "no.such.module:Class"]),
        ({"scorers": {"tests.picker.own_scorer:Missing": 1}}, ["cannot load", "Missing"]),
        ({"scorers": {"tests.picker.own_scorer:not_a_class": 1}}, ["is not a class"]),
        ({"scorers": {"tests.picker.own_scorer:NoDataclass": 1}}, ["must be a dataclass"]),
        ({"scorers": {":X": 1}}, ["cannot load", "':X'"]),
        ({"filters": ["wram"]}, ["unknown filter 'wram'", "did you mean 'warm'"]),
        ({"filters": [{"share": 0.5}]}, ["needs a type", "warm"]),
        ({"filters": [{"type": "warm", "shared": 0.5}]}, ["'shared'", "did you mean 'share'"]),
        ({"filters": [{"type": "label"}]}, ["matchLabels"]),
        ({"filters": [{"type": "warm", "slack": -1}]}, ["must not be negative"]),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_known(settings, words):
    with pytest.raises(ValueError) as wrong:
        Scheduler(Scheduling(**settings))
    for word in words:
        assert word in str(wrong.value)
