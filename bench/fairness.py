"""Fairness between tenants in virtual time, on the VTC paper's workloads, and what it costs.

python -m bench.fairness
python -m bench.fairness --workload overload --policy fcfs --policy standard
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.batch import POOL, STEPS_BETWEEN_TRIES, Batch
from bench.loop import VirtualLoop
from bench.report import spread, write
from bench.tenants import WORKLOADS, Job, Workload, measure, name
from picker.config import Duration, EndpointSpec, Size
from picker.config import Flow as FlowSettings
from picker.config import Saturation as SaturationSettings
from picker.cost import TokenCost
from picker.engines import LoadReport
from picker.flow import Flow
from picker.lengths import Lengths
from picker.load import Load
from picker.pool import Pool
from picker.running_output import RunningOutput
from picker.saturation import Saturation
from picker.vtc import Account, VirtualTokenCounter
from picker.waiting import Visit

SCRAPE_SECONDS = 0.05
OVERTIME = 120.0  # for requests that run at the end
U = TokenCost().most(POOL, 0)  # 20,000
Expect = Callable[[Job, Lengths], int]  # of its client's answers, how long they were


class InOrder:
    """First come first served: the pod's own queue, and nothing before it."""

    def __init__(self, loop: VirtualLoop, workload: Workload) -> None:
        self.batch = Batch(loop, self, self.stepped)
        self.waiting: deque[Job] = deque()

    def arrive(self, job: Job) -> None:
        self.waiting.append(job)
        self.batch.wake()

    def backlogged(self) -> set[int]:
        """Clients with something that waits."""
        return {job.client for job in self.waiting}

    def first(self) -> Job | None:
        return self.waiting[0] if self.waiting else None

    def take(self, job: Job) -> None:
        self.waiting.popleft()

    def stepped(self, computed: list[Job]) -> None:
        """Each of these has one more token."""


class InEngine:
    """VTC where the paper has it: in the engine, which asks it for each request that it takes."""

    def __init__(self, loop: VirtualLoop, workload: Workload, expect: Expect) -> None:
        """`expect`: output tokens that are charged in advance."""
        self.batch = Batch(loop, self, self.stepped)
        self.vtc = VirtualTokenCounter(weight=lambda tenant: workload.weights.get(tenant, 1.0))
        self._lengths = Lengths()
        self._expect = expect
        self._queues: dict[str, deque[Job]] = {}
        self._accounts: dict[Job, Account] = {}

    def arrive(self, job: Job) -> None:
        queue = self._queues.setdefault(name(job.client), deque())
        if not queue:
            self.vtc.arrive(name(job.client))
        queue.append(job)
        self.batch.wake()

    def backlogged(self) -> set[int]:
        return {queue[0].client for queue in self._queues.values() if queue}

    def first(self) -> Job | None:
        tenant = self.vtc.least()
        return None if tenant is None else self._queues[tenant][0]

    def take(self, job: Job) -> None:
        tenant = name(job.client)
        queue = self._queues[tenant]
        queue.popleft()
        expected = self._expect(job, self._lengths)
        self._accounts[job] = self.vtc.dispatch(tenant, job.input_tokens, expected)
        if not queue:
            self.vtc.leave(tenant)

    def stepped(self, computed: list[Job]) -> None:
        for job in computed:
            self.vtc.output(self._accounts[job], job.came)
            if job.came == job.output_tokens:
                self.vtc.settle(self._accounts.pop(job))
                self._lengths.learn(name(job.client), job.output_tokens)


class Gateway(InOrder):
    """The picker's flow control before a pod that serves in order and tells its load."""

    def __init__(
        self,
        loop: VirtualLoop,
        workload: Workload,
        *,
        charge: str,
        expect: str = "none",
        queue: int | None = None,
    ) -> None:
        """
        Args:
            charge: output as it streams, as a pod's counter lets guess, or at the end.
            queue: requests that may wait on the pod; None: the default.
        """
        super().__init__(loop, workload)
        self._loop = loop
        self._charge = charge
        pool = Pool("paper")
        self._load = Load(pool, clock=loop.time)
        self._output: RunningOutput[Job] = RunningOutput(self._streamed)
        pool.listen(self._output)
        pool.update([EndpointSpec(address="127.0.0.1:8000")])
        (self._pod,) = pool.endpoints.values()
        settings = FlowSettings(
            ttl=Duration(0),
            max_requests=0,
            max_bytes=Size(0),
            tenant_requests=0,
            tenant_bytes=Size(0),
            expect=expect,
            weights=dict(workload.weights),
        )
        limits = SaturationSettings() if queue is None else SaturationSettings(waiting=queue)
        saturation = Saturation(pool, self._load, limits)
        self.flow = Flow(settings, saturation, loop=lambda: loop)
        self._visits: dict[Job, Visit] = {}
        self._scrape()

    def arrive(self, job: Job) -> None:
        visit = self.flow.visit(
            name(job.client), {}, prompt_tokens=job.input_tokens, most_output=job.output_tokens
        )
        self._visits[job] = visit
        future = self.flow.wait(visit)
        if future is None:
            self._send(job)
        else:
            future.add_done_callback(lambda _: self._send(job))

    def backlogged(self) -> set[int]:
        return {
            int(tenant.removeprefix("client-")) - 1
            for band in self.flow.bands
            for tenant in band.queues
        }

    def _send(self, job: Job) -> None:
        self._load.credit(self._pod, job.input_tokens)
        self._load.picked(self._pod, False)
        self.flow.picked(self._visits[job])
        self._output.began(job, self._pod)
        super().arrive(job)

    def _streamed(self, job: Job, tokens: int) -> None:
        """As the pod's counter lets guess."""
        if self._charge == "guessed":
            self.flow.streamed(self._visits[job], tokens)

    def stepped(self, computed: list[Job]) -> None:
        for job in computed:
            if self._charge == "streamed":
                self.flow.streamed(self._visits[job], job.came)
            if job.came == job.output_tokens:
                self._load.release(self._pod, job.input_tokens)
                self._output.ended(job, self._pod)
                self.flow.left(self._visits.pop(job), job.input_tokens, job.output_tokens)

    def _scrape(self) -> None:
        report = LoadReport(
            waiting=len(self.waiting),
            running=len(self.batch.running),
            kv_usage=self.batch.tokens / POOL,
            generated=self.batch.generated,
        )
        self._load.report(self._pod, report, self._loop.time())
        self._output.told(self._pod, report)
        self.flow.wake()
        self._loop.call_at(self._loop.time() + SCRAPE_SECONDS, self._scrape)


