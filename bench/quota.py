"""What admission and settlement cost, in each store.

python -m bench.quota
python -m bench.quota --seconds 5 --json quota.json
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.processes import free_ports, program, scratch_folder
from bench.report import spread, write
from picker.config import Leases, Quota
from picker.quota.admission import Admission, Ask, Quotas
from picker.quota.model import Subject, parse_limit
from picker.quota.plan import Granted, Spent
from picker.quota.policy import Policy
from picker.quota.store import Change, Store
from picker.quota.store_memory import MemoryStore
from picker.quota.store_redis import RedisStore
from picker.quota.store_sqlite import SQLiteStore
from picker.quota.wire import Wire
from picker.usage import Usage

TENANTS = 100  # all seen before anything is measured
CLIENTS = (1, 16, 64)  # at once, of SQLite
BATCH = 200  # requests between two looks at the clock
TURN = 50  # calls of one kind over Redis, before those of another: the machine changes its pace
TIMEOUT = 10.0  # seconds: a figure of a busy machine is a figure, an outage is none
USAGE = Usage(prompt_tokens=900, cached_tokens=300, completion_tokens=120)
SPENT = Spent((1, 900, 120, 1020, 0), 900, 300, 120)
SUBJECTS = {
    "org/acme": ("", ("total-tokens=900G/month", "requests=900M/hour")),
    "tenant/*": ("org/acme", ("total-tokens=900M/minute", "requests=900k/second")),
}
LIMITS = sum(len(limits) for _, limits in SUBJECTS.values())


def ask(number: int) -> Ask:
    return Ask(f"tenant/{number % TENANTS}", "model", 1000, max_tokens=256)


async def prepared(store: Store) -> None:
    changes = [
        Change(name, 0, Subject(parent, tuple(parse_limit(text) for text in limits)))
        for name, (parent, limits) in SUBJECTS.items()
    ]
    await store.write(changes, [])


async def one(quotas: Quotas, number: int) -> None:
    admission = await quotas.admit(ask(number))
    assert isinstance(admission, Admission)
    assert not admission.degraded, "the store was down"
    quotas.settle(admission, USAGE)


async def figures(
    seconds: float, batch: Callable[[], Awaitable[None]], clock: Callable[[], float]
) -> dict[str, float]:
    """Microseconds per request, over batches."""
    await batch()
    batches = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = clock()
        await batch()
        batches.append((clock() - started) / BATCH * 1e6)
    return spread(batches, 1)


async def in_turn(quotas: Quotas, tenants: int) -> None:
    for number in range(BATCH):
        await one(quotas, number % tenants)


async def at_once(quotas: Quotas, clients: int) -> None:
    async def client(first: int) -> None:
        for number in range(first, BATCH, clients):
            await one(quotas, number)

    await asyncio.gather(*(client(first) for first in range(clients)))


async def memory(seconds: float) -> dict[str, Any]:
    """CPU; nothing waits here."""
    store = MemoryStore()
    await prepared(store)
    quotas = Quotas(store, Quota())
    await quotas.start()
    clock = time.process_time
    found = await figures(seconds, lambda: in_turn(quotas, TENANTS), clock)
    return {"cpu": found}


async def sqlite(seconds: float, directory: Path) -> dict[str, Any]:
    """Wall time by requests at once, and CPU of all threads."""
    found: dict[str, Any] = {}
    for clients in CLIENTS:
        store = SQLiteStore(directory / f"quota-{clients}.db", TIMEOUT)
        await prepared(store)
        quotas = Quotas(store, Quota())
        await quotas.start()
        found[str(clients)] = {
            name: await figures(seconds, lambda: at_once(quotas, clients), clock)  # noqa: B023
            for name, clock in (("wall", time.perf_counter), ("cpu", time.process_time))
        }
        await quotas.close()
    return found


async def redis(seconds: float, url: str) -> dict[str, Any]:
    """One call after another: a script that does nothing, and ours, in turns.

    Wall time, and CPU of client and server together, which others on the machine change less.
    """
    store = RedisStore(url, TIMEOUT)
    await prepared(store)
    policy = Policy()
    changes = await store.changes("")
    policy.replace(changes.version, {name: each for name, each in changes.records.items() if each})
    walls: dict[str, list[float]] = {name: [] for name in ("bare", "wire", "reserve", "settle")}
    cpus: dict[str, list[float]] = {name: [] for name in walls}
    our_wire = Wire(url, TIMEOUT)
    async with Redis.from_url(url, socket_timeout=None) as client:
        nothing = await client.script_load("return 1")

        async def bare(_: int) -> None:
            await client.evalsha(nothing, 0)

        async def wire(_: int) -> None:
            await our_wire.call(b"EVALSHA", nothing, 0)

        async def reserve(number: int) -> None:
            plan = policy.plan(f"tenant/{number % TENANTS}", "model", store.wall())
            amounts = (1, 1000, 256, 1256, 1)
            answer = await store.reserve(f"r{number}", plan, amounts, "model", 3600.0)
            assert isinstance(answer, Granted)

        async def settle(number: int) -> None:
            assert await store.settle(f"r{number}", SPENT)

        async def cpu() -> float:
            used = await client.info("cpu")
            return time.process_time() + used["used_cpu_user"] + used["used_cpu_sys"]

        for number in range(-TENANTS, 0):
            await reserve(number)
            await settle(number)
        end = time.perf_counter() + seconds
        first = 0
        while time.perf_counter() < end:
            for call in (bare, wire, reserve, settle):
                cpu_started, started = await cpu(), time.perf_counter()
                for number in range(first, first + TURN):
                    await call(number)
                walls[call.__name__].append((time.perf_counter() - started) / TURN * 1e6)
                cpus[call.__name__].append((await cpu() - cpu_started) / TURN * 1e6)
            first += TURN
    our_wire.close()
    await store.close()
    return {"wall": compared(walls), "cpu": compared(cpus)}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Spreads, and how many times a bare call the others take: medians.

    `bare` is redis-py's, `wire` the same script over the connection that the store uses.
    """
    bare = statistics.median(times["bare"])
    spreads: dict[str, Any] = {name: spread(values, 1) for name, values in times.items()}
    ours = {name: statistics.median(times[name]) for name in ("wire", "reserve", "settle")}
    return spreads | {"times bare": {name: round(each / bare, 2) for name, each in ours.items()}}


