"""Two thousand requests of every kind leave a worker as it was."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import aiohttp

from tests.worker.process import Worker, running_worker
from tests.worker.subscriber import KVSubscriber

REQUESTS = 2000
CLIENTS = 32
WORDS = "the quick brown fox jumps over a lazy dog while it rains in the north"
BAD_BODIES = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "max_tokens": 1e999}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": [[]]}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": "x", "model": "nobody"}',
    json.dumps({"prompt": "word " * 20_000}).encode(),
]


def prompt(rng: random.Random) -> str:
    """Often with a prefix that others have too, of very different lengths."""
    shared = WORDS * rng.choice([0, 0, 3, 10])
    return shared + " ".join(rng.choices(WORDS.split(), k=rng.randint(1, 60)))


async def good(worker: Worker, rng: random.Random) -> str:
    body = {
        "prompt": prompt(rng),
        "max_tokens": rng.randint(1, 40),
        "n": rng.choice([1, 1, 2]),
        "temperature": rng.choice([0, 1]),
        "stop": rng.choice([None, "e", ["qq", " t"]]),
        "stream": rng.random() < 0.5,
    }
    async with worker.http.post("/v1/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        assert not body["stream"] or text.endswith("data: [DONE]\n\n")
    return "good"


async def aborted(worker: Worker, rng: random.Random) -> str:
    """A client that leaves: before the answer, or after some of it."""
    body = {
        "messages": [{"role": "user", "content": prompt(rng)}],
        "max_tokens": 600,
        "ignore_eos": True,
        "n": rng.choice([1, 3]),
        "stream": rng.random() < 0.7,
    }
    # A connection of its own, that is closed and not kept.
    async with (
        aiohttp.ClientSession(worker.url) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        if body["stream"]:
            await response.content.readany()
        response.close()
    return "aborted"


async def bad(worker: Worker, rng: random.Random) -> str:
    headers = {"content-type": "application/json"}
    data = rng.choice(BAD_BODIES)
    async with worker.http.post("/v1/completions", data=data, headers=headers) as response:
        assert 400 <= response.status < 500, (data[:80], response.status)
        assert (await response.json())["error"]["code"] == response.status
    return "bad"


async def client(worker: Worker, seed: int, requests: int) -> Counter[str]:
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    for _ in range(requests):
        kind = rng.choices([good, aborted, bad], weights=[6, 2, 2])[0]
        done[await kind(worker, rng)] += 1
    return done


async def load(worker: Worker, seed: int, requests: int) -> Counter[str]:
    share = requests // CLIENTS
    counts = await asyncio.gather(*(client(worker, seed + i, share) for i in range(CLIENTS)))
    return sum(counts, Counter())


async def is_quiet(worker: Worker) -> None:
    await worker.wait_for_metric("vllm:num_requests_running", 0)
    await worker.wait_for_metric("vllm:num_requests_waiting", 0)
    await worker.wait_for_metric("vllm:kv_cache_usage_perc", 0)


def has_seen_the_reset(subscriber: KVSubscriber) -> bool:
    return bool(subscriber.events) and subscriber.events[-1]["type"] == "AllBlocksCleared"


async def test_a_soak_leaves_nothing_behind():
    flags = ["--simulate", "instant", "--num-blocks", "512", "--max-num-seqs", "16"]
    async with running_worker(*flags) as worker:
        await load(worker, 0, REQUESTS // 4)
        await is_quiet(worker)
        before = worker.resident_bytes
        done = await load(worker, 1000, REQUESTS)
        await is_quiet(worker)
        assert min(done.values()) > 100, done
        assert await worker.metric("vllm:request_success_total", 'reason="abort"') > 100
        assert worker.resident_bytes - before < 16 << 20
        # A reset is granted only when every single block is free.
        async with worker.http.post("/reset_prefix_cache") as response:
            assert await response.json() == {"success": True}
        with KVSubscriber(worker.events_endpoint, worker.replay_endpoint) as subscriber:
            await asyncio.to_thread(subscriber.poll_until, has_seen_the_reset)
            assert subscriber.blocks == {}
        assert await worker.stop() == 0
