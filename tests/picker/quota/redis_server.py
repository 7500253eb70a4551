"""Real Redis servers, and a store on a clock that tests set."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any

import redis

from picker.quota.store import Store, StoreDown
from picker.quota.store_redis import RedisStore
from tests.picker.quota.kit import Clock

DEADLINE = 30.0  # seconds for a start on a busy machine


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class RedisServer:
    """One server, which may be killed and started again with what it had on disk."""

    directory: Path
    flags: tuple[str, ...] = ()
    cluster: bool = False
    password: str | None = None
    port: int = field(default_factory=free_port)
    bus_port: int = field(default_factory=free_port)  # of a cluster
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.password, socket_timeout=DEADLINE)

    def start(self) -> None:
        program = shutil.which("redis-server")
        assert program, "redis-server is missing: make redis"
        self.process = subprocess.Popen(
            [
                program,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)),
                *("--save", "", "--daemonize", "no", "--loglevel", "warning"),
                *self.flags,
                *(("--cluster-enabled", "yes") if self.cluster else ()),
                *(("--cluster-port", str(self.bus_port)) if self.cluster else ()),
            ]
        )
        give_up = time.monotonic() + DEADLINE
        while True:
            try:
                with self.client() as client:
                    client.ping()
                    return
            except redis.RedisError:
                assert time.monotonic() < give_up and self.process.poll() is None
                time.sleep(0.01)

    def kill(self) -> None:
        """As kill -9 does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None


@contextmanager
def running(
    *flags: str, cluster: bool = False, password: str | None = None
) -> Iterator[RedisServer]:
    """`password` is what the flags ask for."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory), flags, cluster, password)
        server.start()
        try:
            yield server
        finally:
            if server.process is not None:
                server.kill()


class ClockedRedisStore(RedisStore):
    """The store, but its scripts read a key instead of asking Redis for the time."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, timeout=DEADLINE)
        self._clock = clock
        self._clock_key = self._key("test-clock")

    def wall(self) -> float:
        return self._clock.now

    def _script(self, name: str) -> tuple[str, str]:
        source, _ = super()._script(name)
        own = "time = redis.call('TIME')"
        assert own in source
        source = source.replace(own, "time = {redis.call('GET', P .. ':test-clock'), 0}")
        return source, sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def _run(self, name: str, keys: Any, *values: Any) -> Any:
        await self._client.set(self._clock_key, f"{self._clock.now:.6f}", px=600_000)
        return await super()._run(name, keys, *values)


async def back(store: Store) -> None:
    """Wait until a store answers again: connections to the server that was are given up first."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                await store.changes("")
                return
            except StoreDown:
                await asyncio.sleep(0.01)
