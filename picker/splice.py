"""Changes to a request's body that leave all its other bytes as they came.

One has the server tell the usage of a stream whose client did not ask for it; `picker.sse` takes
what comes of it out of the answer again. The other names another model; `picker.restore` puts the
name that was asked for back into the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from picker.json_body import Fields

_OPTION = b'"include_usage":true'
_OPTIONS = b"{" + _OPTION + b"}"

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_FLAG = 64  # bytes of JSON; nothing longer is true or false
_USUAL = {b"true": True, b"false": False, b"null": False}
_FLAGS: dict[object, bool] = {
    **dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys((0, "0", "false", "f", "no", "n", "off", None), False),
}


class Splice(NamedTuple):
    """Some bytes of a body go, and a text comes in their place."""

    offset: int  # bytes before it
    drop: int  # bytes that go
    text: bytes  # printable ASCII that begins and ends with none of its spaces

    @property
    def growth(self) -> int:
        """Bytes that a body gains."""
        return len(self.text) - self.drop


class ModelRewrite(NamedTuple):
    """A request asks a pod for another model than its client did."""

    asked: str  # by the client: its answer shall name this one
    splice: Splice  # names the other


def apply(splices: Sequence[Splice], body: bytes) -> bytes:
    """The body, changed at some places that do not overlap."""
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    start = 0
    for splice in sorted(splices):
        pieces += (view[start : splice.offset], splice.text)
        start = splice.offset + splice.drop
    return b"".join((*pieces, view[start:]))


def name_model(body: bytes, value: msgspec.Raw, model: str) -> Splice:
    """What makes a body ask for a model; `value` is the one that the decoder found in it."""
    return Splice(_offset(body, value), len(value), json.dumps(model).encode())


def flag(found: Fields, name: str) -> bool | None:
    """A field that is true or false; one that is null or missing is false. None: it is neither.

    Read as pydantic does, by which vLLM and SGLang judge: `1` and `"yes"` are true, too. A client
    that writes them gets a stream, whatever we would take it for.
    """
    raw = found.get(name)
    if raw is None:
        return False
    written = bytes(raw) if len(raw) <= _MAX_FLAG else b""
    known = _USUAL.get(written)
    if known is not None or not written or written[0] in b"[{":
        return known
    try:
        value = msgspec.json.decode(written)
    except msgspec.DecodeError:  # a number that is too large
        return None
    return _FLAGS.get(value.lower() if isinstance(value, str) else value)


def ask_for_usage(body: bytes, options: msgspec.Raw | None) -> Splice | None:
    """What makes `stream_options.include_usage` of a body true, and changes nothing else.

    Args:
        body: a JSON object that asks for a stream.
        options: its `stream_options`, as the decoder found them in it; None: it has none.

    Returns:
        None where the client asks for its usage itself, or for something that is no flag.
    """
    if options is None:
        return Splice(body.index(b"{") + 1, 0, b'"stream_options":' + _OPTIONS + b",")
    start = _offset(body, options)
    written = bytes(options)
    if written == b"null":
        return Splice(start, len(written), _OPTIONS)
    if not written.startswith(b"{"):
        return None
    members = _MEMBERS.decode(options)
    if not members:
        return Splice(start, len(written), _OPTIONS)
    if "include_usage" not in members:
        return Splice(start + 1, 0, _OPTION + b",")
    if flag(members, "include_usage") is not False:
        return None
    told = members["include_usage"]
    return Splice(_offset(body, told), len(told), b"true")


def _offset(body: bytes, piece: msgspec.Raw) -> int:
    """Where a piece of a body starts: decoders give views of what they decode, not copies."""
    offset = _address(piece) - _address(body)
    assert 0 <= offset <= len(body) - len(piece), "a piece of this body"
    return offset


def _address(view: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
