"""KV events as engines send them: what entered a pod's prefix cache, and what left it.

The wire form is vLLM's (`distributed/kv_events.py`), in all its dialects. A batch is a msgpack
array [seconds, events, rank], or a map of these. An event is a map with its name under "type" (vLLM
since 0.24, SGLang), or an array that begins with its name (before). Hashes are unsigned, signed, or
the digest itself, of which the last 8 bytes count.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

# Bounds of one message. A whole prompt of a million tokens takes about 6 MB.
MAX_PAYLOAD = 16 << 20  # bytes
MAX_EVENTS = 1 << 18
MAX_BLOCKS = 1 << 17  # of one event
MAX_TOKENS = 1 << 21  # of one event
MAX_TEXT = 4096  # characters of a name or a salt
MAX_FIELDS = 64  # of one event
MAX_LOOSE = 1 << 20  # bytes of extra keys that take the slow way
MASK = (1 << 64) - 1

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Token = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Hash = Annotated[int, Meta(ge=0)]  # msgpack's integers have 64 bits at most
Extra = Text | int
# What besides its tokens went into one block's hash: salts, names, media hashes, or pairs of such a
# hash and its offset. Tuples, so that they can be keys of a dict. Bytes are here in hexadecimal.
ExtraKeys = Annotated[tuple[Extra | tuple[Extra, ...], ...], Meta(max_length=16)]


class Tier(IntEnum):
    """Where a pod holds a block, fastest first."""

    GPU = 0
    CPU = 1
    STORAGE = 2


_TIERS = {
    "GPU": Tier.GPU,
    None: Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "STORAGE": Tier.STORAGE,
    "DISK": Tier.STORAGE,
    "EXTERNAL": Tier.STORAGE,
}


def tier_of(medium: str | None) -> Tier:
    """The tier of a medium's name. One that is not known is taken to be slow."""
    tier = _TIERS.get(medium)
    if tier is None:
        assert medium is not None
        tier = _TIERS.get(medium.upper(), Tier.STORAGE)
    return tier


