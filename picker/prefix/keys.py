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
keys mean nothing elsewhere. Pickers that share a secret draw theirs from it (`share`), so that each
knows what the others mean.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_256
from operator import mul

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Keys = NDArray[np.uint64]
Tokens = NDArray[np.uint32]
Extra = str | bytes | int | Sequence["Extra"]

MASK = (1 << 64) - 1

_32 = np.uint64(32)

_SEED: int
_START: int
_P: int
_Q: int  # its inverse
_MIX: int
_powers: Powers
_factors: Factors


def _drawn(secret: bytes, what: bytes, count: int) -> Keys:
    """Random numbers: the same ones for the same secret, and more of them for a greater count."""
    return np.frombuffer(shake_256(what + b":" + secret).digest(8 * count), "<u8")


def _draw(secret: bytes) -> None:
    """All constants."""
    global _SEED, _START, _P, _Q, _MIX, _powers, _factors
    _SEED, _START, first, second = map(int, _drawn(secret, b"constants", 4))
    _P = first & MASK - 7 | 5  # 5 mod 8: its powers repeat as late as can be, after 2^62
    _Q = pow(_P, -1, 1 << 64)
    _MIX = second | 1
    _powers = Powers()
    _factors = Factors(secret)


def share(secret: bytes) -> int:
    """Draw the constants from a secret. Keys that were made before mean nothing any more.

    Returns a number that is the same for the same secret, and does not tell it.
    """
    _draw(secret)
    root.cache_clear()
    return int(_drawn(secret, b"name", 1)[0])


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """What of a prompt decides which blocks it shares with others.

    `extras` are those of single blocks, by their number: a cache salt is {0: (salt,)}.
    """

    tokens: Tokens
    adapter: str | None = None
    extras: Mapping[int, Sequence[Extra]] = field(default_factory=dict)


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


class Factors:
    """Random odd numbers, one for each token of a block, as many as were needed."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.array = np.empty(0, np.uint64)
        self.reach(64)

    def reach(self, count: int) -> None:
        """Have at least this many."""
        if count > len(self.array):
            self.array = _drawn(self._secret, b"factors", count) | np.uint64(1)
            self.list: list[int] = self.array.tolist()


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
    _factors.reach(block_size)
    hashes: Keys = tokens.reshape(-1, block_size).astype(np.uint64) @ _factors.array[:block_size]
    hashes += np.uint64(_START)
    hashes ^= hashes >> _32
    hashes *= np.uint64(_MIX)
    hashes ^= hashes >> _32
    return hashes


def block_hash(tokens: Sequence[int]) -> int:
    """The hash of one block."""
    _factors.reach(len(tokens))
    value: int = sum(map(mul, tokens, _factors.list), _START)
    value &= MASK
    value = (value ^ value >> 32) * _MIX & MASK
    return value ^ value >> 32


def next_key(key: int, value: int) -> int:
    """The key of a block with this hash, after a block or a root with that key."""
    return key * _P + value & MASK


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


def chain_keys(
    hashes: Keys, firsts: NDArray[np.intp], before: Sequence[int | tuple[int, int]]
) -> Keys:
    """The keys of several chains at once.

    Args:
        hashes: of the blocks of all chains, one after another; taken over.
        firsts: where each chain begins.
        before: the key before each chain; or a chain before it, and the position among all blocks
            of the one that it continues.
    """
    count = len(hashes)
    _powers.reach(count)
    up, down = _powers.up, _powers.down
    hashes *= down[1 : count + 1]
    sums: Keys = np.cumsum(hashes, out=hashes)
    # What the sums lack in each chain: its key before, minus what was added up by then.
    keys = np.array([key if isinstance(key, int) else 0 for key in before], np.uint64)
    offsets = keys * down[firsts]
    offsets[1:] -= sums[firsts[1:] - 1]
    for number, place in enumerate(before):
        if not isinstance(place, int):
            chain, position = place
            key = (int(sums[position]) + int(offsets[chain])) * int(up[position + 1])
            offsets[number] = int(offsets[number]) + key * int(down[firsts[number]]) & MASK
    if len(firsts) > 1:
        offsets = offsets.repeat(np.diff(firsts, append=count))
    sums += offsets
    sums *= up[1 : count + 1]
    return sums


_draw(secrets.token_bytes(32))
