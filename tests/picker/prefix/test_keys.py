from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.prefix.keys import (
    TokenPrompt,
    block_hash,
    block_hashes,
    chain_keys,
    extra_hash,
    next_key,
    prompt_keys,
    root,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300).map(
    lambda tokens: np.array(tokens, np.uint32)
)
ADAPTERS = st.one_of(st.none(), st.text(max_size=8))
EXTRAS = st.dictionaries(
    st.integers(-3, 20), st.lists(st.one_of(st.text(), st.binary(), st.integers())), max_size=4
)


def keys_of(
    tokens: object, adapter: str | None = None, size: int = 4, **extras: tuple[object, ...]
) -> list[int]:
    """With the extras of block n under `bn`."""
    by_block = {int(name[1:]): each for name, each in extras.items()}
    prompt = TokenPrompt(np.array(tokens, np.uint32), adapter, by_block)  # type: ignore[arg-type]
    return prompt_keys(prompt, size).tolist()


@settings(deadline=None)
@given(TOKENS, ADAPTERS, EXTRAS, st.sampled_from([1, 2, 16, 100]))
def test_keys_are_a_chain(
    tokens: np.ndarray, adapter: str | None, extras: dict[int, list[object]], size: int
) -> None:
    keys = prompt_keys(TokenPrompt(tokens, adapter, extras), size).tolist()  # type: ignore[arg-type]
    assert len(keys) == len(tokens) // size
    key = root(size, adapter)
    for block, expected in enumerate(keys):
        value = block_hash(tokens[block * size : (block + 1) * size].tolist())
        value += extra_hash(extras.get(block, ()))  # type: ignore[arg-type]
        key = next_key(key, value)
        assert key == expected


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_many_chains_at_once_are_the_same_as_one_by_one(
    lengths: list[int], data: st.DataObject
) -> None:
    hashes = np.random.default_rng(len(lengths)).integers(0, 2**64, sum(lengths), np.uint64)
    firsts = np.cumsum([0, *lengths[:-1]])
    expected: list[int] = []
    before: list[int | tuple[int, int]] = []
    for number, (first, length) in enumerate(zip(firsts.tolist(), lengths, strict=True)):
        if number and data.draw(st.booleans()):  # continues an earlier block
            position = data.draw(st.integers(0, first - 1))
            before.append((int(np.searchsorted(firsts, position, "right")) - 1, position))
            key = expected[position]
        else:
            key = data.draw(st.integers(0, 2**64 - 1))
            before.append(key)
        for value in hashes[first : first + length].tolist():
            key = next_key(key, value)
            expected.append(key)
    assert chain_keys(hashes.copy(), firsts, before).tolist() == expected


def test_equal_beginnings_have_equal_keys_and_nothing_else_has() -> None:
    tokens = [*range(40)]
    longer = keys_of([*tokens, 7, 7, 7, 7])
    assert keys_of(tokens) == longer[:10]
    assert keys_of(tokens[:-1]) == longer[:9]  # a block that is cut short has no key
    changed = keys_of([*tokens[:20], 99, *tokens[21:]])
    assert changed[:5] == longer[:5]
    assert not set(changed[5:]) & set(longer)
    assert len(set(keys_of([1] * 40))) == 10  # equal blocks at other places are others


def test_what_is_not_tokens_keeps_prompts_apart() -> None:
    tokens = [*range(40)]
    variants = [
        keys_of(tokens),
        keys_of(tokens, "S"),
        keys_of(tokens, ""),
        keys_of(tokens, b0=("S",)),
        keys_of(tokens, b0=("",)),
        keys_of(tokens, b0=("S", "S")),
        keys_of(tokens, "S", b0=("S",)),
        keys_of(tokens, b0=(b"S",)),
        keys_of(tokens, b0=(5,)),
        keys_of(tokens, b0=("5",)),
        keys_of(tokens, size=8),
    ]
    for one, other in combinations(variants, 2):
        assert not set(one) & set(other)


def test_extras_count_from_their_block_on() -> None:
    tokens = [*range(40)]
    plain, image = keys_of(tokens), keys_of(tokens, b3=("hash",))
    assert plain[:3] == image[:3]
    assert not set(plain[3:]) & set(image)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b"), ("b", "a")),  # in whichever order
        ((b"\x01\xff",), ("01ff",)),  # bytes are what their hexadecimal is
        ((["hash", 3],), ("hash",)),  # an offset is not of the content
        (([["hash", 3], 4],), ("hash",)),
        ((), ([],)),
    ],
)
def test_extras_that_mean_the_same(one: tuple[object, ...], other: tuple[object, ...]) -> None:
    assert extra_hash(one) == extra_hash(other)  # type: ignore[arg-type]


@settings(deadline=None)
@given(TOKENS, st.sampled_from([1, 3, 16]))
def test_blocks_hash_alike_one_by_one(tokens: np.ndarray, size: int) -> None:
    tokens = tokens[: len(tokens) // size * size]
    expected = [block_hash(block) for block in tokens.reshape(-1, size).tolist()]
    assert block_hashes(tokens, size).tolist() == expected


def test_hashes_of_blocks_that_differ_little_spread_over_all_bits() -> None:
    tokens = np.zeros((20_000, 16), np.uint32)
    tokens[np.arange(20_000), np.arange(20_000) % 16] = np.arange(20_000) // 16 + 1
    hashes = block_hashes(tokens.reshape(-1), 16)
    assert len(set(hashes.tolist())) == 20_000
    bits = Counter(bit for value in hashes[:4000].tolist() for bit in range(64) if value >> bit & 1)
    assert all(1700 < bits[bit] < 2300 for bit in range(64))
    low = Counter((hashes & np.uint64(255)).tolist())
    assert max(low.values()) < 150  # 78 on average
