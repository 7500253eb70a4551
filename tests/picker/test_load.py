"""How busy each pod is, as scorers see it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from picker.config import EndpointSpec
from picker.engines import LoadReport
from picker.load import MAX_PICKS, Load
from picker.pool import Endpoint, Pool
from scorers.pods import Adapters, Pods

REPORT = LoadReport(waiting=3.0, running=5.0, kv_usage=0.5, block_size=16, num_blocks=100)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A pool, its load, and a clock that is moved by hand."""

    def __init__(self, *addresses: str, stale_after: float = 2.0) -> None:
        self.pool, self.clock = Pool("test"), Clock()
        self.load = Load(self.pool, stale_after, clock=self.clock)
        self.update(*addresses)

    def update(self, *addresses: str, labels: Mapping[str, str] | None = None) -> None:
        self.pool.update([EndpointSpec(address=a, labels=dict(labels or {})) for a in addresses])

    def __getitem__(self, address: str) -> Endpoint:
        return self.pool.endpoints[address]

    def told(self, address: str, report: LoadReport = REPORT) -> None:
        """The pod answers a scrape that began now."""
        self.load.report(self[address], report, self.clock.now)

    def pods(self, session: Endpoint | None = None) -> Pods:
        matched = np.zeros(self.pool.capacity, np.float32)
        return self.load.pods(self.pool.slots, matched, session)

    def row(self, address: str) -> dict[str, float | bool]:
        pods = self.pods()
        row = list(pods.addresses).index(address)
        names = ("fresh", "waiting", "running", "kv_usage", "inflight", "inflight_tokens")
        return {name: getattr(pods, name)[row].item() for name in names}


A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


def test_a_pod_that_never_told_is_not_idle_but_unknown() -> None:
    scene = Scene(A, B)
    scene.told(A, LoadReport(0.0, 0.0, 0.0))
    assert scene.row(A) == {
        "fresh": True,
        "waiting": 0.0,
        "running": 0.0,
        "kv_usage": 0.0,
        "inflight": 0.0,
        "inflight_tokens": 0.0,
    }
    unknown = scene.row(B)
    assert unknown["fresh"] is False
    assert all(isnan(unknown[name]) for name in ("waiting", "running", "kv_usage"))
    assert scene.load.age(scene[B]) == inf


def test_a_pod_is_not_trusted_once_it_has_left_us_without_an_answer_for_too_long() -> None:
    scene = Scene(A)
    scene.load.asked(scene[A])
    assert scene.row(A)["fresh"] is False, "it never answered"
    began = scene.clock.now
    scene.clock.now += 1.5  # the page took that long
    scene.load.report(scene[A], REPORT, began)
    scene.clock.now = began + 10
    assert scene.row(A)["fresh"] is True, "nobody asked it"
    assert scene.load.age(scene[A]) == pytest.approx(10)
    scene.load.asked(scene[A])
    scene.clock.now += 1.5
    scene.load.failed(scene[A], "no whole page within 1 s")
    scene.load.asked(scene[A])
    scene.clock.now = began + 10 + 2
    assert scene.row(A)["fresh"] is True
    scene.clock.now += 0.001
    stale = scene.row(A)
    assert stale["fresh"] is False, "the first question counts"
    assert stale["waiting"] == 3.0, "the old number stays visible"
    scene.load.asked(scene[A])
    assert scene.row(A)["fresh"] is False
    scene.told(A)
    assert scene.row(A)["fresh"] is True


def test_failures_do_not_make_a_pod_look_idle_or_fresh() -> None:
    scene = Scene(A)
    scene.told(A)
    scene.load.failed(scene[A], "it answers with status 503")
    row, seen = scene.row(A), scene.load.describe(scene[A])
    assert (row["fresh"], row["waiting"], seen.error) == (True, 3.0, "it answers with status 503")
    scene.load.asked(scene[A])
    scene.clock.now += 3
    scene.load.failed(scene[A], "again")
    assert scene.row(A)["fresh"] is False
    scene.told(A)
    assert scene.load.describe(scene[A]).error is None


