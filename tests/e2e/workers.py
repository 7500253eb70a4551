"""Workers that are killed and started again at the same ports, and what they hold."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from tests.e2e.gateway import DEADLINE
from tests.worker.process import free_ports, until_ready
from tests.worker.subscriber import KVSubscriber

PROFILE = "llama-8b-h100"  # 6 ms for an output token
BLOCK = 16  # tokens


class WorkerProcess:
    """A simulated worker. Its tokens are bytes unless flags say else."""

    def __init__(self, *flags: str, host: str = "127.0.0.1", port: int | None = None) -> None:
        """`port`: None for any free one."""
        free, self._events, self._replay = free_ports(3)
        self._port = free if port is None else port
        self._flags = (*flags, "--host", host)
        self._process: asyncio.subprocess.Process | None = None
        self.address = f"{host}:{self._port}"

    async def start(self) -> None:
        """Returns when it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *(Path(sys.executable).parent / "warmpath", "work"),
            *("--simulate", PROFILE, "--served-model-name", "m", "--log-level", "warning"),
            *("--port", str(self._port)),
            *("--kv-events-port", str(self._events), "--kv-replay-port", str(self._replay)),
            *self._flags,
        )
        async with aiohttp.ClientSession(f"http://{self.address}") as session:
            await until_ready(session, self._process)

    async def reset(self) -> None:
        """Have it forget all prefixes."""
        async with (
            aiohttp.ClientSession(f"http://{self.address}") as session,
            session.post("/reset_prefix_cache") as response,
        ):
            assert response.status == 200

    async def stop(self) -> int:
        """Ask it to end in order. Returns its exit status."""
        await self._end(signal.SIGTERM)
        assert self._process is not None and self._process.returncode is not None
        return self._process.returncode

    async def kill(self) -> None:
        """End it as a crash does."""
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            async with asyncio.timeout(DEADLINE):
                await self._process.wait()

    async def holds(self) -> set[bytes]:
        """Every prefix that it caches, by its tokens: as it tells who asks for all its events."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> set[bytes]:
        ports = (f"tcp://127.0.0.1:{port}" for port in (self._events, self._replay))
        with KVSubscriber(*ports) as subscriber:
            subscriber.catch_up()
            prefixes: dict[int | None, bytes] = {None: b""}
            for name, block in subscriber.blocks.items():  # parents were stored before
                prefixes[name] = prefixes[block.parent] + bytes(block.tokens)
            assert subscriber.lost == subscriber.unknown_removals == 0
        del prefixes[None]
        return set(prefixes.values())


def blocks_held(prefixes: set[bytes], prompt: bytes) -> int:
    """Leading blocks of a prompt that are among what a worker holds."""
    blocks = 0
    while len(prompt) >= (blocks + 1) * BLOCK and prompt[: (blocks + 1) * BLOCK] in prefixes:
        blocks += 1
    return blocks


@asynccontextmanager
async def running_workers(*flags: Sequence[str]) -> AsyncIterator[list[WorkerProcess]]:
    """One for each list of flags."""
    async with AsyncExitStack() as stack:
        workers = [WorkerProcess(*each) for each in flags]
        for worker in workers:
            stack.push_async_callback(worker.kill)
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