class Stored(
    msgspec.Struct,
    tag_field="type",
    tag="BlockStored",
    gc=False,
    rename={
        "hashes": "block_hashes",
        "parent": "parent_block_hash",
        "tokens": "token_ids",
        "group": "group_idx",
        "kind": "kv_cache_spec_kind",
    },
):
    """Consecutive full blocks entered the cache. Fields are in the order of the array form.

    Hashes are the engine's, of 64 bits, unsigned. `tokens` covers all blocks, block_size each; it
    may be empty, where the engine only says that blocks known by their hash are somewhere else too.
    Lengths are not compared here.
    """

    hashes: Annotated[list[Hash], Meta(max_length=MAX_BLOCKS)]
    parent: Hash | None  # the block before the first; None at the start of a prompt
    tokens: Annotated[list[Token], Meta(max_length=MAX_TOKENS)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    lora_id: int | None = None  # of this engine alone
    medium: Text | None = None
    lora_name: Text | None = None
    # Of each block; None where no block has any.
    extra_keys: Annotated[list[ExtraKeys | None], Meta(max_length=MAX_BLOCKS)] | None = None
    group: Hash = 0
    kind: Text | None = None  # of attention; None: full

    @property
    def tier(self) -> Tier:
        return tier_of(self.medium)

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter's name; known by its number alone, it gets one that nobody asks for."""
        if self.lora_name is None and self.lora_id is not None:
            return f"\0{self.lora_id}"
        return self.lora_name


class Removed(
    msgspec.Struct,
    tag_field="type",
    tag="BlockRemoved",
    gc=False,
    rename={"hashes": "block_hashes", "group": "group_idx"},
):
    """Blocks left the cache."""

    hashes: Annotated[list[Hash], Meta(max_length=MAX_BLOCKS)]
    medium: Text | None = None
    group: Hash = 0

    @property
    def tier(self) -> Tier:
        return tier_of(self.medium)


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The cache holds nothing any more."""


Event = Stored | Removed | Cleared


def num_blocks(event: Event) -> int:
    """Blocks that an event names."""
    return 0 if isinstance(event, Cleared) else len(event.hashes)


class Batch(NamedTuple):
    """What one message says, in order."""

    events: list[Event]
    malformed: int  # events left out because they cannot be understood; 1 for a whole payload
    unknown: int  # events of types that we do not know


class _StoredArray(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Maps(msgspec.Struct, array_like=True, gc=False):
    """A batch as vLLM and SGLang send it now."""

    ts: float
    events: Annotated[list[Stored | Removed | Cleared], Meta(max_length=MAX_EVENTS)]


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    """A batch as vLLM sent it before 0.24."""

    ts: float
    events: Annotated[
        list[_StoredArray | _RemovedArray | _ClearedArray], Meta(max_length=MAX_EVENTS)
    ]


_decode_maps = msgspec.msgpack.Decoder(_Maps).decode
_decode_arrays = msgspec.msgpack.Decoder(_Arrays).decode
_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode(payload: bytes) -> Batch:
    """The events of one message, in order. Raises nothing: what is wrong is counted, left out."""
    if len(payload) > MAX_PAYLOAD:
        return Batch([], 1, 0)
    try:
        return Batch(_decode_maps(payload).events, 0, 0)
    except _REFUSALS:
        pass
    try:
        return Batch(list(_decode_arrays(payload).events), 0, 0)
    except _REFUSALS:
        return _decode_each(payload)


def _decode_each(payload: bytes) -> Batch:
    """As `decode`, event by event: for what engines send seldom, or should not."""
    try:
        batch = _decode_shell(payload)
        raws = _decode_raws(batch["events"] if isinstance(batch, dict) else batch[1])
    except (*_REFUSALS, LookupError):
        return Batch([], 1, 0)
    events: list[Event] = []
    malformed = unknown = 0
    for raw in raws:
        try:
            event = _decode_event(raw)
        except (*_REFUSALS, LookupError):
            malformed += 1
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return Batch(events, malformed, unknown)


def _decode_event(raw: Raw) -> Event | None:
    """One event in any dialect, None if its name is not known. Raises _REFUSALS, LookupError."""
    shell = _decode_shell(raw)
    name = _decode_text(shell["type"] if isinstance(shell, dict) else shell[0])
    if name not in _FIELDS:
        return None
    kind, fields = _FIELDS[name]
    if isinstance(shell, list):
        names = (field.name for field in fields)
        shell = dict(zip(names, shell[1:], strict=False))
    values = {}
    for field in fields:
        value = shell.get(field.name)
        if value is None:
            if field.required:
                raise LookupError(field.name)
        elif field.required or bytes(value) != _NULL:  # where null is no value, it is the default
            values[field.attribute] = field.decode(value)
    return kind(**values)


class _Field(NamedTuple):
    """A field of an event, as it is read one by one."""

    name: str
    attribute: str
    required: bool
    decode: Callable[[Raw], Any]


def _fields_of(kind: type[Event]) -> tuple[type[Event], list[_Field]]:
    return kind, [
        _Field(
            field.encode_name,
            field.name,
            field.required,
            _OWN_READERS.get(field.encode_name) or msgspec.msgpack.Decoder(field.type).decode,
        )
        for field in msgspec.structs.fields(kind)
    ]


def _unsigned(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & MASK


def _hashes(raw: Raw) -> list[int]:
    return [_unsigned(value) for value in _decode_hashes(raw)]


def _parent(raw: Raw) -> int | None:
    value = _decode_parent(raw)
    return None if value is None else _unsigned(value)


def _extra_keys(raw: Raw) -> Any:
    """Extra keys with bytes among them, which are no text to msgspec."""
    if len(bytes(raw)) > MAX_LOOSE:
        raise msgspec.ValidationError("too many extra keys")
    loose = [keys if keys is None else _hexed(keys) for keys in _decode_loose_extra_keys(raw)]
    return msgspec.convert(loose, _FIELD_TYPES["extra_keys"])


def _hexed(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_hexed(each) for each in value] if isinstance(value, list) else value


_AnyHash = int | Annotated[bytes, Meta(min_length=1, max_length=MAX_TEXT)]
_NULL = b"\xc0"
_decode_shell = msgspec.msgpack.Decoder(
    Annotated[dict[str, Raw], Meta(max_length=MAX_FIELDS)]
    | Annotated[list[Raw], Meta(min_length=1, max_length=MAX_FIELDS)]
).decode
_decode_raws = msgspec.msgpack.Decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]).decode
_decode_text = msgspec.msgpack.Decoder(Text).decode
_decode_hashes = msgspec.msgpack.Decoder(
    Annotated[list[_AnyHash], Meta(max_length=MAX_BLOCKS)]
).decode
_decode_loose_extra_keys = msgspec.msgpack.Decoder(list[list[Any] | None]).decode
_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(Stored)}
_decode_parent = msgspec.msgpack.Decoder(_AnyHash | None).decode
_OWN_READERS = {"block_hashes": _hashes, "parent_block_hash": _parent, "extra_keys": _extra_keys}
_FIELDS = {
    "BlockStored": _fields_of(Stored),
    "BlockRemoved": _fields_of(Removed),
    "AllBlocksCleared": _fields_of(Cleared),
}
