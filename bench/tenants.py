"""The VTC paper's synthetic workloads, and its measures of fairness.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), section 5, and the
suites of its published artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

WARM_UP = 30.0
WINDOW = 60.0
POINTS = 20
INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2


@dataclass(slots=True, eq=False)
class Job:
    """One request, and what came of it. Times in seconds."""

    client: int
    input_tokens: int
    output_tokens: int
    arrived: float
    first_token: float = inf
    ended: float = inf
    came: int = 0  # output tokens so far

    @property
    def service(self) -> int:
        return INPUT_WEIGHT * self.input_tokens + OUTPUT_WEIGHT * self.output_tokens


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests of one length, evenly or at random."""

    rate: Callable[[float], float]  # requests per second, by the time
    lengths: tuple[int, int] = (256, 256)  # input and output tokens
    poisson: bool = False

    def jobs(self, number: int, seconds: float, random: np.random.Generator) -> Iterator[Job]:
        now = random.random() / (self.rate(0.0) or 1.0)
        while now < seconds:
            rate = self.rate(now)
            if rate > 0:
                yield Job(number, *self.lengths, arrived=now)
            gap = 1.0 / (rate or 1.0)
            now += random.exponential(gap) if self.poisson else gap


@dataclass(frozen=True, slots=True)
class Workload:
    clients: Sequence[Client]
    seconds: float = 600.0
    weights: Mapping[str, float] = field(default_factory=dict)  # by name of the client
    backlogged: bool = False  # whether all clients ask for more than they can have

    def jobs(self, seed: int) -> list[Job]:
        random = np.random.default_rng(seed)
        jobs = [
            job
            for number, client in enumerate(self.clients)
            for job in client.jobs(number, self.seconds, random)
        ]
        return sorted(jobs, key=lambda job: job.arrived)


def name(client: int) -> str:
    return f"client-{client + 1}"


def steady(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def on_off(rate: float) -> Callable[[float], float]:
    """A minute on, a minute off."""
    return lambda now: 0.0 if int(now / 60) % 2 else rate


def phases(*rates: Callable[[float], float]) -> Callable[[float], float]:
    """Each for 300 s."""
    return lambda now: rates[min(int(now / 300), len(rates) - 1)](now)


WORKLOADS = {
    "overload": Workload([Client(steady(1.5)), Client(steady(3.0))], backlogged=True),
    "overload, 8 clients": Workload(
        [Client(steady(rate)) for rate in (0.4,) * 3 + (0.6,) * 5], backlogged=True
    ),
    "weighted 1:2:3:4": Workload(
        [Client(steady(rate)) for rate in (0.8, 0.8, 1.2, 1.6)],
        weights={name(client): float(client + 1) for client in range(4)},
        backlogged=True,
    ),
    "proportional": Workload([Client(steady(rate)) for rate in (0.25, 0.5, 1.5)]),
    "on/off, under its share": Workload([Client(on_off(0.5)), Client(steady(2.0))]),
    "on/off, overload": Workload([Client(on_off(2.0)), Client(steady(3.0))], backlogged=True),
    "Poisson, short and long": Workload(
        [Client(steady(8.0), (64, 64), True), Client(steady(1.5), (256, 256), True)],
        backlogged=True,
    ),
    "Poisson, reading and writing": Workload(
        [Client(steady(8.0), (512, 32), True), Client(steady(1.5), (32, 512), True)],
        backlogged=True,
    ),
    "increase": Workload(
        [Client(steady(0.5)), Client(lambda now: 0.2 + 1.8 * min(now, 600) / 600)]
    ),
    "distribution shift": Workload(
        [
            Client(phases(on_off(0.5), steady(1.0), steady(0.5))),
            Client(phases(steady(2.0), steady(1.0), steady(1.5))),
        ],
        seconds=900.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Measures:
    """What the paper tells of a run."""

    shares: list[float]  # of all service, by client
    service: list[float]  # weighted tokens per second, from the warm-up on
    first_token: list[float]  # mean seconds to it, of those that have one
    difference: tuple[float, float, float]  # of service rates: greatest, mean, variance
    accumulated: float  # greatest difference of service since the beginning, over weight
    tokens_per_second: float


def measure(workload: Workload, jobs: Sequence[Job]) -> Measures:
    """The paper's measures: service is spread evenly from a request's first token to its end."""
    clients = range(len(workload.clients))
    seconds = workload.seconds
    began = [job for job in jobs if job.first_token < seconds]
    served = np.array([_served(began, client, seconds) for client in clients])
    weights = np.array([workload.weights.get(name(client), 1.0) for client in clients])
    even = served / weights[:, None]
    rates = [float(row[-1] - row[int(WARM_UP)]) / (seconds - WARM_UP) for row in served]
    tokens = sum((job.input_tokens + job.output_tokens) * _part(job, seconds) for job in began)
    return Measures(
        [rate / sum(rates) for rate in rates],
        rates,
        [
            float(np.mean([j.first_token - j.arrived for j in began if j.client == client] or [0]))
            for client in clients
        ],
        _difference(workload, jobs, served),
        float((even.max(axis=0) - even.min(axis=0)).max()),
        tokens / seconds,
    )


def _part(job: Job, now: float) -> float:
    """How much of a job is done."""
    return min(1.0, (now - job.first_token) / max(1e-9, job.ended - job.first_token))


def _served(jobs: Sequence[Job], client: int, seconds: float) -> NDArray[np.float64]:
    """Service of a client up to each whole second."""
    times = np.arange(int(seconds) + 1, dtype=float)
    total = np.zeros(len(times))
    for job in jobs:
        if job.client == client:
            length = max(1e-9, job.ended - job.first_token)
            total += job.service * np.clip((times - job.first_token) / length, 0.0, 1.0)
    return total


def _difference(
    workload: Workload, jobs: Sequence[Job], served: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Of service rates, in windows around 19 points in time.

    What a client lacks to the best served one counts as far as it asked for it.
    """
    step = (workload.seconds - WARM_UP) / POINTS
    values = []
    for point in range(1, POINTS):
        middle = WARM_UP + step * point
        start, end = max(0.0, middle - WINDOW / 2), min(workload.seconds, middle + WINDOW / 2)
        rates = (served[:, int(end)] - served[:, int(start)]) / (end - start)
        asked = np.zeros(len(rates))
        for job in jobs:
            if start <= job.arrived < end:
                asked[job.client] += job.service / (end - start)
        lacking = np.minimum(rates.max() - rates, np.abs(asked - rates))
        values.append(float(lacking.sum()))
    return max(values), float(np.mean(values)), float(np.var(values))
