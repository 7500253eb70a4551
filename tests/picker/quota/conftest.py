"""The stores, each on a clock that the test sets."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from picker.quota.store import Store
from picker.quota.store_memory import MemoryStore
from picker.quota.store_sqlite import SQLiteStore
from tests.picker.quota.kit import Clock, Desk

STORES = ("memory", "sqlite")


@asynccontextmanager
async def opened(kind: str, clock: Clock) -> AsyncIterator[Store]:
    """A new store of a kind, empty."""
    with tempfile.TemporaryDirectory() as directory:
        store: Store
        if kind == "memory":
            store = MemoryStore(clock, clock)
        else:
            store = SQLiteStore(Path(directory, "quota.db"), 30.0, clock)
        try:
            yield store
        finally:
            await store.close()


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    clock = Clock()
    async with opened(request.param, clock) as store:
        yield Desk(store, clock)
