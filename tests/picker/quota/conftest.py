"""The stores, each on a clock that the test sets."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

from picker.quota.store import Store
from picker.quota.store_memory import MemoryStore
from picker.quota.store_sqlite import SQLiteStore
from tests.picker.quota.kit import Clock, Desk
from tests.picker.quota.redis_server import ClockedRedisStore, RedisServer, running

STORES = ("memory", "sqlite", "redis")


_servers = ExitStack()


@cache
def _server() -> RedisServer:
    """One Redis for all tests that only need some; each store there has a name of its own."""
    return _servers.enter_context(running())


def redis_url() -> str:
    """An empty store in that Redis."""
    return f"{_server().url}?name={uuid4().hex}"


@pytest.fixture(scope="session", autouse=True)
def _end_servers() -> Iterator[None]:
    yield
    _servers.close()


@asynccontextmanager
async def opened(kind: str, clock: Clock) -> AsyncIterator[Store]:
    """A new store of a kind, empty."""
    with tempfile.TemporaryDirectory() as directory:
        store: Store
        if kind == "memory":
            store = MemoryStore(clock, clock)
        elif kind == "sqlite":
            store = SQLiteStore(Path(directory, "quota.db"), 30.0, clock)
        else:
            store = ClockedRedisStore(redis_url(), clock)
        try:
            yield store
        finally:
            await store.close()


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    clock = Clock()
    async with opened(request.param, clock) as store:
        yield Desk(store, clock)
