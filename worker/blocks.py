"""The block pool: fixed blocks of KV memory, shared by prefix, evicted least recently used.

A block holds the keys and values of `block_size` consecutive tokens. A *full* block is
cached under a hash chain over (parent block, its tokens, extra keys), so that equal hashes
mean equal prefixes. Released blocks keep their content: they wait in `_free`, least recently
used first, and can be taken back by a prefix hit until something else needs the memory.
The design is vLLM's (v1/core/block_pool.py); unlike there, a second block with content that
is cached already is given back for the first one, so each prefix is held once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens

from worker.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from worker.sequence import Adapter, Sequence

ROOT = hashlib.sha256(b"warmpath").digest()  # the parent of every first block


def root_key(adapter: Adapter | None, cache_salt: str | None) -> bytes:
    """What keeps prefixes of different adapters and salts apart: bytes for the first hash.

    An adapter counts by the load it came from, since reloaded weights must not meet old KV.
    Each part is tagged and length-prefixed: no adapter's name can pass for a salt.
    """
    key = b""
    if adapter is not None:
        name = adapter.name.encode()
        key += b"lora" + len(name).to_bytes(8, "big") + name + adapter.load_id.to_bytes(8, "big")
    if cache_salt is not None:
        salt = cache_salt.encode("utf-8", "surrogatepass")
        key += b"salt" + len(salt).to_bytes(8, "big") + salt
    return key


def chain_hash(parent: bytes, tokens: Tokens[int], extra: bytes = b"") -> bytes:
    """The 32-byte key of a block of `tokens` that follows the block with key `parent`.

    A cryptographic hash, since tenants choose tokens and a collision would serve one
    tenant's KV to another.
    """
    return hashlib.sha256(parent + array("I", tokens).tobytes() + extra).digest()


def wire_hash(digest: bytes) -> int:
    """The block's name in KV events: the low 64 bits, as vLLM sends them."""
    return int.from_bytes(digest[-8:], "big")


class BlockPool:
    """Owns every block: who uses it, what it holds, and in what order it may be reused."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.events: list[Event] = []
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._duplicates: list[tuple[Sequence, int]] = []

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks in use by sequences, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def cached_hashes(self) -> set[int]:
        """The wire hashes of all cached blocks: what a KV event subscriber should believe."""
        return {wire_hash(digest) for digest in self._cached}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks that the sequence's tokens begin with; none is acquired yet.

        At least one token is left out, since logits come only from computing a token.
        """
        if not self.enable_caching or sequence.needs_prompt_logits:
            return []
        found: list[int] = []
        for digest in self._chain(sequence, (len(sequence.token_ids) - 1) // self.block_size):
            block = self._cached.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: list[int]) -> int:
        """How many of `blocks` are free now, so that acquiring them uses up free memory."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def acquire(self, sequence: Sequence, blocks: list[int]) -> None:
        """Put cached `blocks` at the head of the sequence's block table."""
        for block in blocks:
            self._take(block)
        sequence.block_ids.extend(blocks)
        sequence.num_registered_blocks = len(blocks)

    def allocate(self, sequence: Sequence, num_blocks: int) -> None:
        """Append `num_blocks` empty blocks; the caller has checked `can_allocate`."""
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            self._evict(block)
            self._ref_counts[block] = 1
            sequence.block_ids.append(block)

    def register(self, sequence: Sequence) -> None:
        """Cache the blocks that are full once `num_computed_tokens` tokens are computed.

        Called when a step is planned: sequences admitted later in the same step share
        blocks that this step computes, since every layer writes its KV before it reads.
        """
        first = sequence.num_registered_blocks
        last = sequence.num_computed_tokens // self.block_size
        if first >= last or not self.enable_caching:
            return
        sequence.num_registered_blocks = last
        chain = self._chain(sequence, last)
        fresh = first  # where the run of blocks to announce begins
        for index in range(first, last):
            if chain[index] in self._cached:
                self._duplicates.append((sequence, index))
                self._announce(sequence, fresh, index)
                fresh = index + 1
            else:
                self._cache(sequence.block_ids[index], chain[index])
        self._announce(sequence, fresh, last)

    def merge_duplicates(self) -> None:
        """After a step: swap blocks whose content was cached already for the cached ones."""
        for sequence, index in self._duplicates:
            digest = sequence.block_hashes[index]
            own = sequence.block_ids[index]
            cached = self._cached.get(digest)
            if cached is None:  # evicted since: ours takes its place
                self._cache(own, digest)
                self._announce(sequence, index, index + 1)
            else:
                self._take(cached)
                sequence.block_ids[index] = cached
                self._release(own)
        self._duplicates.clear()

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence, tail first, so that tails are reused first."""
        for block in reversed(sequence.block_ids):
            self._release(block)
        del sequence.block_ids[:]
        sequence.num_registered_blocks = 0

    def reset(self) -> bool:
        """Forget all cached content; refused (False) while a sequence uses a block."""
        if len(self._free) != self.num_blocks:
            return False
        self._cached.clear()
        self._duplicates.clear()
        self._hashes = [None] * self.num_blocks
        self.events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state, counted once."""
        for block, count in enumerate(self._ref_counts):
            assert count >= 0 and (count == 0) == (block in self._free), block
            digest = self._hashes[block]
            assert digest is None or self._cached.get(digest) == block, block
        assert len(self._cached) == sum(digest is not None for digest in self._hashes)

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of the sequence's first blocks, `num_blocks` of them at least.

        Kept with the sequence: its tokens never change, they only grow.
        """
        hashes = sequence.block_hashes
        size = self.block_size
        for start in range(len(hashes) * size, num_blocks * size, size):
            tokens = sequence.token_ids[start : start + size]
            if start:
                hashes.append(chain_hash(hashes[-1], tokens))
            else:
                extra = root_key(sequence.adapter, sequence.cache_salt)
                hashes.append(chain_hash(ROOT, tokens, extra))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]

    def _take(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free[block] = None
            if self._hashes[block] is None:  # nothing to keep it for: reuse it first
                self._free.move_to_end(block, last=False)

    def _cache(self, block: int, digest: bytes) -> None:
        self._hashes[block] = digest
        self._cached[digest] = block

    def _evict(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            self._hashes[block] = None
            del self._cached[digest]
            self.events.append(BlockRemoved(block_hashes=[wire_hash(digest)]))

    def _announce(self, sequence: Sequence, first: int, last: int) -> None:
        """One BlockStored for the blocks `first` to `last` (excluded) of a sequence."""
        if first >= last:
            return
        hashes = sequence.block_hashes
        size = self.block_size
        adapter = [sequence.adapter.name] if sequence.adapter else []
        extra_keys: list[list[str] | None] = [adapter or None] * (last - first)
        if first == 0 and sequence.cache_salt is not None:
            extra_keys[0] = [*adapter, sequence.cache_salt]
        self.events.append(
            BlockStored(
                block_hashes=[wire_hash(digest) for digest in hashes[first:last]],
                parent_block_hash=wire_hash(hashes[first - 1]) if first else None,
                token_ids=sequence.token_ids[first * size : last * size],
                block_size=size,
                lora_name=sequence.adapter.name if sequence.adapter else None,
                extra_keys=extra_keys,
            )
        )
