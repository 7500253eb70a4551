"""Block keys: 64-bit names for the prefixes of a prompt.

The prompt's bytes are cut into blocks of equal size. A block's key is the hash of its bytes, seeded
with the key of the block before it, so one key stands for everything up to the end of its block:
two prompts share a key exactly where they share the whole prefix (but for one chance in 2^64).

The hash is not cryptographic. Whoever forges a collision has a request sent to a pod that does not
hold its prefix; the pod compares prefixes by itself, and no cached content is at stake.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest


def block_keys(prompt: bytes, salt: bytes, block_bytes: int, max_blocks: int) -> list[int]:
    """The keys of the first `max_blocks` full blocks of a prompt, each below 2^64.

    `salt` is what keeps equal prompts apart: the first key is chained from its hash.

    A block that the end of the prompt cuts short has no key: it would match this very prompt
    alone, for the next turn of the conversation fills it up with other bytes; and engines cache
    full blocks only.
    """
    count = min(len(prompt) // block_bytes, max_blocks)
    if count <= 0:
        return []
    key = xxh3_64_intdigest(salt)
    # NumPy cuts the prompt in one call, which takes half the time of slicing it block by block.
    blocks = np.frombuffer(prompt, f"V{block_bytes}", count).tolist()
    return [key := xxh3_64_intdigest(block, key) for block in blocks]