def test_a_pod_that_nobody_listens_on_is_not_trusted_for_another_moment() -> None:
    scene = Scene(A)
    scene.told(A)
    scene.load.failed(scene[A], "cannot connect: Connection refused", unreachable=True)
    scene.load.asked(scene[A])
    assert scene.row(A)["fresh"] is False
    assert scene.load.age(scene[A]) == 0.0


def test_a_missing_metric_leaves_the_others() -> None:
    scene = Scene(A)
    scene.told(A)
    scene.told(A, LoadReport(waiting=1.0, kv_usage=0.25))
    row = scene.row(A)
    assert (row["fresh"], row["waiting"], row["kv_usage"]) == (True, 1.0, 0.25)
    assert isnan(row["running"])


def test_a_missing_metric_and_a_failure_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(A, B)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            scene.told(A, LoadReport(waiting=1.0, kv_usage=0.25))
        for _ in range(3):
            scene.load.failed(scene[B], "no whole page within 1 s")
    assert [record.message for record in caplog.records] == [
        f"pod {A} does not tell running on its metrics page",
        f"pod {B} does not tell its load: no whole page within 1 s",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        scene.told(B)
        scene.load.failed(scene[B], "no whole page within 1 s")
    assert len(caplog.records) == 2, "it told again, then failed again"


def test_picks_between_two_scrapes_count_as_waiting() -> None:
    """No burst between two scrapes piles onto one pod."""
    scene = Scene(A, B)
    scene.told(A, LoadReport(0.0, 0.0, 0.0))
    scene.told(B, LoadReport(0.0, 0.0, 0.0))
    for _ in range(500):
        pods = scene.pods()
        address = pods.addresses[int(np.argmin(pods.waiting))]
        scene.clock.now += 0.001
        scene.load.picked(scene[address], cold=False)
    assert scene.row(A)["waiting"] == scene.row(B)["waiting"] == 250.0


def test_a_scrape_erases_only_picks_from_before_it_began() -> None:
    scene = Scene(A)
    scene.load.picked(scene[A], cold=False)
    scene.clock.now += 1
    began = scene.clock.now
    scene.clock.now += 1
    scene.load.picked(scene[A], cold=False)
    scene.load.picked(scene[A], cold=False)
    scene.load.report(scene[A], REPORT, began)
    assert scene.row(A)["waiting"] == 3.0 + 2
    scene.clock.now += 1
    scene.told(A)
    assert scene.row(A)["waiting"] == 3.0


def test_what_is_known_to_be_answered_waits_no_more_however_late_the_scrape() -> None:
    scene = Scene(A)
    scene.told(A)
    scene.clock.now += 1
    first = scene.load.picked(scene[A], cold=False)
    scene.clock.now += 1
    second = scene.load.picked(scene[A], cold=False)
    scene.load.waits_no_more(scene[A], second)
    scene.load.waits_no_more(scene[A], second)
    assert scene.row(A)["waiting"] == 3.0 + 1
    scene.load.report(scene[A], REPORT, first)
    assert scene.row(A)["waiting"] == 3.0
    scene.load.waits_no_more(scene[A], first)
    assert scene.row(A)["waiting"] == 3.0, "the page told of it already"


def test_picks_of_a_pod_that_is_never_scraped_take_bounded_memory() -> None:
    scene = Scene(A)
    scene.told(A)
    began = scene.clock.now
    scene.clock.now += 1
    for _ in range(MAX_PICKS + 10):
        scene.load.picked(scene[A], cold=False)
    assert scene.row(A)["waiting"] == 3.0 + MAX_PICKS + 10
    scene.load.report(scene[A], REPORT, began)
    assert scene.row(A)["waiting"] == 3.0 + MAX_PICKS


def test_the_scraper_hears_of_picks() -> None:
    scene = Scene(A, B)
    heard: list[Endpoint] = []
    scene.load.on_pick = heard.append
    scene.load.picked(scene[B], cold=False)
    assert heard == [scene[B]]


def test_cold_prompts_are_timed() -> None:
    scene = Scene(A, B, C)
    scene.load.picked(scene[B], cold=True)
    scene.clock.now += 1
    scene.load.picked(scene[B], cold=False)
    scene.load.picked(scene[C], cold=True)
    assert scene.pods().cold_at.tolist() == [0.0, 100.0, 101.0]


def test_our_own_requests_and_their_uncached_tokens() -> None:
    scene = Scene(A)
    pod = scene[A]
    scene.load.credit(pod, 1000)
    scene.load.credit(pod, 500)
    assert (scene.row(A)["inflight"], scene.row(A)["inflight_tokens"]) == (2, 1500)
    scene.load.release_tokens(pod, 1000)  # the first token came
    assert (scene.row(A)["inflight"], scene.row(A)["inflight_tokens"]) == (2, 500)
    scene.load.release(pod, 0)
    scene.load.release(pod, 500)  # it ended before its first token
    assert (scene.row(A)["inflight"], scene.row(A)["inflight_tokens"]) == (0, 0)
    scene.load.release(pod, 500)
    assert (scene.row(A)["inflight"], scene.row(A)["inflight_tokens"]) == (0, 0)


def test_large_sums_of_tokens_come_back_to_nothing() -> None:
    scene = Scene(A)
    sizes = [2**24 + 1, 3, 7, 2**25 + 5, 1]
    for size in sizes:
        scene.load.credit(scene[A], size)
    for size in sizes:
        scene.load.release(scene[A], size)
    assert scene.row(A)["inflight_tokens"] == 0.0


def test_what_happens_to_an_endpoint_that_is_gone_changes_nothing() -> None:
    scene = Scene(A, B)
    old = scene[A]
    scene.told(A)
    scene.load.credit(old, 100)
    picked_at = scene.load.picked(old, cold=True)
    scene.update(B)
    scene.update(A, B)
    assert scene[A].slot == old.slot
    woken: list[Endpoint] = []
    scene.load.on_pick = woken.append
    scene.load.release(old, 100)
    scene.load.release_tokens(old, 100)
    scene.load.credit(old, 7)
    scene.load.waits_no_more(old, picked_at)
    scene.load.picked(old, cold=True)
    scene.load.report(old, REPORT, scene.clock.now)
    scene.load.asked(old)
    scene.load.failed(old, "gone")
    seen = scene.load.describe(scene[A])
    assert (seen.fresh, seen.age, seen.error) == (False, inf, None)
    assert (seen.inflight, seen.inflight_tokens, seen.kv_tokens) == (0, 0, None)
    assert isnan(seen.waiting)
    assert scene.pods().cold_at.tolist() == [0.0, 0.0]
    assert scene.load.age(old) == inf
    assert woken == []


def test_a_reused_slot_starts_from_zero() -> None:
    scene = Scene(A)
    scene.told(A, LoadReport(9.0, 9.0, 0.9, adapters=Adapters(frozenset({"sql"}), limit=1)))
    scene.load.credit(scene[A], 5)
    scene.load.picked(scene[A], cold=True)
    scene.update(B)
    assert scene[B].slot == 0
    pods = scene.pods()
    assert list(pods.addresses) == [B]
    assert (pods.fresh.tolist(), pods.cold_at.tolist()) == ([False], [0.0])
    assert (pods.inflight.tolist(), pods.inflight_tokens.tolist()) == ([0.0], [0.0])
    assert np.isnan([pods.waiting[0], pods.running[0], pods.kv_usage[0]]).all()
    assert pods.adapters[0] == Adapters()


def test_busy_is_what_it_told_or_what_we_sent() -> None:
    scene = Scene(A)
    pod = scene[A]
    assert not scene.load.busy(pod)
    for report, busy in (
        (LoadReport(0.0, 0.0, 0.9), False),
        (LoadReport(1.0, 0.0, 0.0), True),
        (LoadReport(0.0, 1.0, 0.0), True),
        (LoadReport(), False),
    ):
        scene.told(A, report)
        assert scene.load.busy(pod) is busy
    scene.load.credit(pod, 0)
    assert scene.load.busy(pod)
    scene.load.release(pod, 0)
    assert not scene.load.busy(pod)


def test_adapters_and_labels_follow_changes() -> None:
    scene = Scene(A, B)
    scene.told(A)
    assert list(scene.pods().adapters) == [Adapters(), Adapters()]
    sql = Adapters(running=frozenset({"sql"}), limit=2)
    scene.told(B, LoadReport(1.0, 1.0, 0.1, adapters=sql))
    assert list(scene.pods().adapters) == [Adapters(), sql]
    scene.told(B)
    assert list(scene.pods().adapters) == [Adapters(), Adapters()]
    scene.update(A, B, labels={"role": "decode"})
    assert [dict(labels) for labels in scene.pods().labels] == [{"role": "decode"}] * 2


def test_the_kv_cache_size_is_kept_when_a_page_leaves_it_out() -> None:
    scene = Scene(A)
    scene.told(A)
    scene.told(A, LoadReport(1.0, 1.0, 0.1))
    assert scene.load.describe(scene[A]).kv_tokens == 1600


@pytest.mark.parametrize("gone", [None, A, B, C], ids=["dense", "no A", "no B", "no C"])
def test_rows_are_the_candidates_in_the_order_of_their_slots(gone: str | None) -> None:
    scene = Scene(A, B, C)
    scene.update(*(address for address in (A, B, C) if address != gone))
    kept = list(scene.pool.endpoints)
    for number, address in enumerate(kept):
        scene.told(address, LoadReport(number, 10 * number, 0.1 * number))
        scene.load.credit(scene[address], 100 * number)
    matched = np.arange(scene.pool.capacity, dtype=np.float32)
    every = scene.pool.slots
    for slots in (every, every[1:], every[:1], every[[0, -1]], every[:0]):
        pods = scene.load.pods(slots, matched, None)
        chosen = [a for a in kept if scene[a].slot in slots.tolist()]
        numbers = [kept.index(address) for address in chosen]
        assert list(pods.addresses) == chosen
        assert len(pods) == len(pods.labels) == len(pods.adapters) == len(chosen)
        assert pods.waiting.tolist() == numbers
        assert pods.running.tolist() == [10 * number for number in numbers]
        assert pods.kv_usage == pytest.approx([0.1 * number for number in numbers])
        assert pods.inflight.tolist() == [1.0] * len(chosen)
        assert pods.inflight_tokens.tolist() == [100 * number for number in numbers]
        assert pods.matched_tokens.tolist() == slots.tolist()
        assert pods.fresh.tolist() == [True] * len(chosen)
        assert pods.session.tolist() == [False] * len(chosen)
        assert pods.cold_at.tolist() == [0.0] * len(chosen)


def test_the_home_of_a_session() -> None:
    scene = Scene(A, B, C)
    home = scene[B]
    assert scene.pods(session=home).session.tolist() == [False, True, False]
    assert scene.pods().session.tolist() == [False, False, False]
    matched = np.zeros(scene.pool.capacity, np.float32)
    assert scene.load.pods(scene.pool.slots[2:], matched, home).session.tolist() == [False]
    scene.update(A, C)
    assert scene.pods(session=home).session.tolist() == [False, False]


def test_columns_grow_with_the_pool_and_keep_what_they_hold() -> None:
    scene = Scene(A)
    scene.told(A)
    scene.load.credit(scene[A], 50)
    many = [f"10.1.0.{i}:8000" for i in range(100)]
    scene.update(A, *many)
    assert scene.row(A)["waiting"] == 3.0
    assert scene.row(A)["inflight_tokens"] == 50.0
    scene.told(many[-1])
    pods = scene.pods()
    assert len(pods) == len(pods.waiting) == 101
    assert scene.row(many[-1])["running"] == 5.0


def test_a_load_made_for_a_full_pool_knows_its_endpoints() -> None:
    pool = Pool("test")
    pool.update([EndpointSpec(address=A)])
    load = Load(pool)
    load.report(pool.endpoints[A], REPORT, load.clock())
    pods = load.pods(pool.slots, np.zeros(pool.capacity, np.float32), None)
    assert (list(pods.addresses), pods.waiting.tolist()) == ([A], [3.0])


ADDRESSES = [f"10.0.0.{i}:8000" for i in range(20)]


class LoadMachine(RuleBasedStateMachine):
    """Any order of events against a plain model: one record for each life of an endpoint."""

    @initialize()
    def begin(self) -> None:
        self.scene = Scene()
        self.lives: list[Endpoint] = []
        self.inflight: dict[Endpoint, list[tuple[int, float]]] = {}  # tokens, and when picked
        self.picks: dict[Endpoint, list[float]] = {}
        self.report: dict[Endpoint, LoadReport] = {}
        self.asked: dict[Endpoint, float] = {}  # since it answered, the first time

    @rule(addresses=st.sets(st.sampled_from(ADDRESSES)))
    def update(self, addresses: set[str]) -> None:
        self.scene.update(*sorted(addresses))
        for endpoint in self.scene.pool.endpoints.values():
            if endpoint not in self.inflight:
                self.lives.append(endpoint)
                self.inflight[endpoint], self.picks[endpoint] = [], []

    def any_life(self, data: st.DataObject) -> Endpoint | None:
        """An endpoint that lives or has lived."""
        return data.draw(st.sampled_from(self.lives)) if self.lives else None

    @rule(data=st.data(), tokens=st.integers(0, 10**6))
    def pick(self, data: st.DataObject, tokens: int) -> None:
        endpoint = self.any_life(data)
        if endpoint is not None:
            self.scene.load.credit(endpoint, tokens)
            picked_at = self.scene.load.picked(endpoint, cold=False)
            if endpoint.alive:
                self.inflight[endpoint].append((tokens, picked_at))
                self.picks[endpoint].append(self.scene.clock.now)

    @rule(data=st.data(), first_token=st.booleans())
    def end(self, data: st.DataObject, first_token: bool) -> None:
        endpoint = self.any_life(data)
        if endpoint is not None and self.inflight[endpoint]:
            tokens, picked_at = self.inflight[endpoint].pop()
            self.scene.load.waits_no_more(endpoint, picked_at)
            if picked_at in self.picks[endpoint]:
                self.picks[endpoint].remove(picked_at)
            if first_token:
                self.scene.load.release_tokens(endpoint, tokens)
                tokens = 0
            self.scene.load.release(endpoint, tokens)

    @rule(data=st.data(), waiting=st.none() | st.integers(0, 50), ago=st.floats(0, 3))
    def answer(self, data: st.DataObject, waiting: int | None, ago: float) -> None:
        endpoint = self.any_life(data)
        if endpoint is not None:
            began = self.scene.clock.now - ago
            report = LoadReport(None if waiting is None else float(waiting), 1.0, 0.5)
            self.scene.load.report(endpoint, report, began)
            if endpoint.alive:
                self.picks[endpoint] = [at for at in self.picks[endpoint] if at > began]
                self.report[endpoint] = report
                self.asked.pop(endpoint, None)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        endpoint = self.any_life(data)
        if endpoint is not None:
            self.scene.load.asked(endpoint)
            self.asked.setdefault(endpoint, self.scene.clock.now)

    @rule(seconds=st.floats(0.01, 1))
    def wait(self, seconds: float) -> None:
        self.scene.clock.now += seconds

    @invariant()
    def columns_say_what_happened(self) -> None:
        pods, endpoints = self.scene.pods(), self.scene.pool.endpoints
        assert sorted(pods.addresses) == sorted(endpoints)
        for row, address in enumerate(pods.addresses):
            endpoint = endpoints[address]
            report = self.report.get(endpoint, LoadReport())
            told = nan if report.waiting is None else report.waiting
            np.testing.assert_equal(
                pods.waiting[row].item(), told + len(self.picks[endpoint]), address
            )
            answers = self.asked.get(endpoint, inf) + 2.0 >= self.scene.clock.now
            assert pods.fresh[row] == (endpoint in self.report and answers)
            assert pods.inflight[row] == len(self.inflight[endpoint])
            assert pods.inflight_tokens[row] == np.float32(
                sum(tokens for tokens, _ in self.inflight[endpoint])
            )


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
