"""What the model will see of a request, as bytes whose beginnings can be compared.

Two requests get the same bytes when they hold the same content, whatever the spaces between JSON
tokens and the order of fields. The order is the one in which models see it: tools, instructions,
messages; so one more message only appends. Strings stay as they were escaped: to unescape them
would cost more than all else here, and a client escapes in the same way each time.

How much of a request is looked at is bounded, since a small body may hold very many small things.
What comes after that is not shown but counted by its bytes, and what holds more than any prompt
has (`MAX_VALUES`, `MAX_ITEMS`) stand as they are, spaces and all.

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
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from picker.json_body import LARGE, SMALL, Fields, is_stuffed, wrong

BYTES_PER_TOKEN = 4
# Tokens that an image, a recording, a video or a file is taken for. Models make 256 (Gemma 3), 576
# (LLaVA 1.5) or 1,300 (Qwen2-VL) of an image of a megapixel, and 750 of half a minute of sound; its
# length in base64 says little. It takes their place in the prompt too, so that its blocks match.
MEDIA_TOKENS = 768

# What is looked at of one request. By default the index reads 256 KiB of a prompt: these are as
# many token ids, or 1,000 messages that hold more than a text.
MAX_IDS = 1 << 16
MAX_TEXTS = 1 << 12  # or lists of token ids
MAX_FIELDS = 1 << 12  # of messages and parts that hold more than a text; each takes a microsecond
MAX_NAMES = 1 << 13  # of one list's objects
MAX_ITEMS = 1 << 16  # of one list
MAX_VALUES = 1 << 15  # that are written without spaces
MAX_AS_IT_IS = 1 << 20  # bytes of a value

Raw = msgspec.Raw


class Flat(NamedTuple):
    """A prompt."""

    shown: bytes
    unread: int = 0  # bytes that come after those
    tokens: int | None = None  # of it all, where they were counted
    prompts: int = 1  # that it is; at most, where it is none that we know


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


class _Plain(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message as most are: with these two fields, and no other."""

    role: Raw
    content: Raw


_PLAIN_MESSAGES = msgspec.json.Decoder(list[_Plain])
_ONE_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
_VALUES = msgspec.json.Decoder(list[Raw])
_ID = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_ID_LIST = msgspec.json.Decoder(list[_ID])
_ID_LISTS = msgspec.json.Decoder(list[list[_ID]])
_ID_BYTES = 16  # more than an id takes, with its comma and some spaces
_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)
_INT32 = "i" if array("i").itemsize == 4 else "l"


_NONE = Raw()


class _Source(msgspec.Struct):
    type: str = ""


_SOURCE = msgspec.json.Decoder(_Source)


class _OtherFormError(ValueError):
    """A list that holds other things too, or too much to be taken apart."""


def flat(raw: Raw | None, names: int) -> Flat:
    """A prompt given as text, texts, token ids, or lists of token ids.

    Anything else is the engine's to refuse, and stands for itself.
    """
    if raw is None:
        return Flat(b"")
    value = bytes(raw)
    if value[0] == _STRING:
        return Flat(_text(value)) if len(value) > 2 else Flat(b"")
    first = None if value[1:2] in b" \t\r\n" and is_stuffed(value) else _FIRST_ITEM.match(value)
    try:
        if first is None or first[1] == b"{":
            pass
        elif first[1] == b'"':
            return _texts(value)
        else:
            return _token_ids(value, nested=first[1] == b"[")
    except (msgspec.DecodeError, _OtherFormError):
        pass
    other = Conversation(names)
    most = value.count(b",") + 1 if first is not None else 1
    return Flat(other.shown(value), other.unread, prompts=most)


def _texts(value: bytes) -> Flat:
    if value.count(b",") > MAX_ITEMS:
        raise _OtherFormError
    texts = _VALUES.decode(value)
    unread = sum(map(len, texts[MAX_TEXTS:]))
    shown = b"".join([_text(bytes(text)) for text in texts[:MAX_TEXTS]])
    return Flat(shown, unread, prompts=len(texts))


def _text(value: bytes) -> bytes:
    if not value.startswith(b'"'):
        raise _OtherFormError
    return _TEXT + value[1:-1]


def _token_ids(value: bytes, *, nested: bool) -> Flat:
    """Decodes the first `MAX_IDS`; each one more has a comma before it."""
    unread = max(0, value.count(b",") + 1 - MAX_IDS)
    prompts = value.count(b"[") - 1 if nested else 1
    if prompts >= MAX_TEXTS:
        raise _OtherFormError
    if unread:
        ids = value[: MAX_IDS * _ID_BYTES].split(b",", MAX_IDS)
        unread += MAX_IDS - (len(ids) - 1)
        del ids[-1]
        between_lists = nested and ids[-1].rstrip().endswith(b"]")
        value = b",".join(ids) + (b"]]" if nested and not between_lists else b"]")
    flattened: list[int] = []
    if nested:
        for part in _ID_LISTS.decode(value):
            flattened.append(-1)  # as _IDS
            flattened += part
        markers = flattened.count(-1)
    else:
        flattened, markers = _ID_LIST.decode(value), 1
    packed = array(_INT32, flattened)
    count = len(packed) - (markers if nested else 0)
    if not count:
        return Flat(b"", 0, 0)
    if sys.byteorder == "big":
        packed.byteswap()
    shown = packed.tobytes() if nested else _IDS + packed.tobytes()
    return Flat(shown, BYTES_PER_TOKEN * unread, count + unread, prompts)


