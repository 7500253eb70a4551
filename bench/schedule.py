"""What scoring and picking cost per request, without the network.

python -m bench.schedule
python -m bench.schedule --pods 20 --pods 100
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.report import spread, write
from picker.config import PickerSection, Scheduling
from picker.schedule import Scheduler
from scorers.pods import Adapters, Pods

BATCH = 200  # requests between two looks at the clock
POLICIES = {
    "prefix, queue, kv": Scheduling(scorers={"prefix": 3, "queue": 2, "kv": 2}),
    "default": Scheduling(),
    "default, weightedRandom": Scheduling(picker=PickerSection(type="weightedRandom")),
    "warm filter, uncached": Scheduling(filters=["warm"], scorers={"uncached": 1}),
    "all without loops": Scheduling(
        scorers=dict.fromkeys(
            ["prefix", "queue", "kv", "running", "inflight", "uncached", "session", "noHitLru"], 1
        )
    ),
    "lora, contextLength": Scheduling(scorers={"lora": 1, "contextLength": 1}),
}


@dataclass
class Ask:
    """A warm request."""

    prompt_tokens: int = 4000
    model: str | None = "base"
    headers: Mapping[str, str] = field(default_factory=dict)


def busy(count: int, random: np.random.Generator) -> Pods:
    """Pods under load, an eighth of them warm."""

    def numbers(most: int) -> np.ndarray:
        return random.integers(0, most, count).astype(np.float32)

    warm = random.random(count) < 1 / 8
    return Pods(
        [f"10.0.{row >> 8}.{row & 255}:8000" for row in range(count)],
        [{"warmpath.io/context-length-range": "0-8192"} for _ in range(count)],
        [Adapters(frozenset({"a", "b"}), frozenset(), 4) for _ in range(count)],
        np.ones(count, np.bool_),
        numbers(5),
        numbers(100),
        random.random(count, np.float32),
        numbers(100),
        numbers(8000),
        np.where(warm, numbers(4000), np.float32(0)),
        random.random(count) * 1000,
        np.zeros(count, np.bool_),
    )


def microseconds(scheduler: Scheduler, pods: Pods, seconds: float) -> dict[str, float]:
    """CPU time per request, over batches; nothing here waits, so it is the time it takes."""
    request = Ask()
    batches = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.process_time()
        for _ in range(BATCH):
            scheduler.schedule(request, pods)
        batches.append((time.process_time() - started) / BATCH * 1e6)
    return spread(batches, 1)


@click.command()
@click.option("--pods", "counts", type=click.IntRange(1), multiple=True, default=(20, 1000))
@click.option("--seconds", type=float, default=1.0, show_default=True, help="For each figure.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(counts: tuple[int, ...], seconds: float, path: Path | None) -> None:
    """Schedule one warm request among busy pods, again and again."""
    results: dict[str, Any] = {"unit": "microseconds per request", "pods": {}}
    for count in counts:
        pods = busy(count, np.random.default_rng(0))
        results["pods"][str(count)] = {}
        for name, settings in POLICIES.items():
            scheduler = Scheduler(settings, random=np.random.default_rng(0))
            figures = microseconds(scheduler, pods, seconds)
            results["pods"][str(count)][name] = figures
            click.echo(f"{count:5} pods  {name:24} {figures}")
    click.echo(f"Written to {write('schedule', results, path)}")


if __name__ == "__main__":
    main()
