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
    media       < hexadecimal digest of the part, again and again >, which begins no JSON value
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
MAX_TOKEN_IDS = 2_000_000  # they take 50 ns each
MAX_TEXTS = 1 << 18

Raw = msgspec.Raw
Flat = tuple[bytes, int | None]  # a prompt, and its tokens where they were counted

_TEXT = b"\x02"
_IDS = b"\xff\xff\xff\xff"
_MEDIA = frozenset(
    b'"%s"' % kind
    for kind in (
        *(b"image", b"image_url", b"input_image", b"image_pil", b"image_embeds"),
        *(b"audio", b"audio_url", b"input_audio", b"audio_embeds"),
        *(b"video", b"video_url", b"input_video", b"file", b"input_file", b"document"),
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
        Refusal: 400, more texts or token ids than are read here.
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
            _bound(value.count(b'"') // 2, MAX_TEXTS, name, "texts")
            return b"".join([_text(bytes(text)) for text in _VALUES.decode(value)]), None
        else:
            _bound(value.count(b",") + value.count(b"["), MAX_TOKEN_IDS, name, "token ids")
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


def message(role: str, content: Raw | None) -> bytes:
    """A message whose content came in a field of its own; empty without one."""
    shown = b"" if content is None else _content(bytes(content))
    return b'{"role":"%s","content":%s}\n' % (role.encode(), shown) if shown else b""


def messages(raw: Raw | None, name: str) -> bytes:
    """A conversation: a list of messages, or of the Responses API's items.

    Raises:
        Refusal: 400, it is no list of objects.
    """
    if raw is None:
        return b""
    try:
        conversation = _OBJECTS.decode(raw)
    except msgspec.ValidationError:
        if bytes(raw) == b"null":
            return b""
        raise wrong(name, "a list of objects") from None
    pieces: list[bytes | Raw] = []
    for fields in conversation:
        role = fields.get("role")
        if len(fields) == 2 and role is not None and "content" in fields:  # as most are
            content = bytes(fields["content"])
            if content[0] == _STRING:
                pieces += (b'{"role":', role, b',"content":', content, b"}\n")
                continue
        pieces.append(_message(fields))
    return b"".join(pieces)


def _message(fields: dict[str, Raw]) -> bytes:
    """A repeated name counts once, its last value: that is how engines' decoders read it too."""
    role = fields.get("role")
    content = fields.get("content")
    pieces = []
    if role is not None:
        pieces.append(b'"role":%b' % role)
    if content is not None and (shown := _content(bytes(content))):
        pieces.append(b'"content":%b' % shown)
    if others := _others(fields):
        pieces.append(others)
    return b"{%b}\n" % b",".join(pieces)


def _others(fields: dict[str, Raw]) -> bytes:
    """Fields by name, but for those that say nothing."""
    shown = []
    for name in sorted(fields.keys() - _NOT_OTHERS):
        value = _shown(bytes(fields[name]))
        if value and not (name == "type" and value == b'"message"'):  # as it is without a type
            shown.append(b"%b:%b" % (_ENCODE(name), value))
    return b",".join(shown)


def _content(value: bytes) -> bytes:
    """What a message holds: a string, parts, or nothing."""
    if value[0] == _STRING:
        return value
    if value[0] == _LIST:
        try:
            parts = _OBJECTS.decode(value)
        except msgspec.ValidationError:
            return _shown(value)
        return b"[%s]" % b",".join(map(_part, parts))
    return _shown(value)


def _part(fields: dict[str, Raw]) -> bytes:
    """One part. A tool's result is a part that holds parts of its own."""
    if len(fields) == 2 and "text" in fields and bytes(fields.get("type", b"")) == b'"text"':
        return b'{"text":%b,"type":"text"}' % fields["text"]  # as _leaf does, faster
    content = fields.get("content")
    if content is None:
        return _leaf(fields)
    value = bytes(content)
    try:
        parts = _OBJECTS.decode(value)
    except msgspec.ValidationError:
        shown = _shown(value)
    else:
        shown = b"[%s]" % b",".join(map(_leaf, parts))
    return b'{"content":%s,%s}' % (shown or b"null", _others(fields))


def _leaf(fields: dict[str, Raw]) -> bytes:
    """A part that holds no others, or whose others are not looked at."""
    if bytes(fields.get("type", b"")) in _MEDIA and not _is_text(fields):
        digest = xxhash.xxh3_128_hexdigest(_others(fields)).encode()
        return b"<%s>" % (digest * (MEDIA_TOKENS * BYTES_PER_TOKEN // len(digest)))
    content = fields.get("content")
    shown = b"" if content is None else _shown(bytes(content))
    return b'{"content":%s,%s}' % (shown, _others(fields)) if shown else b"{%s}" % _others(fields)


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
