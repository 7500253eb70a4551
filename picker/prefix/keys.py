"""Block keys from token ids: our own 64-bit names for prefixes, whatever an engine calls blocks.

A block's hash is multilinear: the sum of its tokens, each times a random odd number of its own, mod
2^64, and then mixed. (Dietzfelbinger et al., "Polynomial hash functions are reliable", 1992; for
token ids below 2^20 two blocks collide with a chance below 2^-43.) What else is particular to the
block, a salt or an image, is added. A key chains these hashes as a polynomial,

    key[i] = key[i-1] * P + hash[i]  mod 2^64,

whose first predecessor is a root that stands for the adapter and the block size. P is odd and so
has an inverse Q: key[i] = P^(i+1) * (root + the sum of hash[j] * Q^(j+1) for j <= i), which NumPy
adds up without a loop over the blocks.

All constants are drawn anew by each process, as nobody outside must be able to forge collisions:
keys mean nothing elsewhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Keys = NDArray[np.uint64]
Tokens = NDArray[np.uint32]
Extra = str | bytes | int | Sequence["Extra"]

MASK = (1 << 64) - 1
MAX_BLOCK_SIZE = 1 << 16  # tokens

_SEED = secrets.randbits(64)
_START = np.uint64(secrets.randbits(64))
_P = secrets.randbits(61) << 3 | 5  # 5 mod 8: its powers repeat as late as can be, after 2^62
_Q = pow(_P, -1, 1 << 64)
_MIX = np.uint64(secrets.randbits(64) | 1)
_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """What of a prompt decides which blocks it shares with others.

    `extras` are those of single blocks, by their number: a cache salt is {0: (salt,)}.
    """

    tokens: Tokens
    adapter: str | None = None
    extras: Mapping[int, Sequence[Extra]] = field(default_factory=dict)


def _odd(count: int) -> Keys:
    drawn = np.frombuffer(secrets.token_bytes(8 * count), np.uint64)
    return drawn | np.uint64(1)


def _powers_of(base: int, count: int) -> Keys:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return powers.cumprod(dtype=np.uint64)


class Powers:
    """P^0, P^1, ... and Q^0, Q^1, ..., as far as they were needed."""

    def __init__(self) -> None:
        self.up = self.down = np.ones(1, np.uint64)
        self.reach(1 << 10)

    def reach(self, count: int) -> None:
        """Have at least the powers up to this one."""
        if count < len(self.up):
            return
        size = 1 << count.bit_length()
        self.up, self.down = (_powers_of(base, size) for base in (_P, _Q))


_powers = Powers()
_factors = _odd(64)


@lru_cache(maxsize=4096)
def root(block_size: int, adapter: str | None) -> int:
    """What the first block of a prompt is chained to."""
    name = b"base" if adapter is None else b"adapter " + adapter.encode(errors="surrogatepass")
    return xxh3_64_intdigest(b"%d %b" % (block_size, name), _SEED)


def extra_hash(extras: Iterable[Extra]) -> int:
    """What a block's salts and media hashes add to its hash, below 2^64.

    They count by value and how often each is there, in any order. Of a sequence, as older engines
    send it (a media hash with its offset in the block), only the first item counts.
    """
    return sum(_hash_of(extra) for extra in extras) & MASK


def _hash_of(extra: Extra) -> int:
    while not isinstance(extra, str | bytes | int):
        if not extra:
            return 0
        extra = extra[0]
    if isinstance(extra, bytes):
        extra = extra.hex()
    kind = "i" if isinstance(extra, int) else "s"
    return xxh3_64_intdigest(f"{kind}{extra}".encode(errors="surrogatepass"), _SEED)


def block_hashes(tokens: Tokens, block_size: int) -> Keys:
    """The hash of each block; there must be whole blocks only."""
    global _factors
    if block_size > len(_factors):
        _factors = np.concatenate((_factors, _odd(block_size - len(_factors))))
    hashes: Keys = tokens.reshape(-1, block_size).astype(np.uint64) @ _factors[:block_size]
    hashes += _START
    hashes ^= hashes >> _SHIFT
    hashes *= _MIX
    hashes ^= hashes >> _SHIFT
    return hashes


def prompt_keys(prompt: TokenPrompt, block_size: int) -> Keys:
    """The keys of a prompt's full blocks."""
    count = len(prompt.tokens) // block_size
    hashes = block_hashes(prompt.tokens[: count * block_size], block_size)
    for block, extras in prompt.extras.items():
        if 0 <= block < count:
            hashes[block] = int(hashes[block]) + extra_hash(extras) & MASK
    _powers.reach(count)
    hashes *= _powers.down[1 : count + 1]
    keys: Keys = np.cumsum(hashes, out=hashes)
    keys += np.uint64(root(block_size, prompt.adapter))
    keys *= _powers.up[1 : count + 1]
    return keys


class Chains:
    """The keys of several chains at once, one after another in one array.

    A chain begins after a key from elsewhere or after a block of an earlier chain.
    """

    def __init__(self, hashes: Keys) -> None:
        """`hashes`: of the blocks of all chains; taken over."""
        count = len(hashes)
        _powers.reach(count)
        self._up, self._down = _powers.up, _powers.down
        hashes *= self._down[1 : count + 1]
        self._sums: Keys = np.cumsum(hashes, out=hashes)
        self._offsets: list[int] = []  # of each chain: what its sums lack

    def start(self, position: int, parent: int) -> None:
        """The next chain begins at this position, after this key."""
        before = int(self._sums[position - 1]) if position else 0
        self._offsets.append(parent * int(self._down[position]) - before & MASK)

    def key(self, chain: int, position: int) -> int:
        """The key at a position that belongs to this chain."""
        up = int(self._up[position + 1])
        return up * (int(self._sums[position]) + self._offsets[chain]) & MASK

    def keys(self, lengths: Sequence[int]) -> Keys:
        """All keys; `lengths` are those of the chains. To be called once."""
        offsets = np.array(self._offsets, np.uint64)
        if len(lengths) > 1:
            offsets = offsets.repeat(lengths)
        keys = self._sums
        keys += offsets
        keys *= self._up[1 : len(keys) + 1]
        return keys
