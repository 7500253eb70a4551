from __future__ import annotations

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.prefix.blocks import block_keys

SIZES = st.sampled_from([1, 4, 16, 64, 256])


def spelled_out(prompt: bytes, salt: bytes, block_bytes: int, max_blocks: int) -> list[int]:
    keys = [xxhash.xxh3_64_intdigest(salt)]
    while len(keys) <= max_blocks and len(prompt) >= block_bytes:
        block, prompt = prompt[:block_bytes], prompt[block_bytes:]
        keys.append(xxhash.xxh3_64_intdigest(block, seed=keys[-1]))
    return keys[1:]


@settings(deadline=None)
@given(st.binary(max_size=2000), st.binary(max_size=40), SIZES, st.integers(0, 40))
def test_keys_are_a_chain_of_seeded_hashes(
    prompt: bytes, salt: bytes, size: int, most: int
) -> None:
    assert block_keys(prompt, salt, size, most) == spelled_out(prompt, salt, size, most)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=4000), SIZES, st.data())
def test_a_changed_byte_changes_the_keys_from_its_block_on(
    prompt: bytes, size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = bytearray(prompt)
    other[at] ^= data.draw(st.integers(1, 255))
    keys = block_keys(prompt, b"m", size, 5000)
    others = block_keys(bytes(other), b"m", size, 5000)
    before = at // size
    assert others[:before] == keys[:before]
    assert not set(others[before:]) & set(keys)


@settings(deadline=None)
@given(st.binary(max_size=2000), st.binary(max_size=600), SIZES)
def test_an_appended_message_only_appends_keys(prompt: bytes, more: bytes, size: int) -> None:
    keys = block_keys(prompt, b"m", size, 5000)
    assert block_keys(prompt + more, b"m", size, 5000)[: len(keys)] == keys
    assert len(block_keys(prompt + more, b"m", size, 5000)) == len(prompt + more) // size


@settings(deadline=None)
@given(st.binary(min_size=256, max_size=2000), st.binary(max_size=30), st.binary(max_size=30))
def test_different_salts_share_no_key(prompt: bytes, salt: bytes, other: bytes) -> None:
    shared = set(block_keys(prompt, salt, 64, 99)) & set(block_keys(prompt, other, 64, 99))
    assert bool(shared) == (salt == other)


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    assert len(set(block_keys(bytes(256 * 100), b"", 256, 1024))) == 100


def test_a_moved_block_boundary_shares_nothing() -> None:
    prompt = bytes(range(256)) * 8
    assert not set(block_keys(prompt, b"", 64, 99)) & set(block_keys(b"x" + prompt, b"", 64, 99))


def test_a_prompt_shorter_than_a_block_has_no_key() -> None:
    assert block_keys(b"", b"m", 256, 1024) == []
    assert block_keys(b"x" * 255, b"m", 256, 1024) == []
    assert len(block_keys(b"x" * 511, b"m", 256, 1024)) == 1


def test_only_the_first_blocks_of_a_long_prompt_have_keys() -> None:
    prompt = bytes(256 * 2000)
    assert block_keys(prompt, b"m", 256, 1024) == block_keys(prompt, b"m", 256, 2000)[:1024]


@settings(deadline=None)
@given(st.binary(max_size=3000))
def test_keys_fit_64_bits(prompt: bytes) -> None:
    assert all(0 <= key < 1 << 64 for key in block_keys(prompt, b"m", 16, 999))
