"""A worker in a process of its own, as users run it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

DEADLINE = 90.0  # seconds for a start on a busy machine


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker."""

    url: str
    events_endpoint: str
    replay_endpoint: str
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def metric(self, name: str, label: str = "") -> float:
        """The sum over a metric's series, or over those with a label such as `reason="abort"`."""
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        series = [line for line in lines if line.startswith(name + "{") and label in line]
        return sum(float(line.split()[-1]) for line in series)

    async def wait_for_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(DEADLINE):
            while await self.metric(name) != value:  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.02)

    async def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()


@asynccontextmanager
async def running_worker(*flags: str) -> AsyncIterator[Worker]:
    """`warmpath work FLAGS` on free ports, ready to serve."""
    http, events, replay = free_ports(3)
    command = [Path(sys.executable).parent / "warmpath", "work", *flags, "--port", str(http)]
    command += ["--kv-events-port", str(events), "--kv-replay-port", str(replay)]
    # Threads that wait for each other must not spin: on cores that others want as well, the one
    # that is waited for gets none, and a start takes three times as long.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    url = f"http://127.0.0.1:{http}"
    try:
        async with aiohttp.ClientSession(url) as session:
            await until_ready(session, process)
            endpoints = (f"tcp://127.0.0.1:{port}" for port in (events, replay))
            yield Worker(url, *endpoints, process, session)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_ready(session: aiohttp.ClientSession, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            assert process.returncode is None, "the worker ended before it was ready"
            try:
                async with session.get("/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Free ports in a row, below those that the kernel gives to whoever asks for any."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(10_000, first_ephemeral - count)
        ports = list(range(first, first + count))
        if all(map(_is_free, ports)):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