def has_media(shown: bytes) -> bool:
    """Whether a prompt is not all text."""
    return _MEDIUM in shown


def is_one(shown: bytes) -> bool:
    """Whether it is a single prompt: not several texts, or lists of token ids."""
    return not (shown.startswith(_TEXT) and _TEXT in shown[1:]) and _ends_of_first(shown) is None


def first_ids(shown: bytes) -> NDArray[np.uint32] | None:
    """The token ids of a prompt made of them, or of the first of several; None: it is a text."""
    if not shown.startswith(_IDS):
        return None
    ids = np.frombuffer(shown, "<u4", offset=len(_IDS))
    return ids[: _ends_of_first(shown)].astype(np.uint32, copy=False)


def _ends_of_first(shown: bytes) -> int | None:
    """How many token ids come before those of a second prompt; None: there is none."""
    if not shown.startswith(_IDS):
        return None
    marks = np.flatnonzero(np.frombuffer(shown, "<u4", offset=len(_IDS)) == 0xFFFFFFFF)
    return int(marks[0]) if len(marks) else None


class Conversation:
    """Shows the parts of one conversation, in the order of its calls; keeps count of what it takes.

    Once that is too much it shows nothing more, and adds up the bytes in `unread`.
    """

    __slots__ = ("_fields", "_plain", "_values", "unread")

    def __init__(self, names: int) -> None:
        """`names`: those of the whole body, as `json_body.num_names` tells them."""
        self.unread = 0
        self._plain = names <= MAX_NAMES
        self._fields = MAX_FIELDS
        self._values = MAX_VALUES

    def fields(self, found: Fields, names: Sequence[str]) -> bytes:
        """Fields of a request that enter its prompt, but for those that say nothing."""
        pieces = []
        for name in names:
            raw = found.get(name)
            if raw is not None and (shown := self.shown(bytes(raw))):
                pieces.append(b'"%b":%b\n' % (name.encode(), shown))
        return b"".join(pieces)

    def message(self, role: str, content: Raw | None) -> bytes:
        """A message whose content came in a field of its own; empty without one."""
        shown = b"" if content is None else self._content(bytes(content))
        return b'{"role":"%b","content":%b}\n' % (role.encode(), shown) if shown else b""

    def messages(self, raw: Raw | None, name: str) -> bytes:
        """A list of messages, or of the Responses API's items; `name` is its field's.

        Raises:
            Refusal: 400, it is no list of objects.
        """
        if raw is None:
            return b""
        if self._fields < 0:
            self.unread += len(raw)
            return b""
        if (shown := _plain_texts(raw)) is not None:
            return shown
        try:
            conversation = self._objects(raw)
        except msgspec.ValidationError:
            if bytes(raw) == b"null":
                return b""
            raise wrong(name, "a list of objects") from None
        except _OtherFormError:
            return self._as_it_is(bytes(raw))
        pieces: list[bytes | Raw] = []
        for position, fields in enumerate(conversation):
            role = fields.get("role")
            if len(fields) == 2 and role is not None and "content" in fields:  # as most are
                content = bytes(fields["content"])
                if content[0] == _STRING:
                    pieces += (b'{"role":', role, b',"content":', content, b"}\n")
                    continue
            if self._takes(fields):
                pieces.append(self._message(fields))
            if self._fields < 0:
                self._leave(conversation[position + 1 :])
                break
        return b"".join(pieces)

    def shown(self, value: bytes) -> bytes:
        """JSON without spaces between its tokens; empty where it says nothing."""
        if value[0] in (_LIST, _OBJECT):
            if is_stuffed(value):
                return self._as_it_is(value)
            self._values -= value.count(b",") + 1
            if self._values < 0:
                return self._as_it_is(value)
            value = msgspec.json.format(value, indent=-1)
        return b"" if value in _SAYS_NOTHING else value

    def _as_it_is(self, value: bytes) -> bytes:
        self.unread += max(0, len(value) - MAX_AS_IT_IS)
        return value[:MAX_AS_IT_IS]

    def _takes(self, fields: dict[str, Raw]) -> bool:
        """Count the fields of an object; whether it is still to be shown."""
        self._fields -= len(fields) + 1
        if self._fields < 0:
            self._leave([fields])
            return False
        return True

    def _leave(self, objects: Sequence[dict[str, Raw]]) -> None:
        self.unread += sum(len(raw) for fields in objects for raw in fields.values())

    def _objects(self, value: bytes | Raw) -> list[dict[str, Raw]]:
        """The objects of a list, as far as they can be taken apart.

        Raises:
            ValidationError: something else is in it.
            _OtherFormError: there is too much in it even to tell where each object ends.
        """
        if len(value) <= (LARGE if self._plain else SMALL):
            return _OBJECTS.decode(value)
        value = bytes(value)
        if is_stuffed(value):
            raise _OtherFormError
        if self._plain or value.count(b":") + value.count(b"{") <= MAX_NAMES:
            return _OBJECTS.decode(value)
        if value.count(b",") > MAX_ITEMS:
            raise _OtherFormError
        names = MAX_NAMES
        objects = []
        items = _VALUES.decode(value)
        for position, item in enumerate(items):
            content = bytes(item)
            names -= _num_names(content)
            if names < 0:
                self.unread += sum(map(len, items[position:]))
                break
            objects.append(_ONE_OBJECT.decode(content))
        return objects

    def _message(self, fields: dict[str, Raw]) -> bytes:
        """A repeated name counts once, its last value: engines' decoders read it so too."""
        pieces = []
        role = fields.get("role")
        if role is not None:
            pieces.append(b'"role":%b' % role)
        content = fields.get("content")
        if content is not None and (shown := self._content(bytes(content))):
            pieces.append(b'"content":%b' % shown)
        self._add_others(pieces, fields)
        return b"{%b}\n" % b",".join(pieces)

    def _content(self, value: bytes, *, nested: bool = False) -> bytes:
        """What a message, or a tool's result in it, holds: a string, parts, or nothing."""
        if value[0] == _STRING:
            return value
        if value[0] != _LIST:
            return self.shown(value)
        try:
            parts = self._objects(value)
        except (msgspec.ValidationError, _OtherFormError):
            return self.shown(value)
        shown = []
        for position, fields in enumerate(parts):
            if self._fields > 0 and _is_plain_text(fields):  # as below, but faster
                self._fields -= 1
                shown.append(b'{"text":%b,"type":"text"}' % fields["text"])
            elif self._takes(fields):
                shown.append(self._part(fields, nested))
            else:
                self._leave(parts[position + 1 :])
                break
        return b"[%b]" % b",".join(shown)

    def _part(self, fields: dict[str, Raw], nested: bool) -> bytes:
        """A tool's result is a part with parts of its own; what those hold is not looked at."""
        pieces: list[bytes] = []
        content = fields.get("content")
        if content is not None:
            value = bytes(content)
            shown = self.shown(value) if nested else self._content(value, nested=True)
            if shown:
                pieces.append(b'"content":%b' % shown)
        self._add_others(pieces, fields)
        part = b"{%b}" % b",".join(pieces)
        if not _is_media(fields):
            return part
        digest = xxhash.xxh3_128_hexdigest(part).encode()
        return _MEDIUM + digest * (MEDIA_TOKENS * BYTES_PER_TOKEN // len(digest))

    def _add_others(self, pieces: list[bytes], fields: dict[str, Raw]) -> None:
        """Fields by name, but for those that say nothing."""
        for name in sorted(fields.keys() - _NOT_OTHERS):
            value = self.shown(bytes(fields[name]))
            if value and not (name == "type" and value == b'"message"'):  # as it is without a type
                pieces.append(_label(name) + value)


def _plain_texts(raw: Raw) -> bytes | None:
    """Messages as `Conversation.messages` shows them, in two thirds of its time, where each has a
    text and no more than that; None where any has not, and for a long list."""
    if len(raw) > SMALL:
        return None
    try:
        messages = _PLAIN_MESSAGES.decode(raw)
    except msgspec.ValidationError:
        return None
    pieces: list[bytes | Raw] = []
    for message in messages:
        content = bytes(message.content)
        if content[0] != _STRING:
            return None
        pieces += (b'{"role":', message.role, b',"content":', content, b"}\n")
    return b"".join(pieces)


@lru_cache(maxsize=1024)
def _label(name: str) -> bytes:
    return msgspec.json.encode(name) + b":"


def _is_plain_text(fields: dict[str, Raw]) -> bool:
    return len(fields) == 2 and "text" in fields and bytes(fields.get("type", b"")) == b'"text"'


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


class _Bulky(msgspec.Struct):
    """What the large fields of messages and parts are called; they are not kept by name."""

    content: Raw = _NONE
    text: Raw = _NONE
    arguments: Raw = _NONE
    input: Raw = _NONE
    output: Raw = _NONE
    reasoning_content: Raw = _NONE
    tool_calls: Raw = _NONE


_BULKY = msgspec.json.Decoder(_Bulky)


def _num_names(item: bytes) -> int:
    """Names that an object holds, at most, but for those within its bulky fields."""
    names = item.count(b":") + item.count(b"{")
    if names > 64:
        for raw in msgspec.structs.astuple(_BULKY.decode(item)):
            value = bytes(raw)
            names -= value.count(b":") + value.count(b"{")
    return names
