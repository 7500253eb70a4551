"""Events in every dialect, and what is left of messages that are wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.prefix import events
from picker.prefix.events import Batch, Cleared, Event, Removed, Stored, Tier, decode, tier_of

FRAMES = json.loads((Path(__file__).parents[2] / "data" / "vllm_kv_frames.json").read_text())
encode = msgspec.msgpack.encode

Wire = dict[str, Any]
FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def said(event: Event) -> tuple[str, tuple[Any, ...]]:
    """The class of an event, and all its fields."""
    name = next(kind.__name__ for kind in (Stored, Removed, Cleared) if isinstance(event, kind))
    return name, msgspec.structs.astuple(event)


def understood(batch: Batch) -> list[tuple[str, tuple[Any, ...]]]:
    return [said(event) for event in batch.events]


def stored(hashes: list[Any], tokens: list[Any], **more: Any) -> Wire:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 2,
        **more,
    }


def removed(*hashes: Any, **more: Any) -> Wire:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def as_array(event: Wire) -> list[Any]:
    """The array form, as long as the last field that the map form has."""
    names = FIELDS[event["type"]]
    length = max((i + 1 for i, name in enumerate(names) if name in event), default=0)
    return [event["type"], *(event.get(name) for name in names[:length])]


def digest(number: int) -> bytes:
    return b"any" + struct.pack(">Q", number)


def send(*wire: Any) -> Batch:
    return decode(encode([1.5, list(wire), 0]))


# What vLLM sent


@pytest.mark.parametrize("group", ["live", "replay_first", "replay_last"])
def test_what_vllm_sent_is_understood(group: str) -> None:
    for message in FRAMES[group]:
        payload = bytes.fromhex(message["frames"][-1])
        if not payload:
            continue  # the end mark of a replay
        batch = decode(payload)
        _, sent, _ = msgspec.msgpack.decode(payload)
        assert (batch.malformed, batch.unknown) == (0, 0)
        for event, wire in zip(batch.events, sent, strict=True):
            if isinstance(event, Stored):
                keys = [None if each is None else tuple(each) for each in wire["extra_keys"]]
                assert wire["type"] == "BlockStored"
                assert event.hashes == wire["block_hashes"]
                assert event.parent == wire["parent_block_hash"]
                assert event.tokens == wire["token_ids"]
                assert event.block_size == wire["block_size"] == 32
                assert event.adapter is wire["lora_name"] is None
                assert event.extra_keys == keys
                assert (event.tier, event.group, event.kind) == (Tier.GPU, 0, "full_attention")
            elif isinstance(event, Removed):
                assert wire["type"] == "BlockRemoved"
                assert event.hashes == wire["block_hashes"]
                assert (event.tier, event.group) == (Tier.GPU, 0)
            else:
                assert wire["type"] == "AllBlocksCleared"


# Dialects

H = (1 << 64) - 7
DIGEST = bytes(range(24)) + H.to_bytes(8, "big")


@pytest.mark.parametrize("given_hash", [H, H - (1 << 64), DIGEST, H.to_bytes(8, "big")])
@pytest.mark.parametrize(
    "shell",
    [
        lambda found: [1.5, found, 0],
        lambda found: [1.5, found],
        lambda found: [2, found, None, "more"],
        lambda found: {"ts": 1.5, "events": found},
        lambda found: {"more": 1, "events": found, "data_parallel_rank": 3, "ts": 2},
    ],
)
@pytest.mark.parametrize("form", [dict, as_array])
def test_all_dialects_say_the_same(
    given_hash: int | bytes, shell: Callable[[Any], Any], form: Callable[[Wire], Any]
) -> None:
    sent = [
        stored([5, given_hash], [1, 2, 3, 4]),
        stored([6], [5, 6], parent_block_hash=given_hash),
        removed(given_hash),
    ]
    batch = decode(encode(shell([form(event) for event in sent])))
    assert understood(batch) == [
        said(Stored([5, H], None, [1, 2, 3, 4], 2)),
        said(Stored([6], H, [5, 6], 2)),
        said(Removed([H])),
    ]
    assert (batch.malformed, batch.unknown) == (0, 0)


EXTRA_KEYS = st.one_of(st.text(max_size=3), st.integers(-(1 << 63), (1 << 64) - 1))
HASHES = st.integers(0, (1 << 64) - 1)
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "lora_id": st.integers(0, 9),
    "medium": st.sampled_from(["GPU", "cpu", "DISK"]),
    "lora_name": st.text(max_size=3),
    "group_idx": st.integers(0, 3),
    "kv_cache_spec_kind": st.sampled_from(["full_attention", "mamba"]),
    "extra_keys": st.lists(
        st.none() | st.lists(EXTRA_KEYS | st.tuples(EXTRA_KEYS, st.integers(0, 9)), max_size=3),
        max_size=3,
    ),
}
EVENTS = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("BlockStored"),
            "block_hashes": st.lists(HASHES, max_size=3),
            "parent_block_hash": st.none() | HASHES,
            "token_ids": st.lists(st.integers(0, (1 << 32) - 1), max_size=6),
            "block_size": st.integers(1, 1 << 16),
        },
        optional=OPTIONAL,
    ),
    st.fixed_dictionaries(
        {"type": st.just("BlockRemoved"), "block_hashes": st.lists(HASHES, max_size=3)},
        optional={key: OPTIONAL[key] for key in ("medium", "group_idx")},
    ),
    st.just({"type": "AllBlocksCleared"}),
)
WRONG = st.one_of(
    st.sampled_from(
        [
            None,
            7,
            "BlockStored",
            [],
            {},
            ["BlockStored"],
            ["BlockStored", [1], None, [1, 2]],
            ["BlockRemoved", None],
            {"type": "BlockStored", "block_hashes": [1]},
            {"type": ["BlockRemoved"], "block_hashes": [1]},
            {"type": "BlockRemoved"},
            removed(1.5),
            removed("1"),
            removed(b""),
            removed(None),
            removed(1, medium=5),
            removed(1, group_idx=-1),
            stored([1], [-1, 2]),
            stored([1], [1 << 32, 2]),
            stored([1], [b"", 2]),
            stored([1], [1, 2], block_size=0),
            stored([1], [1, 2], block_size=1 << 17),
            stored([1], [1, 2], parent_block_hash="x"),
            stored([1], [1, 2], extra_keys=[[1.5]]),
            stored([1], [1, 2], extra_keys=[["x" * 5000]]),
            stored([1], [1, 2], lora_name="x" * 5000),
        ]
    )
)
UNKNOWN = st.sampled_from([["BlockMoved", [1]], {"type": "BlockMoved", "block_hashes": "?"}])


@settings(max_examples=200, deadline=None)
@given(
    sent=st.lists(
        st.tuples(st.just("good"), EVENTS)
        | st.tuples(st.just("malformed"), WRONG)
        | st.tuples(st.just("unknown"), UNKNOWN),
        max_size=6,
    ),
    data=st.data(),
)
def test_one_bad_event_costs_only_itself(sent: list[tuple[str, Any]], data: st.DataObject) -> None:
    """And each good one is understood alike in any dialect."""
    good = [event for kind, event in sent if kind == "good"]
    plain = send(*good)
    assert (len(plain.events), plain.malformed, plain.unknown) == (len(good), 0, 0)
    form: Callable[[Wire], Any] = as_array if data.draw(st.booleans()) else dict
    digests = data.draw(st.booleans())
    wire = []
    for kind, event in sent:
        if kind == "good":
            event = dict(event, new_field={"deep": [1]}) if form is dict else dict(event)
            if digests and "block_hashes" in event:
                event["block_hashes"] = [digest(number) for number in event["block_hashes"]]
            event = form(event)
        wire.append(event)
    batch = send(*wire)
    assert understood(batch) == understood(plain)
    assert batch.malformed == sum(kind == "malformed" for kind, _ in sent)
    assert batch.unknown == sum(kind == "unknown" for kind, _ in sent)


def test_extra_keys_are_kept_by_value() -> None:
    keys: list[Any] = [["salt"], None, [["image", 5], 7], []]
    batch = send(stored([1, 2, 3, 4], [0] * 8, extra_keys=keys))
    assert isinstance(batch.events[0], Stored)
    assert batch.events[0].extra_keys == [("salt",), None, (("image", 5), 7), ()]
    keys[0] = [b"\x01\xff", [b"\x02", 5]]
    batch = send(stored([1, 2, 3, 4], [0] * 8, extra_keys=keys))
    assert isinstance(batch.events[0], Stored)
    assert batch.events[0].extra_keys == [("01ff", ("02", 5)), None, (("image", 5), 7), ()]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu_pinned", Tier.CPU),
        ("STORAGE", Tier.STORAGE),
        ("Disk", Tier.STORAGE),
        ("EXTERNAL", Tier.STORAGE),
        ("somewhere", Tier.STORAGE),
    ],
)
def test_media_have_one_name_each(medium: str | None, tier: Tier) -> None:
    assert tier_of(medium) == tier
    event = removed(1) if medium is None else removed(1, medium=medium)
    for form in (dict, as_array):
        (found,) = send(form(event)).events
        assert isinstance(found, Removed)
        assert found.tier == tier


def test_an_adapter_known_by_its_number_is_not_the_base_model() -> None:
    named, numbered, both, base = send(
        stored([1], [1, 2], lora_name="a"),
        stored([1], [1, 2], lora_id=7),
        stored([1], [1, 2], lora_id=7, lora_name="a"),
        stored([1], [1, 2], lora_id=None),
    ).events
    assert isinstance(named, Stored) and isinstance(both, Stored)
    assert isinstance(numbered, Stored) and isinstance(base, Stored)
    assert named.adapter == both.adapter == "a"
    assert numbered.adapter not in (None, "a", "7")
    assert base.adapter is None


# Hostile messages


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=200))
def test_any_bytes_are_a_batch(payload: bytes) -> None:
    batch = decode(payload)
    assert batch.malformed >= 0


@settings(max_examples=200, deadline=None)
@given(sent=st.lists(EVENTS, min_size=1, max_size=3), data=st.data())
def test_damaged_messages_are_counted_or_understood(sent: list[Wire], data: st.DataObject) -> None:
    payload = bytearray(encode([1.5, sent, 0]))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    batch = decode(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    for event in batch.events:
        if isinstance(event, Stored | Removed):
            assert all(0 <= number < 1 << 64 for number in event.hashes)
        if isinstance(event, Stored):
            assert all(0 <= token < 1 << 32 for token in event.tokens)
            assert event.block_size >= 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x93\xca\x00\x00\x00\x00\xdd\xff\xff\xff\xff",  # promises 4 billion events
        b"\x91" * 100_000,
        b"\x93\x00" + b"\x91" * 100_000,
        b"\x82\xa6events" + b"\x91" * 100_000,
        encode([1.5, "events"]),
        encode({"ts": 1}),
    ],
)
def test_what_is_no_batch_is_one_malformed(payload: bytes) -> None:
    assert decode(payload) == Batch([], 1, 0)


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = encode([1.5, [["AllBlocksCleared"]] * (events.MAX_EVENTS + 1)])
    assert decode(many) == Batch([], 1, 0)
    monkeypatch.setattr(events, "MAX_PAYLOAD", 20)
    assert send(removed(*range(30))) == Batch([], 1, 0)


@pytest.mark.parametrize("form", [dict, as_array])
@pytest.mark.parametrize(
    "event",
    [
        removed(*range(events.MAX_BLOCKS + 1)),
        stored([1], [1] * (events.MAX_TOKENS + 1)),
        stored([1], [1, 2], extra_keys=[None] * (events.MAX_BLOCKS + 1)),
        stored([1], [1, 2], extra_keys=[["x"] * 17]),
        stored([b"1"], [1, 2], extra_keys=[[[b"x"] * 4096] * 16] * 16),
    ],
)
def test_events_are_bounded(form: Callable[[Wire], Any], event: Wire) -> None:
    batch = send(form(event), form(removed(1)))
    assert understood(batch) == [said(Removed([1]))]
    assert batch.malformed == 1
