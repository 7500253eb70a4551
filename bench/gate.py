"""What quotas and flow control add to each request, without the network.

python -m bench.gate
python -m bench.gate --seconds 5 --json gate.json

Each request goes all the way through the director: it is read, passes the gate, is picked, and
ends, in the event loop that the picker uses. The ways are measured in turns, and what each adds is
the difference to a director without a gate in the same turn.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import uvloop

from bench.bodies import chat_bodies
from bench.processes import scratch_folder
from bench.report import spread, write
from picker.config import Config, EndpointSpec, Flow, Identity, Prefix, Quota, Scheduling
from picker.director import Director, Outcome, Pick
from picker.engines import LoadReport
from picker.gate import Gate
from picker.journal import Journal
from picker.load import Load
from picker.metrics import PickerMetrics
from picker.pool import Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.quota.editor import Editor, Why
from picker.quota.model import parse_limit
from picker.quota.stores import open_store
from picker.schedule import Scheduler
from picker.sessions import Sessions
from picker.usage import Usage

PODS = 20
TENANTS = 100
AT_ONCE = 8  # requests that run together
BATCH = 2 * AT_ONCE  # between two looks at the clock: few, so that some are left undisturbed
SCRAPE = 5  # batches between two scrapes, which are not measured
CHUNKS = 2  # pieces of an answer, each with one token
TENANT = "x-tenant"
LIMITS = ("total-tokens=900M/minute", "requests=900k/second")
ORGANISATION = ("total-tokens=900G/month", "requests=900M/hour")
USAGE = Usage(prompt_tokens=60, cached_tokens=0, completion_tokens=CHUNKS)
SETTINGS = {
    "no gate": (Quota(), Flow()),
    "flow": (Quota(), Flow(enabled=True)),
    "quota, memory": (Quota(enabled=True, store="memory:"), Flow()),
    "quota, sqlite": (Quota(enabled=True), Flow()),
    "both, memory": (Quota(enabled=True, store="memory:"), Flow(enabled=True)),
}


class Way:
    """A director with what its requests pass."""

    def __init__(self, quota: Quota, flow: Flow) -> None:
        config = Config(identity=Identity(header=TENANT), quota=quota, flow=flow)
        self.pool = Pool("bench")
        self.load = Load(self.pool)
        self.gate = Gate(config, self.pool, self.load) if quota.enabled or flow.enabled else None
        scheduler = Scheduler(Scheduling())
        self.director = Director(
            pool=self.pool,
            load=self.load,
            prefix=ApproximatePrefix(self.pool, Prefix()),
            scheduler=scheduler,
            sessions=Sessions(config.sessions, enabled=scheduler.uses_sessions),
            metrics=PickerMetrics(),
            journal=Journal(),
            gate=self.gate,
        )
        self.pool.update([EndpointSpec(address=f"10.0.0.{n}:8000") for n in range(1, PODS + 1)])
        self.scrape()
        (body,) = chat_bodies(250, 1)
        self._body = body
        self._asked = 0

    async def open(self, url: str) -> None:
        if self.gate is None or self.gate.quotas is not None:
            return
        await self.gate.start(lambda: open_store(url, 10.0))
        if self.gate.store is None:
            return
        editor = Editor(self.gate.store, "bench")
        for name, parent, limits in (
            ("org/acme", None, ORGANISATION),
            ("tenant/*", "org/acme", LIMITS),
        ):
            await editor.set(name, [parse_limit(each) for each in limits], parent=parent, why=Why())

    def scrape(self) -> None:
        """All pods tell that they are idle."""
        for endpoint in self.pool.endpoints.values():
            self.load.asked(endpoint)
            report = LoadReport(waiting=0, running=0, kv_usage=0.0)
            self.load.report(endpoint, report, self.load.clock())

    async def one(self) -> None:
        """A request from its bytes to its end."""
        self._asked += 1
        headers = {"content-type": "application/json", TENANT: f"t{self._asked % TENANTS}"}
        pick = self.director.route("POST", "/v1/chat/completions", headers, self._body)
        if not isinstance(pick, Pick):
            pick = await pick
        pick.response_started(200)
        for _ in range(CHUNKS):
            pick.first_token()
            pick.streamed(1)
        pick.end(Outcome.COMPLETED, USAGE)

    async def batch(self) -> None:
        async def client() -> None:
            for _ in range(BATCH // AT_ONCE):
                await self.one()

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        if self.gate is not None:
            await self.gate.settled()


async def measure(seconds: float) -> dict[str, Any]:
    """Microseconds of CPU, of all threads."""
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    async with scratch_folder() as folder:
        ways = {name: Way(*settings) for name, settings in SETTINGS.items()}
        for name, way in ways.items():
            memory = SETTINGS[name][0].store == "memory:"
            await way.open("memory:" if memory else f"sqlite://{folder}/quota.db")
            await way.batch()
        end = time.perf_counter() + seconds * len(ways)
        while time.perf_counter() < end:
            for way in ways.values():
                way.scrape()
            for _ in range(SCRAPE):
                for name, way in ways.items():
                    times[name].append(await timed(way.batch))
        for way in ways.values():
            if way.gate is not None:
                await way.gate.stop()
    bare = times["no gate"]
    added = {
        name: [found - without for found, without in zip(each, bare, strict=True)]
        for name, each in times.items()
        if name != "no gate"
    }
    return {
        "each": {name: spread(found, 1) for name, found in times.items()},
        "added": {name: round(statistics.median(found), 1) for name, found in added.items()},
        "least added": {name: round(min(times[name]) - min(bare), 1) for name in added},
    }


async def timed(batch: Callable[[], Any]) -> float:
    started = time.process_time()
    await batch()
    return (time.process_time() - started) / BATCH * 1e6


@click.command()
@click.option("--seconds", type=float, default=2.0, show_default=True, help="For each figure.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(seconds: float, path: Path | None) -> None:
    """Route requests of many tenants with and without quotas and flow control."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(seconds))
    results = {"unit": "microseconds of CPU for a request", "pods": PODS, **found}
    for name, figures in results["each"].items():
        added = f", adds {results['added'][name]}" if name in results["added"] else ""
        click.echo(f"{name:16} {figures}{added}")
    click.echo(f"the best of each beside the best without: {results['least added']}")
    click.echo(f"Written to {write('gate', results, path)}")


if __name__ == "__main__":
    main()
