"""From a request to its end, over the real pool, load, index, scheduler, metrics and journal."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.config import Rewrite, RewriteTarget, Scheduling
from picker.director import Outcome, Pick
from picker.engines import LoadReport
from picker.journal import detail, summary
from picker.pool import Endpoint
from picker.refusal import Refusal
from picker.request import LLMRequest, parse
from picker.schedule import Scheduler
from picker.splice import apply
from picker.usage import Usage
from tests.picker.core import Core, completion

PODS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
LONG = "The quick brown fox jumps over the lazy dog. " * 100


def other(pick: Pick) -> str:
    return next(address for address in PODS if address != pick.endpoint.address)


def refusal(core: Core, **request: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        core.director.pick(completion("Hello", **request))  # type: ignore[arg-type]
    return caught.value


def test_a_prompt_goes_back_to_the_pod_that_has_it() -> None:
    core = Core(PODS)
    first = core.director.pick(completion(LONG))
    assert first.uncached_tokens == first.prompt_tokens > 1000
    assert first.matched_blocks == 0 < first.prompt_blocks
    first.end(Outcome.COMPLETED)
    for _ in range(5):
        again = core.director.pick(completion(LONG + " And then?"))
        assert again.endpoint is first.endpoint
        assert again.uncached_tokens < 100
        assert again.matched_blocks == first.prompt_blocks
        assert again.destination.startswith(first.endpoint.address + ",")
        again.end(Outcome.COMPLETED)


def test_a_burst_between_two_scrapes_is_spread() -> None:
    core = Core(PODS)
    picks = [core.director.pick(completion(f"{number} {LONG}")) for number in range(9)]
    assert sorted(pick.endpoint.address for pick in picks) == sorted(PODS * 3)


@pytest.mark.parametrize("answered", ["first token", "end"])
def test_answered_requests_are_no_queue_while_a_scrape_is_late(answered: str) -> None:
    """A conversation stays on its pod, though no scrape has told of its turns yet."""
    core = Core(PODS)
    core.now += 1
    core.director.pick(completion(LONG)).end(Outcome.COMPLETED)
    (holder,) = holding(core, LONG)
    for turn in range(50):
        core.now += 0.01
        pick = core.director.pick(completion(f"{LONG} {turn}"))
        assert (pick.endpoint.address, waiting(core, pick.endpoint)) == (holder, 1)
        if answered == "end":
            pick.end(Outcome.COMPLETED)
            assert waiting(core, pick.endpoint) == 0
        else:
            pick.first_token()
            assert waiting(core, pick.endpoint) == 0
            pick.end(Outcome.COMPLETED)
            assert waiting(core, pick.endpoint) == 0, "counted once"


def test_the_end_counts_once() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion("Hello"))
    pick.response_started(200)
    pick.end(Outcome.COMPLETED, Usage(10, 0, 5))
    pick.end(Outcome.ABORTED)
    pick.response_started(500)
    pick.first_token()
    assert (pick.outcome, pick.status, pick.first_token_seconds) == (Outcome.COMPLETED, 200, None)
    assert pick.usage == Usage(10, 0, 5)
    ended = f'warmpath_ended_requests_total{{endpoint="{pick.endpoint.address}",outcome='
    assert f'{ended}"completed"}} 1\n' in core.page()
    assert f'{ended}"aborted"' not in core.page()


def test_the_first_token_releases_the_tokens_and_the_end_the_request() -> None:
    core = Core(PODS[:1])
    pick = core.director.pick(completion([1] * 700))
    assert core.inflight() == [(1, 700)]
    pick.first_token(0.25)
    assert core.inflight() == [(1, 0)]
    pick.first_token(9)
    assert pick.first_token_seconds == 0.25
    pick.end(Outcome.ABORTED)
    assert core.inflight() == [(0, 0)]


def test_a_pick_served_elsewhere_moves_with_its_load_and_its_prefix() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion([1] * 700))
    picked, served = pick.endpoint, core.endpoint(other(pick))
    pick.response_started(200, served.address)
    assert pick.endpoint is served
    assert core.load.describe(picked).inflight == 0
    assert core.load.describe(served).inflight_tokens == 700
    pick.response_started(200, served.address)
    assert "warmpath_moved_picks_total 1\n" in core.page()
    pick.end(Outcome.COMPLETED)
    assert core.inflight() == [(0, 0)] * 3
    match = core.prefix.match(completion([1] * 700))
    assert match.tokens[served.slot] == match.tokens.max() > 500


def waiting(core: Core, endpoint: Endpoint) -> float:
    return core.load.describe(endpoint).waiting


def holding(core: Core, prompt: str | list[int]) -> set[str]:
    """The pods that are expected to hold any of a prompt."""
    blocks = core.prefix.match(completion(prompt)).blocks
    return {each.address for each in core.pool.endpoints.values() if blocks[each.slot]}


def test_a_pick_served_elsewhere_leaves_nothing_where_it_was_sent() -> None:
    core = Core(PODS, scorers={"session": 1.0})
    request = completion([1] * 700)
    request.headers = {"x-session-id": "mine"}
    pick = core.director.pick(request)
    picked, served = pick.endpoint, core.endpoint(other(pick))
    assert (holding(core, [1] * 700), waiting(core, picked)) == ({picked.address}, 1)
    pick.response_started(200, served.address)
    assert (holding(core, [1] * 700), waiting(core, picked)) == ({served.address}, 0)
    assert waiting(core, served) == 0, "it has come through the queue"
    assert core.director.pick(request).endpoint is served, "the session lives there now"


def test_a_scrape_between_pick_and_move_has_settled_what_waits() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion("Hello"))
    core.now += 1
    core.load.report(pick.endpoint, LoadReport(waiting=5, running=0, kv_usage=0.0), core.now)
    picked = pick.endpoint
    pick.response_started(200, other(pick))
    assert waiting(core, picked) == 5


def test_what_others_sent_to_the_picked_pod_stays_expected_there() -> None:
    core = Core(PODS)
    first = core.director.pick(completion(LONG))
    first.response_started(200)
    longer = core.director.pick(completion(LONG + LONG))
    assert longer.endpoint is first.endpoint
    longer.response_started(200, other(longer))
    match = core.prefix.match(completion(LONG + LONG))
    assert match.blocks[first.endpoint.slot] == first.prompt_blocks
    assert match.blocks[longer.endpoint.slot] == longer.prompt_blocks
    burst = [core.director.pick(completion([7] * 700)) for _ in range(2)]
    assert burst[0].endpoint is burst[1].endpoint, "a burst of equal prompts stays together"
    burst[0].response_started(200, other(burst[0]))
    assert holding(core, [7] * 700) == {pick.endpoint.address for pick in burst}


def test_a_move_counts_what_the_serving_pod_holds_by_then() -> None:
    core = Core(PODS)
    old = core.director.pick(completion([1] * 700))
    pick = core.director.pick(completion([1] * 700, subset=[other(old)]))
    core.update([address for address in PODS if address != old.endpoint.address] + ["10.1.0.1:80"])
    new = core.endpoint("10.1.0.1:80")
    assert new.slot == old.endpoint.slot
    pick.response_started(200, new.address)
    assert (pick.matched_blocks, pick.uncached_tokens) == (0, 700)


def test_open_picks_keep_little() -> None:
    core = Core(PODS, journal_size=1)
    prompts = [completion(f"{number} " + "word " * 60_000) for number in range(4)]
    for prompt in prompts:
        core.director.pick(prompt).end(Outcome.COMPLETED)

    def growth(answered: bool) -> float:
        gc.collect()
        tracemalloc.start()
        picks = [core.director.pick(prompts[number % 4]) for number in range(100)]
        for pick in picks:
            if answered:
                pick.response_started(200)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used / len(picks)

    assert growth(answered=False) < 20_000, "8 bytes for each of 1,024 blocks, and itself"
    assert growth(answered=True) < 6_000


def test_only_a_2xx_tells_usage() -> None:
    core = Core(PODS)
    for status, told in ((200, Usage(9, 0, 9)), (299, Usage(9, 0, 9)), (300, None), (429, None)):
        pick = core.director.pick(completion("Hello"))
        pick.response_started(status)
        pick.end(Outcome.COMPLETED, Usage(9, 0, 9))
        assert pick.usage == told


def test_a_request_without_a_prompt_is_not_cold() -> None:
    core = Core(PODS, scorers={"noHitLru": 1.0})
    cold = [core.director.pick(completion([number] * 400)).endpoint for number in range(2)]
    warm = core.director.pick(completion([0] * 400))
    never = next(each for each in core.pool.endpoints.values() if each not in cold)
    for _ in range(10):
        core.director.route("GET", "/v1/models", {}, b"")
    assert core.director.pick(completion([9] * 400)).endpoint is never
    assert warm.endpoint in core.pool.endpoints.values()


def test_a_pick_that_moves_after_its_first_token_brings_no_tokens() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion([1] * 700))
    pick.first_token()
    pick.response_started(200, other(pick))
    assert sorted(core.inflight()) == [(0, 0), (0, 0), (1, 0)]


def test_a_server_that_is_not_of_the_pool_changes_nothing() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion("Hello"))
    picked = pick.endpoint
    pick.response_started(200, "10.9.9.9:8000")
    assert pick.endpoint is picked
    assert core.load.describe(picked).inflight == 1


def test_a_pick_may_move_to_a_pod_that_came_after_it() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion([1] * 700))
    more = [f"10.1.0.{number}:8000" for number in range(1, 60)]  # more slots than when it matched
    core.update(PODS + more)
    pick.response_started(200, more[-1])
    assert (pick.endpoint.address, pick.uncached_tokens, pick.matched_blocks) == (more[-1], 700, 0)
    pick.end(Outcome.COMPLETED)
    assert set(core.inflight()) == {(0, 0)}


def test_what_a_removed_pod_served_does_not_touch_the_next_owner_of_its_slot() -> None:
    core = Core(PODS[:1])
    pick = core.director.pick(completion([1] * 700))
    core.update(PODS[1:2])
    assert core.endpoint(PODS[1]).slot == pick.endpoint.slot
    pick.first_token()
    pick.end(Outcome.FAILED)
    assert core.inflight() == [(0, 0)]
    assert PODS[0] not in core.page()
    assert core.prefix.match(completion([1] * 700)).tokens.max() == 0
    assert core.director.pick(completion([1] * 700)).endpoint.address == PODS[1]


def test_a_pod_that_restarts_has_lost_prefixes_and_sessions() -> None:
    core = Core(PODS, scorers={"session": 1.0})
    request = completion([1] * 700)
    request.headers = {"x-session-id": "mine"}
    homes = {core.director.pick(request).endpoint for _ in range(3)}
    (home,) = homes
    core.pool.restarted(home)
    assert core.sessions.find(core.sessions.key(request.headers)) is None
    assert holding(core, [1] * 700) == set()
    pick = core.director.pick(request)
    core.director.pick(request).end(Outcome.COMPLETED)
    assert holding(core, [1] * 700) == {pick.endpoint.address}


def test_an_empty_pool_is_503_with_retry_after() -> None:
    core = Core([])
    answer = refusal(core)
    assert (answer.status, answer.reason) == (503, "no_endpoints")
    assert answer.retry_after is not None
    core.update(PODS)
    core.director.pick(completion("Hello"))
    core.update([])
    assert refusal(core).status == 503


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"], ["10.0.0.1:8001"], [""]])
def test_a_subset_without_a_pod_is_503(subset: list[str]) -> None:
    answer = refusal(Core(PODS), subset=subset)
    assert (answer.status, answer.reason) == (503, "empty_subset")
    assert answer.retry_after == 1


@pytest.mark.parametrize("subset", [PODS[1:2], ["10.0.0.2"], ["10.9.9.9:1", " 10.0.0.2:8000"]])
def test_a_subset_is_kept_to(subset: list[str]) -> None:
    core = Core(PODS)
    for _ in range(10):
        pick = core.director.pick(completion(LONG, subset=subset))
        assert pick.destination == PODS[1]


def test_a_subset_is_ignored_where_that_is_set() -> None:
    core = Core(PODS)
    core.director.reconfigure(Scheduler(Scheduling()), frozenset(), ignore_subset=True)
    assert core.director.pick(completion("x", subset=["9.9.9.9:1"])).endpoint.address in PODS


def test_unknown_models_are_404_only_where_models_are_declared() -> None:
    core = Core(PODS, models=["llama", "qwen"])
    core.director.pick(completion("Hello", model="qwen"))
    answer = refusal(core, model="gpt")
    assert (answer.status, answer.reason) == (404, "model_not_found")
    assert "llama, qwen" in answer.message
    Core(PODS).director.pick(completion("Hello", model="gpt"))


def test_refusals_are_counted_and_credit_nothing() -> None:
    core = Core(PODS, models=["llama"])
    refusal(core, model="gpt")
    refusal(core, subset=[])
    refusal(core, subset=[])
    page = core.page()
    assert 'warmpath_refusals_total{reason="model_not_found",status="404"} 1\n' in page
    assert 'warmpath_refusals_total{reason="empty_subset",status="503"} 2\n' in page
    assert core.inflight() == [(0, 0)] * 3
    assert len(core.journal) == 0


def test_a_request_is_routed_as_it_came() -> None:
    core = Core(PODS)
    json = {"content-type": "application/json", "x-request-id": "mine"}
    route = core.director.route
    pick = route("POST", "/v1/completions", json, b'{"model":"m","prompt":"Hi"}', tuple(PODS[1:2]))
    assert (pick.request_id, pick.model, pick.destination) == ("mine", "m", PODS[1])
    with pytest.raises(Refusal) as caught:
        route("POST", "/v1/completions", json, b"{")
    assert caught.value.status == 400
    with pytest.raises(Refusal) as caught:
        route("POST", "/v1/completions", json, b"{}", ())
    assert caught.value.reason == "empty_subset"
    page = core.page()
    assert 'warmpath_refusals_total{reason="invalid_json",status="400"} 1\n' in page
    assert 'warmpath_refusals_total{reason="empty_subset",status="503"} 1\n' in page


def test_a_scorer_that_fails_refuses_the_request_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = Core(PODS, scorers={"tests.picker.own_scorer:Failing": 1.0})
    for _ in range(3):
        with pytest.raises(Refusal) as caught:
            core.director.route("GET", "/v1/models", {}, b"")
        assert (caught.value.status, caught.value.reason) == (500, "internal_error")
    assert caplog.text.count("Traceback") == 1
    assert "no score today" in caplog.text
    assert 'refusals_total{reason="internal_error",status="500"} 3\n' in core.page()
    assert core.inflight() == [(0, 0)] * 3


def test_one_sessions_requests_stay_on_one_pod() -> None:
    core = Core(PODS, scorers={"session": 1.0})
    homes = set()
    for number in range(20):
        request = completion(f"{number}")
        request.headers = {"x-session-id": "mine"}
        homes.add(core.director.pick(request).endpoint)
    assert len(homes) == 1


events = st.lists(
    st.one_of(
        st.tuples(st.just("pick"), st.integers(0, 3)),
        st.tuples(st.just("start"), st.integers(0, 9), st.sampled_from([*PODS, "", "gone:1"])),
        st.tuples(st.just("token"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(list(Outcome))),
        st.tuples(st.just("pool"), st.sets(st.sampled_from(PODS), min_size=1)),
    ),
    max_size=40,
)


@given(events)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_all_credit_is_returned(events: list[tuple[str, object]]) -> None:
    core = Core(PODS)
    picks: list[Pick] = []
    ends = 0
    for kind, which, *more in events:
        if kind == "pool":
            core.update(sorted(which))  # type: ignore[call-overload]
        elif kind == "pick":
            picks.append(core.director.pick(completion([int(str(which))] * 400)))
        elif picks:
            pick = picks[int(str(which)) % len(picks)]
            if kind == "start":
                pick.response_started(200, str(more[0]) or None)
            elif kind == "token":
                pick.first_token()
            else:
                ends += pick.outcome is None
                pick.end(Outcome(str(more[0])))
        running = [pick for pick in picks if pick.outcome is None and pick.endpoint.alive]
        assert sum(requests for requests, _ in core.inflight()) == len(running)
    for pick in picks:
        ends += pick.outcome is None
        pick.end(Outcome.COMPLETED)
    assert set(core.inflight()) == {(0, 0)}
    assert ends == len(picks)
    running_gauge = 'inference_objective_running_requests{model_name="llama"} '
    assert (f"{running_gauge}0\n" in core.page()) == bool(picks)


def test_a_pick_explains_itself_without_telling_the_prompt() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion("my secret words " * 50, id="req-1"))
    told = detail(pick)
    assert told["requestId"] == "req-1"
    assert told["path"] == "/v1/completions"
    assert told["candidates"][0]["endpoint"] == pick.endpoint.address
    assert {each["endpoint"] for each in told["candidates"]} == set(PODS)
    for each in told["candidates"]:
        weighted = sum(told["weights"][name] * score for name, score in each["scores"].items())
        assert each["total"] == pytest.approx(weighted, abs=1e-5)
    assert "secret" not in repr(told)


def test_thousands_of_picks_leave_nothing_behind_but_what_is_bounded() -> None:
    core = Core(PODS, journal_size=100)
    core.load.clock = lambda: 1000.0

    def some(start: int, count: int) -> None:
        for number in range(start, start + count):
            pick = core.director.pick(completion([number % 50] * 100, model=f"m{number % 1500}"))
            pick.response_started(200, PODS[number % 3])
            pick.first_token()
            pick.end(list(Outcome)[number % 3], Usage(100, 10, 10))
            if number % 500 == 0:
                core.update(PODS[number % 2 :])

    def used() -> int:
        """Bytes that the picker's own code holds."""
        gc.collect()
        ours = tracemalloc.Filter(True, "*/picker/*.py")
        tests = tracemalloc.Filter(False, "*/tests/*")
        snapshot = tracemalloc.take_snapshot().filter_traces((ours, tests))
        return sum(trace.size for trace in snapshot.statistics("filename"))

    tracemalloc.start()
    try:
        some(0, 2000)  # tables are full: 1,000 models, the journal, the index
        before = used()
        some(2000, 2000)
        assert used() - before < 50_000, "25 bytes a pick"
    finally:
        tracemalloc.stop()
    assert set(core.inflight()) == {(0, 0)}
    assert len(core.journal) == 100
    assert core.page().count("inference_objective_request_total{") == 1001


