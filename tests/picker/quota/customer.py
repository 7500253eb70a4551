"""A process that admits and settles as fast as it can, and tells what it was answered.

python -m tests.picker.quota.customer STORE_URL NAME

It prints `granted ID` and `settled ID TOKENS` after each answer, until it is killed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from picker.quota.plan import Granted
from picker.quota.stores import open_store
from tests.picker.quota.kit import Clock, Desk, spent, tokens

WORKERS = 8


async def serve(url: str, name: str) -> None:
    store = open_store(url, timeout=30.0)
    desk = Desk(store, Clock(time.time()))
    await desk.read()
    seeds = random.Random(name)

    async def work(worker: int) -> None:
        for number in range(1_000_000):
            id = f"{name}-{worker}-{number}"
            answer = await store.reserve(id, desk.plan("tenant/alice"), tokens(50), "m", 3600.0)
            assert isinstance(answer, Granted)
            print("granted", id, flush=True)
            used = seeds.randrange(200)
            if used % 10:  # others stay open
                assert await store.settle(id, spent(used))
                print("settled", id, used, flush=True)

    await asyncio.gather(*(work(worker) for worker in range(WORKERS)))


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
