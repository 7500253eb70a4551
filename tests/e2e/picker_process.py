"""`warmpath pick` in a process of its own, behind an Envoy."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from picker.config import Listen
from picker.envoy.bootstrap import bootstrap
from tests.e2e.gateway import DEADLINE, config_for
from tests.e2e.pods import Pod, running_pods
from tests.envoy_process import Envoy, running_envoy
from tests.worker.process import free_ports

Profile = Literal["standard", "lean"]


class PickerProcess:
    """A picker for some pods, on the same ports each time it is started."""

    def __init__(self, addresses: Sequence[str], folder: Path, more: str = "") -> None:
        """`more` is added to warmpath.yaml."""
        grpc, http, health, admin, replica = free_ports(5)
        self.listen = Listen(grpc=grpc, http=http, health=health, admin=admin, replica=replica)
        ports = (
            f"{{grpc: {grpc}, http: {http}, health: {health}, admin: {admin}, replica: {replica}}}"
        )
        endpoints = "".join(f"  - address: {address}\n" for address in addresses)
        self._file = folder / f"warmpath-{grpc}.yaml"
        self._file.write_text(f"listen: {ports}\npool:\n  endpoints:\n{endpoints}{more}")
        self._process: asyncio.subprocess.Process | None = None

    def configure(self, more: str) -> None:
        """Add to warmpath.yaml, before it is started."""
        with self._file.open("a") as file:
            file.write(more)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker.cli", "pick", "-c", self._file),
            stderr=asyncio.subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{self.listen.admin}/readyz"
        async with asyncio.timeout(DEADLINE), aiohttp.ClientSession() as session:
            while True:
                assert self._process.returncode is None
                try:
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.02)

    def stand_still(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait for its end: its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class Site:
    """Pods, a picker process and an Envoy, and a client of them."""

    def __init__(
        self, pods: list[Pod], picker: PickerProcess, envoy: Envoy, http: aiohttp.ClientSession
    ) -> None:
        self.pods = pods
        self.picker = picker
        self.envoy = envoy
        self.http = http


@asynccontextmanager
async def running_site(
    profile: Profile,
    folder: Path,
    *,
    addresses: Sequence[str] = (),
    fail_open: bool = False,
    more: str = "",
) -> AsyncIterator[Site]:
    """Before the model servers at these addresses, or before two pods of ours."""
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(running_pods(0 if addresses else 2))
        served = [*addresses, *(pod.address for pod in pods)]
        picker = PickerProcess(served, folder, more)
        stack.push_async_callback(picker.kill)
        await picker.start()
        config = config_for(pods, addresses, profile=profile)
        config = msgspec.structs.replace(
            config,
            listen=picker.listen,
            envoy=msgspec.structs.replace(config.envoy, fail_open=fail_open),
        )
        told: dict[str, Any] = bootstrap(config, discover=True)
        envoy = await stack.enter_async_context(running_envoy(told))
        await envoy.wait_for_stat("cluster.pods.membership_total", len(served))
        http = await stack.enter_async_context(aiohttp.ClientSession(envoy.url))
        yield Site(pods, picker, envoy, http)
