"""What the model will see of a request, as bytes whose beginnings can be compared.

Two requests get the same bytes when they hold the same content, whatever the spaces between JSON
tokens and the order of fields. The order is the one in which models see it: tools, instructions,
messages; so one more message only appends. Strings stay as they were escaped: to unescape them
would cost more than all else here, and a client escapes in the same way each time.

No two prompts share bytes by accident of where one piece ends:

    text        02 and the JSON string without its quotes, in which 02 cannot be
    token ids   ff ff ff ff, then each in 4 bytes, little endian; ids are below 2^31
    fields      "name":value and a newline, both JSON
    messages    {"role":..,"content":..,others by name} and a newline, JSON but for media
    media       03, which is nowhere in JSON, and a hexadecimal digest of the part, again and again
"""

from __future__ import annotations

import re
import sys
from array import array
from typing import Annotated

import msgspec
import xxhash

from picker.json_body import Fields, wrong
from picker.refusal import Refusal

BYTES_PER_TOKEN = 4
# Tokens that an image, a recording, a video or a file is taken for. Models make 256 (Gemma 3), 576
# (LLaVA 1.5) or 1,300 (Qwen2-VL) of an image of a megapixel, and 750 of half a minute of sound; its
# length in base64 says little. It takes their place in the prompt too, so that its blocks match.
MEDIA_TOKENS = 768
MAX_TOKEN_IDS = 2_000_000  # these bound the time that one request takes: ids take 0.1 µs each,
MAX_LISTS = 1 << 16  # and all else a microsecond: texts, or lists of token ids
MAX_MESSAGES = 1 << 14
MAX_PARTS = 1 << 15
MAX_MEDIA = 1 << 10

Raw = msgspec.Raw
Flat = tuple[bytes, int | None]  # a prompt, and its tokens where they were counted

_TEXT = b"\x02"
_MEDIUM = b"\x03"
_IDS = b"\xff\xff\xff\xff"
_MEDIA = frozenset(  # a part's type, or the field that stands in for one
    (
        *("image", "image_url", "input_image", "image_pil", "image_embeds"),
        *("audio", "audio_url", "input_audio", "audio_embeds"),
        *("video", "video_url", "input_video", "file", "input_file", "document"),
    )
)
_STRING, _LIST, _OBJECT = b'"[{'  # what a value of that kind begins with
_SAYS_NOTHING = frozenset((b"null", b"[]", b"{}"))
_NOT_OTHERS = frozenset(("role", "content", "cache_control"))  # the last only marks what to cache

_ENCODE = msgspec.json.Encoder().encode
_OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
_VALUES = msgspec.json.Decoder(list[Raw])
_ID = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_ID_LIST = msgspec.json.Decoder(list[_ID])
_ID_LISTS = msgspec.json.Decoder(list[list[_ID]])
_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)
_INT32 = "i" if array("i").itemsize == 4 else "l"


class _Source(msgspec.Struct):
    type: str = ""


_SOURCE = msgspec.json.Decoder(_Source)


