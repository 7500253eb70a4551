"""What the precise prefix index costs: lookups, events, memory, and how long it holds the loop.

python -m bench.index
python -m bench.index --blocks 1000000

All times are of this thread's CPU, as nothing here waits. Keys, events and prompts are random; a
block has 16 tokens.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from bench.report import spread, write
from picker.prefix.events import Stored, decode
from picker.prefix.index import BlockIndex, Source, TokenPrompt

SIZE = 16
PODS = 96
VOCABULARY = 128_000
AIMS = {
    "lookup of 10,000 tokens": "below 200 microseconds",
    "lookup of 240,000 tokens": "below 5,000 microseconds",
    "events": "300,000 blocks/s on one core",
    "events, 1,000 blocks/s": "below 10 % of one core",
    "memory": "100 bytes a block held by 64 pods; 10 million blocks in 1 GiB",
    "a call": "never above 5 milliseconds",
}

encode = msgspec.msgpack.Encoder().encode


class Pods:
    """Engines that make up events."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._names = count(1)

    def tokens(self, number: int) -> np.ndarray:
        return self._random.integers(0, VOCABULARY, number, dtype=np.uint32)

    def names(self, number: int) -> list[int]:
        """Hashes, spread over 64 bits."""
        return [next(self._names) * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for _ in range(number)]

    def stored(self, blocks: int, parent: int | None = None) -> dict[str, Any]:
        """An event as vLLM sends it."""
        return {
            "type": "BlockStored",
            "block_hashes": self.names(blocks),
            "parent_block_hash": parent,
            "token_ids": self.tokens(blocks * SIZE).tolist(),
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


def removed(name: int) -> dict[str, Any]:
    """vLLM sends one event for each block."""
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Seconds of CPU that a call takes."""
    started = time.thread_time()
    call(*arguments)
    return time.thread_time() - started


def settle() -> None:
    """Let the collector of garbage not look at what the benchmark itself keeps."""
    gc.collect()
    gc.freeze()


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def calls(seconds: list[float]) -> dict[str, float]:
    """How long calls took, in milliseconds."""
    parts = np.percentile(np.array(seconds) * 1e3, [50, 99, 99.9, 100]).round(2).tolist()
    return dict(zip(("median", "99 %", "99.9 %", "max"), parts, strict=True))


def machine_noise() -> dict[str, float]:
    """How long a loop of always the same length takes: what of the longest calls is not ours."""

    def loop() -> None:
        for _ in range(20_000):
            pass

    return calls([timed(loop) for _ in range(4000)])


def fill(index: BlockIndex, sources: list[Source], blocks: int, pods: Pods) -> list[float]:
    """Store chains of 512 blocks, each held by all sources; the seconds of each call."""
    taken = []
    while len(index) < blocks:
        names, tokens = pods.names(512), pods.tokens(512 * SIZE).tolist()
        for source in sources:
            event = Stored(names, None, tokens, SIZE)
            taken.append(timed(index.apply, source, [event]))
    return taken


def lookups(blocks: int, seconds: float) -> dict[str, Any]:
    """Match prompts of which each pod holds another part, in an index that holds much else."""
    pods = Pods()
    index = BlockIndex(PODS, 1 << 22)
    sources = [index.open(slot) for slot in range(PODS)]
    fill(index, sources[:1], blocks, pods)
    prompts = []
    for prompt in range(8):
        tokens, names = pods.tokens(240_000), pods.names(240_000 // SIZE)
        for slot, source in enumerate(sources):
            held = len(names) if slot == prompt else int(np.random.default_rng(slot).integers(600))
            for first in range(0, held, 500):
                last = min(first + 500, held)
                parent = names[first - 1] if first else None
                part = tokens[first * SIZE : last * SIZE].tolist()
                index.apply(source, [Stored(names[first:last], parent, part, SIZE)])
        prompts.append(tokens)
    settle()
    results = {}
    for length in (1_000, 10_000, 100_000, 240_000):
        taken = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for tokens in prompts:
                prompt = TokenPrompt(tokens[:length])
                taken.append(timed(index.match, prompt) * 1e6)
        assert index.match(prompt).blocks[len(prompts) - 1] == length // SIZE
        results[f"{length:,} tokens"] = spread(taken, 1)
    cold = TokenPrompt(pods.tokens(10_000))
    taken = [timed(index.match, cold) * 1e6 for _ in range(200)]
    results["10,000 tokens that nobody holds"] = spread(taken, 1)
    return {"blocks": len(index), "pods": PODS, "unit": "microseconds", **results}


def messages(shape: str, pods: Pods) -> Iterator[tuple[int, bytes]]:
    """Blocks that a message changes, and the message."""
    held: list[int] = []
    if shape == "prompts of 64 blocks, 8 a message":
        while True:
            yield 512, encode([0.0, [pods.stored(64) for _ in range(8)], 0])
    elif shape == "one prompt of 512 blocks a message":
        while True:
            yield 512, encode([0.0, [pods.stored(512)], 0])
    elif shape == "256 single blocks a message":
        while True:
            yield 256, encode([0.0, [pods.stored(1) for _ in range(256)], 0])
    elif shape == "a full cache: 4 prompts of 32 blocks for 128 removed, a message":
        while True:
            stored = [pods.stored(32) for _ in range(4)]
            gone, held = held[:128], held[128:]
            held += [name for event in stored for name in reversed(event["block_hashes"])]
            events = [*map(removed, gone), *stored]
            yield 128 + len(gone), encode([0.0, events, 0])
    else:
        while True:
            yield 1, encode([0.0, [pods.stored(1)], 0])


SHAPES = (
    "one prompt of 512 blocks a message",
    "prompts of 64 blocks, 8 a message",
    "a full cache: 4 prompts of 32 blocks for 128 removed, a message",
    "256 single blocks a message",
    "a single block a message",
)


def take_in(index: BlockIndex, source: Source, payload: bytes) -> None:
    index.apply(source, decode(payload).events)


def intake(seconds: float) -> dict[str, Any]:
    """Decode messages and apply them."""
    results: dict[str, Any] = {}
    for shape in SHAPES:
        pods = Pods()
        index = BlockIndex(1, 1 << 22)
        source = index.open(0)
        made = messages(shape, pods)
        rates, each = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rates) < 10:
            batch = [next(made) for _ in range(20)]
            settle()
            taken = [timed(take_in, index, source, payload) for _, payload in batch]
            each += taken
            rates.append(sum(blocks for blocks, _ in batch) / sum(taken))
        figures = {"blocks/s": spread(rates, 0), "a call, ms": calls(each)}
        share = 1000 / float(np.median(rates))
        results[shape] = {**figures, "share of a core at 1,000 blocks/s": round(share, 4)}
    return results


def memory(blocks: int) -> dict[str, Any]:
    """What blocks take that 64 pods hold, and how long it takes to forget one of these pods."""
    settle()
    before = resident()
    index = BlockIndex(64, blocks + (blocks >> 3))
    sources = [index.open(slot) for slot in range(64)]
    some = min(blocks, 500_000)
    taken = fill(index, sources, some, Pods(1))
    shared = (resident() - before) / len(index)
    taken += fill(index, sources[:1], blocks, Pods(2))
    total = resident() - before
    index.close(sources[0])
    slices, busy = [], True
    while busy:
        started = time.thread_time()
        busy = index.tidy()
        slices.append(time.thread_time() - started)
    return {
        "blocks": blocks,
        "resident MiB": round(total / 2**20, 1),
        "bytes a block": round(total / blocks, 1),
        f"bytes a block, {some:,} held by 64 pods": round(shared, 1),
        "a call of 512 blocks, ms": calls(taken),
        "closing a pod: slices": len(slices),
        "closing a pod: seconds in all": round(sum(slices), 2),
        "closing a pod: a slice, ms": calls(slices),
    }


def eviction(blocks: int) -> dict[str, Any]:
    """Store without end where there is no room, with a slice of upkeep between two messages."""
    pods = Pods(3)
    index = BlockIndex(1, blocks)
    source = index.open(0)
    taken, slices = [], []
    settle()
    for _ in range(3 * blocks // 512):
        event = Stored(pods.names(512), None, pods.tokens(512 * SIZE).tolist(), SIZE)
        taken.append(timed(index.apply, source, [event]))
        for _ in range(16):
            started = time.thread_time()
            busy = index.tidy()
            slices.append(time.thread_time() - started)
            if not busy:
                break
    stats = index.stats
    return {
        "max blocks": blocks,
        "stored": stats.stored,
        "evicted": stats.evicted,
        "refused": sum(stats.refused.values()),
        "a call of 512 blocks, ms": calls(taken),
        "a slice, ms": calls(slices),
        "upkeep, microseconds a stored block": round(sum(slices) * 1e6 / stats.stored, 2),
    }


@click.command()
@click.option("--blocks", type=int, default=10_000_000, show_default=True, help="For memory.")
@click.option("--seconds", type=float, default=2.0, show_default=True, help="For each figure.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(blocks: int, seconds: float, path: Path | None) -> None:
    """Measure lookups, events, memory and eviction."""
    results: dict[str, Any] = {"aims": AIMS}
    for name, part in (
        ("memory", lambda: memory(blocks)),
        ("lookups", lambda: lookups(1_000_000, seconds)),
        ("events", lambda: intake(seconds)),
        ("eviction", lambda: eviction(1 << 18)),
        ("noise: a loop of one length, ms", machine_noise),
    ):
        results[name] = part()
        click.echo(f"{name}:")
        for what, figure in results[name].items():
            click.echo(f"  {what:64} {figure}")
    click.echo(f"Written to {write('index', results, path)}")


if __name__ == "__main__":
    main()