# Usage of streams


def asking(body: str) -> LLMRequest:
    headers = {"content-type": "application/json"}
    return parse("POST", "/v1/completions", headers, body.encode())


STREAM = '{"model":"m","prompt":"Hello","stream":true}'


def test_usage_is_asked_for_where_somebody_counts_it() -> None:
    core = Core(PODS)
    assert core.director.pick(asking(STREAM)).splice is None
    core.director.counts_usage = True
    splice = core.director.pick(asking(STREAM)).splice
    assert splice is not None
    changed = json.loads(apply([splice], STREAM.encode()))
    assert changed == {**json.loads(STREAM), "stream_options": {"include_usage": True}}


def test_usage_is_not_asked_for_where_it_comes_anyway() -> None:
    core = Core(PODS)
    core.director.counts_usage = True
    told = STREAM.replace("}", ',"stream_options":{"include_usage":true}}')
    whole = STREAM.replace("true", "false")
    for body in (told, whole, STREAM.replace(',"stream":true', "")):
        assert core.director.pick(asking(body)).splice is None


# Rewritten models

BODY = b'{"model":"asked","prompt":"Hello"}'
JSON = {"content-type": "application/json"}


def rewriting(**settings: Any) -> Core:
    core = Core(PODS, **settings)
    core.director.rewrites.update(
        [Rewrite(models=["asked"], targets=[RewriteTarget(model="target")])]
    )
    return core


