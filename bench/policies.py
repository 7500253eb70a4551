"""Scheduling policies against round robin, in virtual time: no processes, no network.

python -m bench.policies
python -m bench.policies --load 0.9 --workload shared
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.report import write
from bench.virtual import Picker, Policy, Turn, Workload, simulate
from picker.config import Scheduling
from picker.schedule import Scheduler
from worker.profiles import PROFILES


def round_robin() -> Policy:
    rows = itertools.count()
    return lambda turn, picker: next(rows) % len(picker.inflight)


def least_requests() -> Policy:
    return lambda turn, picker: int(picker.inflight.argmin())


def scheduled(settings: Scheduling, seed: int = 0) -> Policy:
    scheduler = Scheduler(settings, random=np.random.default_rng(seed))

    def pick(turn: Turn, picker: Picker) -> int:
        columns = picker.columns(turn)
        return columns.addresses.index(scheduler.schedule(turn, columns).endpoints[0])

    return pick


SHARED = Workload(groups=150, system=6144, question=384, answer=200, turns=3, think_seconds=5)
WORKLOADS = {
    "shared": SHARED,  # more system prompts than fit on one pod
    "hot": Workload(4, 6144, 384, 200, turns=2, think_seconds=5),  # fewer than pods
    "own": Workload(0, 3000, 512, 256, turns=4, think_seconds=8),  # only turns share
    "distinct": Workload(0, 0, 2048, 200, turns=1, think_seconds=1),  # nothing to share
}
POLICIES: dict[str, Callable[[], Policy]] = {
    "roundRobin": round_robin,
    "leastRequests": least_requests,
    "default": lambda: scheduled(Scheduling()),
    "prefix 3, queue 2, kv 2": lambda: scheduled(
        Scheduling(scorers={"prefix": 3, "queue": 2, "kv": 2})
    ),
    "warm filter, uncached": lambda: scheduled(
        Scheduling(filters=["warm"], scorers={"uncached": {"patience": 1}})
    ),
}
FIRST_TOKEN_SECONDS, TOKEN_SECONDS = 1.0, 0.05  # within capacity, 90 % of requests are faster


def measure(turns: Sequence[Turn], end: float) -> dict[str, float]:
    """Figures of a run. A turn without a first token waited until the end."""
    first = np.array([(turn.first_token or end) - turn.started for turn in turns])
    pace = [(turn.ended - turn.first_token) / turn.output_tokens for turn in turns if turn.ended]
    cached = sum(turn.cached for turn in turns) / sum(turn.prompt_tokens for turn in turns)
    return {
        "turns": len(turns),
        "hit_ratio": round(cached, 3),
        "ttft_mean_ms": round(1e3 * float(first.mean()), 1),
        "ttft_p50_ms": round(1e3 * float(np.quantile(first, 0.5)), 1),
        "ttft_p90_ms": round(1e3 * float(np.quantile(first, 0.9)), 1),
        "ttft_p99_ms": round(1e3 * float(np.quantile(first, 0.99)), 1),
        "token_p90_ms": round(1e3 * float(np.quantile(pace or [end], 0.9)), 1),
    }


def capacity(run: Callable[[float], dict[str, float]]) -> float:
    """Conversations per second, to a few per cent, at which a policy is still fast enough."""
    low, high = 1.0, 256.0
    while high / low > 1.05:
        rate = (low * high) ** 0.5
        figures = run(rate)
        fast = figures["ttft_p90_ms"] < 1e3 * FIRST_TOKEN_SECONDS
        if fast and figures["token_p90_ms"] < 1e3 * TOKEN_SECONDS:
            low = rate
        else:
            high = rate
    return low


@click.command()
@click.option("--workload", "names", type=click.Choice(list(WORKLOADS)), multiple=True)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="llama-8b-h100")
@click.option("--pods", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--load", type=click.FloatRange(0.05, 2), default=0.7, show_default=True)
@click.option("--seconds", type=click.IntRange(5), default=30, show_default=True)
@click.option("--seed", type=int, default=0)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(
    names: tuple[str, ...],
    profile: str,
    pods: int,
    load: float,
    seconds: int,
    seed: int,
    path: Path | None,
) -> None:
    """Run policies at a share of the capacity, once of the default policy and once of round robin.

    Capacity is the rate at which 90 % of the requests have their first token within 1 s and the
    others at 50 ms each.
    """
    results: dict[str, Any] = {
        "profile": profile,
        "pods": pods,
        "load": load,
        "seconds": seconds,
        "workloads": {},
    }
    for name in names or WORKLOADS:

        def run(policy: str, rate: float, workload: Workload = WORKLOADS[name]) -> dict[str, float]:
            turns = simulate(
                POLICIES[policy](),
                workload,
                PROFILES[profile],
                pods=pods,
                conversations_per_second=rate,
                seconds=seconds,
                seed=seed,
            )
            return measure(turns, seconds)

        results["workloads"][name] = {}
        for reference in ("default", "roundRobin"):
            rate = load * capacity(lambda rate, of=reference: run(of, rate))
            click.echo(f"{name}, {rate:.1f} conversations/s: {load:.0%} of {reference}'s capacity")
            figures = {policy: run(policy, rate) for policy in POLICIES}
            results["workloads"][name][f"of {reference}"] = {"rate": round(rate, 1), **figures}
            for policy, row in figures.items():
                click.echo(f"  {policy:24}" + "".join(f"  {k} {v:<8}" for k, v in row.items()))
    click.echo(f"Written to {write('policies', results, path)}")


if __name__ == "__main__":
    main()