Policy = Callable[[VirtualLoop, Workload], InOrder | InEngine]


def engine(expect: Expect) -> Policy:
    return lambda loop, workload: InEngine(loop, workload, expect)


def gateway(charge: str, expect: str = "none", queue: int | None = None) -> Policy:
    return lambda loop, workload: Gateway(loop, workload, charge=charge, expect=expect, queue=queue)


_chance = random.Random(0)
POLICIES: dict[str, Policy] = {
    "fcfs": InOrder,
    "vtc": engine(lambda job, lengths: 0),
    "vtc, last five": engine(lambda job, lengths: lengths.expected(name(job.client))),
    "vtc, 50 % off": engine(
        lambda job, lengths: round(job.output_tokens * _chance.uniform(0.5, 1.5))
    ),
    "vtc, oracle": engine(lambda job, lengths: job.output_tokens),
    "standard": gateway("streamed"),
    "lean": gateway("guessed"),
    "standard, expecting": gateway("streamed", "history"),
    "standard, queue of 2": gateway("streamed", queue=2),
    "standard, queue of 10": gateway("streamed", queue=10),
    "at the end": gateway("at the end"),
}
PAPER: dict[str, dict[str, Any]] = {  # from the paper's tables, and its artifact's result files
    "overload": {  # difference: table 5
        "fcfs": {"difference": [447.37, 439.00, 31], "tokens": 876, "accumulated": 250_375},
        "vtc": {"difference": [192.88, 103.77, 6981], "tokens": 893, "accumulated": 9_050},
        "vtc, 50 % off": {"difference": [33.98, 12.54, 112], "tokens": 904},
        "vtc, oracle": {"difference": [5.87, 0.51, 1.7], "tokens": 895},
    },
    "proportional": {
        "fcfs": {"service": [144, 288, 864], "first_token": [97, 97, 97]},
        "vtc": {"service": [191, 382, 764], "first_token": [4.8, 4.9, 124]},
    },
    "on/off, under its share": {
        "fcfs": {"first_token": [85, 93]},
        "vtc": {"first_token": [3.5, 102]},
    },
    "Poisson, reading and writing": {"fcfs": {"shares": [0.73, 0.27]}},
    "increase": {"fcfs": {"first_token": [7.2, None]}, "vtc": {"first_token": [0.35, None]}},
}


