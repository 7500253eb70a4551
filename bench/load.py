"""Load on an HTTP server from programs that cost little: wrk for throughput, h2load for latency."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from bench.processes import program

SCRIPT = Path(__file__).with_name("wrk.lua")
PATH = "/v1/chat/completions"
_runs = itertools.count(int(time.time()))


@dataclass(frozen=True, slots=True)
class Throughput:
    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the start of a request to the end of its (small) answer."""

    seconds: np.ndarray

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent))


def check_programs() -> None:
    """Raises click.ClickException when one is missing."""
    program("wrk", "wrk")
    program("h2load", "nghttp2-client")


async def throughput(
    port: int, bodies: Sequence[Path], *, connections: int, seconds: float
) -> Throughput:
    """Post bodies over as many connections as fast as they are answered."""
    output = await _output(
        program("wrk", "wrk"),
        *("-t", "1", "-c", str(connections), "-d", f"{max(1, round(seconds))}s"),
        *("--timeout", "30s", "-s", str(SCRIPT), f"http://127.0.0.1:{port}{PATH}"),
        *("--", str(next(_runs) % 10_000), *map(str, bodies)),
    )
    return parse_wrk(output)


async def latency(port: int, body: Path, *, rate: int, seconds: float) -> Latency:
    """Post a body at a constant rate, evenly spread over the time."""
    connections = 20
    log = body.with_suffix(".log")
    log.unlink(missing_ok=True)
    await _output(
        program("h2load", "nghttp2-client"),
        *("--h1", "-c", str(connections), "--rps", f"{rate / connections:g}"),
        *("-r", "1", "--rate-period", f"{1000 / rate:g}ms"),  # connections do not send at once
        *("-n", str(round(rate * seconds)), "-d", str(body), "--log-file", str(log)),
        *("-H", "content-type: application/json", f"http://127.0.0.1:{port}{PATH}"),
    )
    return parse_h2load(log.read_text())


def parse_wrk(output: str) -> Throughput:
    """The line of JSON that wrk.lua writes at the end.

    Raises:
        click.ClickException: a request failed: the figures would be of something else.
    """
    found = json.loads(output.strip().rsplit("\n", 1)[-1])
    if found["failed"] or found["refused"] or not found["requests"]:
        raise click.ClickException(
            f"of {found['requests']} requests {found['failed']} failed and {found['refused']}"
            " were answered with an error"
        )
    return Throughput(found["requests"], found["seconds"])


def parse_h2load(log: str, skip: float = 0.1) -> Latency:
    """h2load's log: start in microseconds, status, microseconds taken; a request each line.

    Args:
        skip: the share of the time at the start that does not count.

    Raises:
        click.ClickException: a request failed.
    """
    rows = np.array([[int(field) for field in line.split("\t")] for line in log.splitlines()])
    if not len(rows) or not (rows[:, 1] == 200).all():
        failed = int((rows[:, 1] != 200).sum()) if len(rows) else "all"
        raise click.ClickException(f"of {len(rows)} requests {failed} failed")
    starts = rows[:, 0]
    counted = starts >= starts.min() + skip * (starts.max() - starts.min())
    return Latency(rows[counted, 2] / 1e6)


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        words = (err or out).decode(errors="replace").strip() or f"exit code {process.returncode}"
        raise click.ClickException(f"{Path(command[0]).name}: {words[-500:]}")
    return out.decode()
