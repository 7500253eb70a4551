"""The journal: the last picks, and no more of them than is bearable."""

from __future__ import annotations

import json

from picker.director import Outcome
from picker.journal import Journal, detail, summary
from picker.usage import Usage
from tests.picker.core import Core, completion

PODS = ["10.0.0.1:8000", "10.0.0.2:8000"]


def ids(journal: Journal) -> list[str]:
    """Newest first."""
    return [pick.request_id for pick in reversed(journal)]


def test_the_last_picks_are_kept_newest_first() -> None:
    core = Core(PODS, journal_size=3)
    for name in "abcde":
        core.director.pick(completion("Hello", id=name))
    assert ids(core.journal) == ["e", "d", "c"]
    assert len(core.journal) == 3
    assert core.journal.find("b") is None
    assert core.journal.find("") is None


def test_a_repeated_id_finds_its_newest_pick() -> None:
    core = Core(PODS)
    core.director.pick(completion("Hello", id="same"))
    newest = core.director.pick(completion("Hello", id="same"))
    core.director.pick(completion("Hello", id="another"))
    assert core.journal.find("same") is newest


def test_many_candidates_leave_room_for_fewer_picks_but_always_one() -> None:
    core = Core([f"10.0.0.{number}:80" for number in range(1, 11)])
    picks = [core.director.pick(completion("Hello", id=name)) for name in "abcde"]
    journal = Journal(size=100, max_rows=25)
    for pick in picks:
        journal.record(pick)
    assert ids(journal) == ["e", "d"]
    tiny = Journal(size=100, max_rows=5)
    for pick in picks:
        tiny.record(pick)
    assert ids(tiny) == ["e"]


def test_a_summary_follows_its_request_to_the_end() -> None:
    core = Core(PODS[:1])
    pick = core.director.pick(completion([1] * 640, id="r"))
    told = summary(pick)
    assert (told["outcome"], told["status"], told["usage"], told["seconds"]) == (None,) * 4
    pick.response_started(200)
    pick.first_token(0.5)
    pick.end(Outcome.COMPLETED, Usage(640, 32, 7), after=2.0)
    told = json.loads(json.dumps(summary(pick)))
    assert told | {"pickedAt": 0, "promptBlocks": 0} == {
        "requestId": "r",
        "pickedAt": 0,
        "model": "llama",
        "targetModel": "llama",
        "path": "/v1/completions",
        "tenant": None,
        "waitedSeconds": None,
        "endpoint": PODS[0],
        "picked": [PODS[0]],
        "promptTokens": 640,
        "matchedBy": "approximate",
        "predictedTokens": 0,
        "promptBlocks": 0,
        "matchedBlocks": 0,
        "usage": {"promptTokens": 640, "cachedTokens": 32, "completionTokens": 7},
        "status": 200,
        "outcome": "completed",
        "firstTokenSeconds": 0.5,
        "seconds": 2.0,
    }


def test_detail_is_best_first_and_names_what_filters_dropped() -> None:
    core = Core(PODS, scorers={"prefix": 3, "queue": 2})
    warm = core.director.pick(completion([1] * 640, subset=PODS[1:])).endpoint
    core.load.failed(core.endpoint(PODS[0]), "gone", unreachable=True)
    told = json.loads(json.dumps(detail(core.director.pick(completion([1] * 640)))))
    assert told["dropped"] == [{"filter": "fresh", "endpoints": 1}]
    assert told["weights"] == {"prefix": 3, "queue": 2}
    assert told["considered"] == 1
    [candidate] = told["candidates"]
    assert candidate["endpoint"] == warm.address
    assert candidate["matchedTokens"] > 500
    assert candidate["scores"].keys() == {"prefix", "queue"}


def test_the_best_candidate_comes_first() -> None:
    core = Core(PODS, scorers={"prefix": 1})
    for warm in PODS:
        prompt = [len(warm) + PODS.index(warm)] * 640
        core.director.pick(completion(prompt, subset=[warm]))
        found = detail(core.director.pick(completion(prompt)))["candidates"]
        assert [each["endpoint"] for each in found] == sorted(PODS, key=lambda pod: pod != warm)


def test_what_a_path_asks_is_not_kept() -> None:
    core = Core(PODS)
    pick = core.director.pick(completion("Hello"))
    assert "secret" not in repr(detail(pick))
    assert pick.path == "/v1/completions"
