"""KV events: which blocks the prefix cache holds, told to whoever subscribes.

The wire form is vLLM's (0.32, `distributed/kv_events.py`): a batch is a msgpack array, an event
in it a msgpack map whose key "type" names its class.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Consecutive full blocks entered the prefix cache.

    `token_ids` covers all of them: len(block_hashes) * block_size tokens. A hash is 64 bits,
    unsigned. `parent_block_hash` is the block before the first, None at the start of a prompt.
    `extra_keys` has one entry a block: what besides its tokens went into its hash (a cache salt),
    or None; left out, no block has any.

    vLLM always sends the fields with defaults here, so these are sent too.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"

    def __post_init__(self) -> None:
        if self.extra_keys is None:
            self.extra_keys = [None] * len(self.block_hashes)


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks left the prefix cache; vLLM sends one event for each block it evicts."""

    block_hashes: list[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The prefix cache was reset: it holds nothing any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one engine step changed, as sent: [seconds since the epoch, events, rank]."""

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0