class Gaps:
    """The greatest difference of two clients' service over any interval in which both waited."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._range: dict[tuple[int, int], tuple[float, float]] = {}
        self.greatest = 0.0

    def look(self, batch: Batch, backlogged: set[int]) -> None:
        for pair in [pair for pair in self._range if not backlogged.issuperset(pair)]:
            del self._range[pair]
        for f in backlogged:
            for g in backlogged:
                if f < g:
                    now = batch.service[f] / self._weights[f] - batch.service[g] / self._weights[g]
                    least, most = self._range.get((f, g), (now, now))
                    self._range[f, g] = least, most = min(least, now), max(most, now)
                    self.greatest = max(self.greatest, most - least)


def simulate(
    policy: str, workload: Workload, seed: int, steps: int = STEPS_BETWEEN_TRIES
) -> dict[str, Any]:
    """One run: the paper's measures, and the greatest gap beside twice its bound.

    `steps`: of the engine, after which it looks for new requests.
    """
    loop = VirtualLoop()
    served = POLICIES[policy](loop, workload)
    served.batch.steps_between_tries = steps
    weights = [workload.weights.get(name(client), 1.0) for client in range(len(workload.clients))]
    gaps = Gaps(weights)
    jobs = workload.jobs(seed)
    for job in jobs:
        loop.call_at(job.arrived, lambda job=job: served.arrive(job))

    def look() -> None:
        if policy != "fcfs":
            gaps.look(served.batch, served.backlogged())

    served.batch.watch = look
    loop.run(workload.seconds + OVERTIME)
    measures = measure(workload, jobs)
    return {
        **asdict(measures),
        "gap": gaps.greatest,
        "bound": 2 * U / min(weights),
    }


def speed(tenants: int, waiting: int, rounds: int = 25, visits: int = 1000) -> dict[str, Any]:
    """Microseconds of CPU for a request to come, wait and go, among so many that wait; and for one
    that need not wait. In an asyncio loop, with its futures and timers."""

    class Pods:
        places = 0
        num_pods = 1

        def room(self) -> int:
            return self.places

    async def measured() -> tuple[list[float], list[float]]:
        chance = random.Random(0)
        pods = Pods()
        unbounded = {"max_requests": 0, "tenant_requests": 0}
        sizes = {"max_bytes": Size(0), "tenant_bytes": Size(0)}
        flow = Flow(FlowSettings(**unbounded, **sizes), pods)
        names = [f"tenant-{number}" for number in range(tenants)]

        def visit() -> Visit:
            return Visit(names[chance.randrange(tenants)], 0, chance.randrange(1, 2000), 1000)

        for _ in range(waiting):
            flow.wait(visit())
        assert flow.waiting == waiting
        waited, passed = [], []
        for _ in range(rounds):
            coming = [visit() for _ in range(visits)]
            began = time.process_time()
            for each in coming:
                flow.wait(each)
                pods.places = flow.running + 1  # none of these is ever picked
                flow.wake()
            waited.append((time.process_time() - began) / visits * 1e6)
            assert flow.waiting == waiting
            idle = Flow(FlowSettings(), pods)
            pods.places = visits
            coming = [visit() for _ in range(visits)]
            began = time.process_time()
            for each in coming:
                idle.wait(each)
                idle.picked(each)
                idle.left(each, 100, 50)
            passed.append((time.process_time() - began) / visits * 1e6)
        return waited, passed

    waited, passed = asyncio.run(measured())
    return {
        "tenants": tenants,
        "waiting": waiting,
        "wait_and_go_us": spread(waited, 1),
        "without_waiting_us": spread(passed, 1),
    }


def show(workload: str, policy: str, result: dict[str, Any]) -> None:
    """A line, and what the paper has of it below."""

    def numbers(values: Sequence[float | None], digits: int) -> str:
        return " ".join("-" if value is None else f"{value:.{digits}f}" for value in values)

    shares = numbers(result["shares"], 2)
    greatest, mean, variance = result["difference"]
    click.echo(
        f"  {policy:20} {shares:24} {greatest:7.1f} {mean:7.1f} {variance:8.0f}"
        f" {result['accumulated']:9,.0f} {result['gap']:7,.0f} {result['bound']:7,.0f}"
        f" {result['tokens_per_second']:6.0f}"
        f"   {numbers(result['first_token'], 1)}"
    )
    paper = PAPER.get(workload, {}).get(policy)
    if paper:
        told = [
            f"{key} {numbers(value, 2)}" if isinstance(value, list) else f"{key} {value:,}"
            for key, value in paper.items()
        ]
        click.echo(f"  {'':20} in the paper: {'; '.join(told)}")


@click.command()
@click.option("--workload", "names", type=click.Choice(list(WORKLOADS)), multiple=True)
@click.option("--policy", "policies", type=click.Choice(list(POLICIES)), multiple=True)
@click.option("--seed", type=int, default=42, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=STEPS_BETWEEN_TRIES,
    show_default=True,
    help="Of the engine, after which it looks for new requests.",
)
@click.option("--tenants", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--waiting", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(
    names: tuple[str, ...],
    policies: tuple[str, ...],
    seed: int,
    steps: int,
    tenants: int,
    waiting: int,
    path: Path | None,
) -> None:
    """Run the workloads, then measure what flow control costs."""
    click.echo(
        f"  {'policy':20} {'shares of service':24} {'service difference':>24} {'accumul.':>9}"
        f" {'gap':>7} {'bound':>7} {'tok/s':>6}   seconds to the first token\n"
        f"  {'':20} {'':24} {'most':>7} {'mean':>7} {'variance':>8}"
    )
    results: dict[str, Any] = {"bound": U, "steps between tries": steps, "workloads": {}}
    for workload in names or WORKLOADS:
        click.echo(workload)
        runs = results["workloads"][workload] = {}
        for policy in policies or POLICIES:
            result = runs[policy] = simulate(policy, WORKLOADS[workload], seed, steps)
            show(workload, policy, result)
            if paper := PAPER.get(workload, {}).get(policy):
                result["paper"] = paper
    if not names and not policies:
        results["speed"] = speed(tenants, waiting)
        click.echo(f"flow control, microseconds of CPU: {results['speed']}")
    click.echo(f"Written to {write('fairness', _rounded(results), path)}")


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {key: _rounded(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_rounded(inner) for inner in value]
        case float():
            return round(value, 4 if abs(value) < 10 else 1)
    return value


if __name__ == "__main__":
    main()
