"""A file ranks pods here as it does in the reference picker.

The reference picker is written down again in a few lines of plain Python, by its documentation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.reference.load import load, parse
from picker.schedule import Scheduler
from tests.scorers.columns import Ask, pods

FILES = Path(__file__).parent / "files"
PROMPT = 1000  # tokens


def ratio(values: list[float], of: float) -> float:
    return 1.0 if max(values) == min(values) else (max(values) - of) / (max(values) - min(values))


def reference(weights: dict[str, float], columns: dict[str, list[float]]) -> list[float]:
    """The weighted sum of each pod's scores."""
    waiting, matched = columns["waiting"], columns["matched_tokens"]
    cold = not any(matched)
    totals = []
    for i in range(len(waiting)):
        cold_at = sorted(columns["cold_at"])
        scores = {
            "queue-scorer": ratio(waiting, waiting[i]),
            "kv-cache-utilization-scorer": 1 - columns["kv_usage"][i],
            "prefix-cache-scorer": matched[i] / PROMPT,
            "no-hit-lru-scorer": (
                1 - cold_at.index(columns["cold_at"][i]) / (len(waiting) - 1) if cold else 0.5
            ),
            "active-request-scorer": (
                1.0
                if columns["inflight"][i] <= 2
                else (max(columns["inflight"]) - columns["inflight"][i])
                / max(columns["inflight"])
                * 0.5
            ),
        }
        totals.append(sum(weight * scores[name] for name, weight in weights.items()))
    return totals


def column(least: float, most: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.integers(least, most), min_size=4, max_size=4)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        (
            "gie-default",
            {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3},
        ),
        (
            "llm-d-optimized-baseline",
            {
                "queue-scorer": 2,
                "kv-cache-utilization-scorer": 2,
                "prefix-cache-scorer": 3,
                "no-hit-lru-scorer": 2,
            },
        ),
        (
            "llm-d-precise-prefix",
            {"active-request-scorer": 4, "prefix-cache-scorer": 2, "no-hit-lru-scorer": 2},
        ),
    ],
)
@given(
    waiting=column(0, 9),
    usage=column(0, 100),
    matched=st.just([0, 0, 0, 0]) | column(0, PROMPT),
    inflight=column(0, 9),
    cold_at=st.permutations([1, 2, 3, 4]),
)
def test_pods_are_ranked_as_there(name, weights, waiting, usage, matched, inflight, cold_at):
    columns = {
        "waiting": waiting,
        "kv_usage": [each / 100 for each in usage],
        "matched_tokens": matched,
        "inflight": inflight,
        "cold_at": cold_at,
    }
    scheduler = Scheduler(load(FILES / f"{name}.yaml").config.scheduling)
    decision = scheduler.schedule(Ask(PROMPT), pods(4, **columns))
    expected = reference(weights, columns)
    np.testing.assert_allclose(decision.total, expected, atol=1e-5)
    best = {
        address
        for address, total in zip(decision.candidates, expected, strict=True)
        if total > max(expected) - 1e-5
    }
    assert decision.endpoints[0] in best
    assert len(decision.endpoints) == 1  # maxNumOfEndpoints is 1


def test_a_profile_without_scorers_takes_any_pod():
    text = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: []}]\n"
    )
    scheduler = Scheduler(parse(text, "e.yaml").config.scheduling)
    busy = pods(2, waiting=[0, 9])
    assert {scheduler.schedule(Ask(10), busy).endpoints[0] for _ in range(200)} == set(
        busy.addresses
    )


@pytest.mark.parametrize(
    ("parameters", "slack"),
    [  # tokens that a warm pod may have ahead of an idle one; None: any number
        ("", 286_704),
        ("maxTTFTPenaltyMs: 18000", 286_704),
        ("maxTTFTPenaltyMs: 1000, peakPrefillThroughput: 2000", 2000),
        ("maxTTFTPenaltyMs: 0", None),
        ("maxTTFTPenaltyMs: 0, maxTokensInFlightPenalty: 0", None),
        ("maxTTFTPenaltyMs: 0, maxTokensInFlightPenalty: 286720", 286_720),
        ("maxTokensInFlightPenalty: 1000000", 1_000_000),
        ("maxTokensInFlightPenalty: 0", 286_704),
        ("maxTTFTPenaltyMs: 1000, maxTokensInFlightPenalty: 64000", 15_928),
        ("maxTTFTPenaltyMs: 18000, maxTokensInFlightPenalty: 64000", 64_000),
        ("ttftSource: prefillThroughput, penaltySource: constant", 286_704),
    ],
)
def test_affinity_lasts_until_the_penalty(parameters: str, slack: int | None) -> None:
    loaded = parse(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        f"- {{type: prefix-cache-affinity-filter, parameters: {{{parameters}}}}}\n"
        "- type: token-load-scorer\n- type: max-score-picker\n",
        "e.yaml",
    )
    assert loaded.notes == []
    scheduler = Scheduler(loaded.config.scheduling)

    def sticks(ahead: float) -> bool:
        columns = {"matched_tokens": [PROMPT, 0], "inflight_tokens": [ahead, 0]}
        return scheduler.schedule(Ask(PROMPT), pods(2, **columns)).endpoints[0] == "a:1"

    assert sticks(0)
    if slack is None:
        assert sticks(1e9)
    else:
        assert sticks(slack - 1)
        assert not sticks(slack + 1)