def flat(raw: Raw | None, name: str) -> Flat:
    """A prompt given as text, texts, token ids, or lists of token ids.

    Anything else is the engine's to refuse, and stands for itself.

    Raises:
        Refusal: 400, more of them than are read here.
    """
    if raw is None:
        return b"", None
    value = bytes(raw)
    if value.startswith(b'"'):
        return _text(value) if len(value) > 2 else b"", None
    first = _FIRST_ITEM.match(value)
    try:
        if first is None or first[1] == b"{":
            pass
        elif first[1] == b'"':
            quotes = value.count(b'"') - value.count(b'\\"')
            _bound(quotes // 2, MAX_LISTS, name, "texts")
            return b"".join([_text(bytes(text)) for text in _VALUES.decode(value)]), None
        else:
            _bound(value.count(b","), MAX_TOKEN_IDS, name, "token ids")
            _bound(value.count(b"["), MAX_LISTS, name, "lists")
            nested = first[1] == b"["
            return _token_ids(_ID_LISTS.decode(value) if nested else [_ID_LIST.decode(value)])
    except (msgspec.ValidationError, _OtherFormError):
        pass
    return _shown(value), None


def fields(found: Fields, names: tuple[str, ...]) -> bytes:
    """Fields of a request that enter its prompt, but for those that say nothing."""
    pieces = []
    for name in names:
        raw = found.get(name)
        if raw is not None and (shown := _shown(bytes(raw))):
            pieces.append(b'"%b":%b\n' % (name.encode(), shown))
    return b"".join(pieces)


def message(role: str, content: Raw | None, name: str) -> bytes:
    """A message whose content came in a field of its own; empty without one.

    Raises:
        Refusal: 400, it holds more than is read here.
    """
    shown = b"" if content is None else _Conversation(name).content(bytes(content))
    return b'{"role":"%b","content":%b}\n' % (role.encode(), shown) if shown else b""


def messages(raw: Raw | None, name: str) -> bytes:
    """A conversation: a list of messages, or of the Responses API's items.

    Raises:
        Refusal: 400, it is no list of objects, or holds more than is read here.
    """
    if raw is None:
        return b""
    try:
        conversation = _OBJECTS.decode(raw)
    except msgspec.ValidationError:
        if bytes(raw) == b"null":
            return b""
        raise wrong(name, "a list of objects") from None
    return _Conversation(name).messages(conversation)


class _Conversation:
    """Shows messages, and counts what takes time or room. Its field's name is for refusals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts = 0
        self._media = 0

    def messages(self, conversation: list[dict[str, Raw]]) -> bytes:
        _bound(len(conversation), MAX_MESSAGES, self._name, "messages")
        pieces: list[bytes | Raw] = []
        for fields in conversation:
            role = fields.get("role")
            if len(fields) == 2 and role is not None and "content" in fields:  # as most are
                content = bytes(fields["content"])
                if content[0] == _STRING:
                    pieces += (b'{"role":', role, b',"content":', content, b"}\n")
                    continue
            pieces.append(self._message(fields))
        return b"".join(pieces)

    def _message(self, fields: dict[str, Raw]) -> bytes:
        """A repeated name counts once, its last value: engines' decoders read it so too."""
        pieces = []
        role = fields.get("role")
        if role is not None:
            pieces.append(b'"role":%b' % role)
        content = fields.get("content")
        if content is not None and (shown := self.content(bytes(content))):
            pieces.append(b'"content":%b' % shown)
        if others := _others(fields):
            pieces.append(others)
        return b"{%b}\n" % b",".join(pieces)

    def content(self, value: bytes, *, nested: bool = False) -> bytes:
        """What a message, or a tool's result in it, holds: a string, parts, or nothing."""
        if value[0] == _STRING:
            return value
        if value[0] != _LIST:
            return _shown(value)
        try:
            parts = _OBJECTS.decode(value)
        except msgspec.ValidationError:
            return _shown(value)
        self._parts += len(parts)
        _bound(self._parts, MAX_PARTS, self._name, "parts")
        return b"[%b]" % b",".join([self._part(fields, nested) for fields in parts])

    def _part(self, fields: dict[str, Raw], nested: bool) -> bytes:
        """A tool's result is a part with parts of its own; what those hold is not looked at."""
        if len(fields) == 2 and "text" in fields and bytes(fields.get("type", b"")) == b'"text"':
            return b'{"text":%b,"type":"text"}' % fields["text"]  # as below, but faster
        pieces = []
        content = fields.get("content")
        if content is not None:
            value = bytes(content)
            shown = _shown(value) if nested else self.content(value, nested=True)
            if shown:
                pieces.append(b'"content":%b' % shown)
        if others := _others(fields):
            pieces.append(others)
        part = b"{%b}" % b",".join(pieces)
        if not _is_media(fields):
            return part
        self._media += 1
        _bound(self._media, MAX_MEDIA, self._name, "images and other media")
        digest = xxhash.xxh3_128_hexdigest(part).encode()
        return _MEDIUM + digest * (MEDIA_TOKENS * BYTES_PER_TOKEN // len(digest))


def _others(fields: dict[str, Raw]) -> bytes:
    """Fields by name, but for those that say nothing."""
    shown = []
    for name in sorted(fields.keys() - _NOT_OTHERS):
        value = _shown(bytes(fields[name]))
        if value and not (name == "type" and value == b'"message"'):  # as it is without a type
            shown.append(b"%b:%b" % (_ENCODE(name), value))
    return b",".join(shown)


def _is_media(fields: dict[str, Raw]) -> bool:
    kind = fields.get("type")
    if kind is None:
        return not _MEDIA.isdisjoint(fields)
    return bytes(kind)[1:-1].decode() in _MEDIA and not _is_text(fields)


def _is_text(fields: dict[str, Raw]) -> bool:
    """Whether it is one of Anthropic's documents that hold their text as it is."""
    source = fields.get("source")
    try:
        return source is not None and _SOURCE.decode(source).type in ("text", "content")
    except msgspec.ValidationError:
        return False


def _shown(value: bytes) -> bytes:
    """JSON without spaces between its tokens; empty where it says nothing."""
    if value[0] in (_LIST, _OBJECT):
        value = msgspec.json.format(value, indent=-1)
    return b"" if value in _SAYS_NOTHING else value


class _OtherFormError(ValueError):
    """A list that begins with a text and holds something else too."""


def _text(value: bytes) -> bytes:
    if not value.startswith(b'"'):
        raise _OtherFormError
    return _TEXT + value[1:-1]


def _token_ids(lists: list[list[int]]) -> Flat:
    count = sum(map(len, lists))
    if not count:
        return b"", 0
    pieces: list[bytes] = []
    for ids in lists:
        packed = array(_INT32, ids)
        if sys.byteorder == "big":
            packed.byteswap()
        pieces += (_IDS, packed.tobytes())
    return b"".join(pieces), count


def _bound(count: int, limit: int, name: str, what: str) -> None:
    if count > limit:
        raise Refusal(400, "invalid_field", f"`{name}` holds more than {limit} {what}")
