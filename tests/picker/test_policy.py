"""The default policy against simple ones, on simulated pods in virtual time."""

from __future__ import annotations

from bench.policies import SHARED, WORKLOADS, least_requests, measure, round_robin, scheduled
from bench.virtual import Policy, Workload, simulate
from picker.config import Scheduling
from worker.profiles import PROFILES

SECONDS = 16


def run(policy: Policy, workload: Workload, conversations_per_second: float) -> dict[str, float]:
    turns = simulate(
        policy,
        workload,
        PROFILES["llama-8b-h100"],
        pods=8,
        conversations_per_second=conversations_per_second,
        seconds=SECONDS,
    )
    return measure(turns, SECONDS)


def default() -> Policy:
    return scheduled(Scheduling())


def test_conversations_that_share_prefixes_start_several_times_sooner():
    warm, turns = run(default(), SHARED, 37), run(round_robin(), SHARED, 37)
    assert warm["hit_ratio"] > 0.85
    assert warm["hit_ratio"] > 2 * turns["hit_ratio"]
    assert 5 * warm["ttft_p90_ms"] < turns["ttft_p90_ms"]
    assert warm["token_p90_ms"] < turns["token_p90_ms"]


def test_prompts_that_share_nothing_are_served_as_by_round_robin():
    workload = WORKLOADS["distinct"]
    ours = run(default(), workload, 55)
    for simple in (round_robin(), least_requests()):
        theirs = run(simple, workload, 55)
        assert ours["ttft_p90_ms"] < 1.05 * theirs["ttft_p90_ms"]
        assert ours["ttft_mean_ms"] < 1.05 * theirs["ttft_mean_ms"]


def test_few_prefixes_that_everybody_shares_do_not_overload_their_pods():
    ours, turns = (run(policy, WORKLOADS["hot"], 60) for policy in (default(), round_robin()))
    assert ours["ttft_p90_ms"] < 1.25 * turns["ttft_p90_ms"]
    assert ours["hit_ratio"] >= turns["hit_ratio"]
