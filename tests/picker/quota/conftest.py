"""The stores, each on a clock that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from picker.quota.store import Store
from picker.quota.store_memory import MemoryStore
from tests.picker.quota.kit import Clock, Desk

STORES = ("memory",)


async def opened(kind: str, clock: Clock) -> Store:
    return MemoryStore(clock, clock)


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    clock = Clock()
    store = await opened(request.param, clock)
    yield Desk(store, clock)
    await store.close()
