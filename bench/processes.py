"""Processes that a benchmark starts, and what they cost."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import click

from picker.up.processes import Child, ChildFailed

READY_SECONDS = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")
_given: set[int] = set()  # ports


def cpu_seconds(pid: int) -> float:
    """What a process has used of a core so far, in user and kernel, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def machine_seconds() -> tuple[float, float]:
    """Of all cores since the machine started: seconds in use, and seconds in all."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / _TICKS, sum(fields) / _TICKS


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, each given once: who asked before may not have opened his yet."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        if port not in _given:
            _given.add(port)
            ports.append(port)
    return ports


def program(name: str, package: str) -> str:
    """Its path, or an error that says how to install it."""
    found = shutil.which(name)
    if found is None:
        raise click.ClickException(
            f"{name} is not installed; on Debian and Ubuntu: apt-get install {package}"
        )
    return found


@asynccontextmanager
async def scratch_folder() -> AsyncIterator[Path]:
    """For configurations and logs; removed in the end."""
    with tempfile.TemporaryDirectory(prefix="warmpath-bench-") as folder:
        yield Path(folder)


@asynccontextmanager
async def running(children: Iterable[Child], at_once: int = 4) -> AsyncIterator[list[Child]]:
    """Children that are ready, and end with the block; none outlives this process.

    Raises:
        click.ClickException: one did not start; says why.
    """
    started: list[Child] = []
    slots = asyncio.Semaphore(at_once)

    async def start(child: Child, http: aiohttp.ClientSession) -> None:
        async with slots:
            started.append(child)
            await child.start()
            await child.until_ready(http, READY_SECONDS)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop, started)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            try:
                async with asyncio.TaskGroup() as group:
                    for child in children:
                        group.create_task(start(child, http))
            except* ChildFailed as failed:
                raise click.ClickException(str(failed.exceptions[0])) from None
        yield started


async def _stop(children: list[Child]) -> None:
    await asyncio.gather(*(child.stop() for child in children))


def pid(child: Child) -> int:
    assert child.process is not None, "started"
    return child.process.pid
