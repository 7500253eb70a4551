"""The prefix index as the picker's own picks teach it: what was sent to a pod is in its cache.

It guesses. A pod's cache is taken to be as large as the pod says, and to evict what was used least
recently; what the pod serves to others, or loses otherwise, stays unknown.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from picker import config
from picker.pool import Endpoint, Pool
from picker.prefix.blocks import block_keys
from picker.prefix.lru import RecentIndex, keys_of
from picker.prefix.match import By, Match
from picker.request import LLMRequest

KEY_BYTES = 8
BYTES_PER_TOKEN = 4  # of prompt text, about; what a pod's cache holds is told in tokens

# What a pod is taken to cache until it tells: 60 GiB for an 8B model's 128 KiB per token.
DEFAULT_KV_TOKENS = 500_000

# Blocks that all pods may hold together, in equal parts. One takes 150 to 240 bytes, and 90 to 150
# more for each further pod that holds it (measured), so this is 1 GB at most. With blocks of 256
# bytes that is 4 million tokens for each of 64 pods, or 268,000 for each of 1,000.
MAX_BLOCKS = 1 << 22


class Mark(NamedTuple):
    """A prompt, as this producer knows it."""

    keys: list[int]  # of its blocks
    tokens_per_block: float  # 0 without keys


class Use(NamedTuple):
    """A prompt that was sent to a pod."""

    blocks: bytes  # what the index needs to take it back: 8 bytes a block
    tokens_per_block: float
    held: int  # blocks that the pod held before


class ApproximatePrefix:
    """Matches prompts with what was sent where. A listener of its pool."""

    def __init__(self, pool: Pool, settings: config.Prefix) -> None:
        self._block_bytes = int(settings.block_bytes)
        self._max_blocks = settings.max_blocks
        self._index = RecentIndex(pool.capacity)
        self._pool = pool
        self._wanted: dict[int, int] = {}  # by slot: blocks that its pod's cache holds
        self._part = MAX_BLOCKS  # of all blocks, for each pod
        # Equal numbers mean that another picker's block keys are ours.
        self.naming = xxh3_64_intdigest(b"bytes %d" % self._block_bytes)
        # Told of each prompt that was sent somewhere: 8 bytes for each key of its blocks.
        self.on_learn: Callable[[Endpoint, bytes], None] | None = None
        pool.listen(self)

    async def start(self) -> None:
        """There is nothing to start: it learns when it is told."""

    async def first_round(self) -> None:
        """Pods tell nothing here."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    @property
    def blocks(self) -> int:
        """Blocks that all pods are taken to hold together."""
        return self._index.blocks

    def prepare(self, _: LLMRequest) -> None:
        """The bytes of a prompt are at hand."""

    def match(self, request: LLMRequest) -> Match:
        """See PrefixProducer."""
        prompt = request.prompt
        keys = block_keys(prompt, request.salt, self._block_bytes, self._max_blocks)
        depths = self._index.match(keys)
        if not keys:
            none = depths.astype(np.float32)
            by = By.APPROXIMATE if prompt else By.NONE
            return Match(none, none, depths, 0, by, Mark(keys, 0.0))
        # In float64, which is exact enough that a whole prompt's blocks give all of its tokens.
        num_bytes = len(prompt) + request.unread
        tokens_per_block = self._block_bytes * request.prompt_tokens / num_bytes
        tokens = (depths * tokens_per_block).astype(np.float32)
        mark = Mark(keys, tokens_per_block)
        return Match(tokens, tokens, depths, len(keys), By.APPROXIMATE, mark)

    def learn(self, match: Match, endpoint: Endpoint) -> Use:
        """The endpoint holds a prompt's blocks from now on."""
        mark: Mark = match.mark
        held = int(match.blocks[endpoint.slot])
        return Use(self._learn(mark.keys, endpoint), mark.tokens_per_block, held)

    def moved(self, use: Use, picked: Endpoint, served: Endpoint) -> tuple[int, int]:
        """See PrefixProducer."""
        keys = keys_of(use.blocks) if use.blocks else []
        if picked.alive and use.blocks:
            self._index.unlearn(picked.slot, use.blocks, use.held)
        if not served.alive:
            return 0, 0
        blocks = int(self._index.match(keys)[served.slot])
        self._learn(keys, served)
        return blocks, round(blocks * use.tokens_per_block)

    def _learn(self, keys: list[int], endpoint: Endpoint) -> bytes:
        if not endpoint.alive:
            return b""
        if self._part != MAX_BLOCKS // len(self._wanted):
            self._share()
        use = self._index.learn(endpoint.slot, keys)
        if self.on_learn is not None and use:
            self.on_learn(endpoint, use[KEY_BYTES:])
        return use

    def learn_elsewhere(self, endpoint: Endpoint, keys: bytes) -> None:
        """Another picker sent a prompt with these blocks to an endpoint: 8 bytes for each key."""
        if endpoint.alive:
            if self._part != MAX_BLOCKS // len(self._wanted):
                self._share()
            self._index.learn(endpoint.slot, memoryview(keys).cast("Q").tolist())

    def recent(self, most_blocks: int) -> Iterator[tuple[Endpoint, bytes]]:
        """What was learnt last, of each pod its part of so many blocks, the oldest of these first.

        Others may learn and evict between two of them.
        """
        endpoints = list(self._pool.endpoints.values())
        for endpoint in endpoints:
            for use in reversed(self._index.recent(endpoint.slot, most_blocks // len(endpoints))):
                if endpoint.alive and (keys := self._index.still(endpoint.slot, use)):
                    yield endpoint, array("Q", keys).tobytes()

    def resized(self, endpoint: Endpoint, kv_tokens: int) -> None:
        """An endpoint has told the size of its KV cache, in tokens."""
        if endpoint.alive:
            self._want(endpoint.slot, kv_tokens)

    def added(self, endpoint: Endpoint) -> None:
        self._index.grow(self._pool.capacity)
        self._want(endpoint.slot, DEFAULT_KV_TOKENS)

    def removed(self, endpoint: Endpoint) -> None:
        del self._wanted[endpoint.slot]
        self._index.forget(endpoint.slot)

    def _want(self, slot: int, kv_tokens: int) -> None:
        blocks = kv_tokens * BYTES_PER_TOKEN // self._block_bytes
        self._wanted[slot] = blocks
        self._index.resize(slot, min(blocks, self._part))

    def _share(self) -> None:
        """The number of pods has changed, and with it each one's part of all blocks."""
        self._part = MAX_BLOCKS // len(self._wanted)
        for slot, blocks in self._wanted.items():
            self._index.resize(slot, min(blocks, self._part))