def routed(core: Core, body: bytes = BODY, **headers: str) -> Pick:
    pick = core.director.route("POST", "/v1/completions", JSON | headers, body)
    assert isinstance(pick, Pick)
    return pick


def test_a_rewritten_request_is_one_for_its_target() -> None:
    """For pods, scorers and the prefix index; people see both names."""
    core = rewriting(models=["target"])
    pick = routed(core)
    assert (pick.asked_model, pick.model) == ("asked", "target")
    assert pick.rewrite is not None
    assert apply([pick.rewrite.splice], BODY) == b'{"model":"target","prompt":"Hello"}'
    told = summary(pick)
    assert (told["model"], told["targetModel"]) == ("asked", "target")
    plain = routed(core, b'{"model":"target","prompt":"Hello"}')
    assert plain.rewrite is None
    assert plain.asked_model == plain.model == "target"
    with pytest.raises(Refusal, match="not served"):
        routed(core, b'{"model":"other","prompt":"Hello"}')


def test_a_target_shares_its_prefixes_with_whoever_asks_for_it() -> None:
    core = rewriting()
    prompt = "a" * 4096
    first = routed(core, b'{"model":"asked","prompt":"%b"}' % prompt.encode())
    second = routed(core, b'{"model":"target","prompt":"%b"}' % prompt.encode())
    other = routed(core, b'{"model":"other","prompt":"%b"}' % prompt.encode())
    assert (first.matched_blocks, other.matched_blocks) == (0, 0)
    assert second.matched_blocks == second.prompt_blocks > 0


def test_a_body_that_is_not_shown_is_not_rewritten() -> None:
    pick = rewriting().director.route("POST", "/v1/completions", JSON, None)
    assert isinstance(pick, Pick)
    assert (pick.model, pick.rewrite) == (None, None)