async def leases(seconds: float, url: str) -> dict[str, Any]:
    """One hot tenant with leases over Redis: wall time, amortised over its requests."""
    store = RedisStore(url + "?name=leases", TIMEOUT)
    await prepared(store)
    quotas = Quotas(store, Quota(leases=Leases(enabled=True)))
    await quotas.start()
    found: dict[str, Any] = {
        name: await figures(seconds, lambda: in_turn(quotas, 1), clock)
        for name, clock in (("wall", time.perf_counter), ("cpu", time.process_time))
    }
    numbers = quotas.numbers
    found["asked the store"] = round(1 - numbers.leased / numbers.granted, 4)
    await quotas.close()
    return found


@asynccontextmanager
async def redis_server() -> AsyncIterator[str]:
    """A Redis of our own that keeps nothing; its URL."""
    path = program("redis-server", "redis-server")
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(path, "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with Redis(port=port) as client, asyncio.timeout(TIMEOUT):
            while True:
                try:
                    await client.ping()
                    break
                except RedisError:
                    await asyncio.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        await process.wait()


async def measure(seconds: float) -> dict[str, Any]:
    async with scratch_folder() as directory, redis_server() as url:
        return {
            "memory": await memory(seconds),
            "sqlite": await sqlite(seconds, directory),
            "redis": await redis(seconds, url),
            "leases": await leases(seconds, url),
        }


@click.command()
@click.option("--seconds", type=float, default=2.0, show_default=True, help="For each figure.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(seconds: float, path: Path | None) -> None:
    """Admit requests of many tenants with two limits each, below two of their organisation."""
    results: dict[str, Any] = {
        "unit": "microseconds for one admission and its settlement",
        "limits of a request": LIMITS,
        **asyncio.run(measure(seconds)),
    }
    click.echo(f"memory           {results['memory']['cpu']} CPU")
    for clients, found in results["sqlite"].items():
        click.echo(f"sqlite, {clients:>2} at once  {found['wall']} wall, {found['cpu']} CPU")
    for clock, found in results["redis"].items():
        for name in ("bare", "wire", "reserve", "settle"):
            click.echo(f"redis, {name:8}  {found[name]} {clock}, a call")
        click.echo(f"redis, {clock}, times a bare EVALSHA: {found['times bare']}")
    click.echo(f"leases over redis  {results['leases']}")
    click.echo(f"Written to {write('quota', results, path)}")


if __name__ == "__main__":
    main()
