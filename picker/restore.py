"""Puts the model's name that a client asked for back into the answer to its rewritten request.

That is the string at `model` of the answer, at `response.model` of an event of the Responses API,
and at `message.model` of Anthropic's first event, whatever the pod has put there. All other bytes
pass as they come, at any cut, and only the beginning of a key is ever held back. A document that
holds more than any answer does before it names its model is not read to its end.
"""

from __future__ import annotations

import json
import re

MAX_STEPS = 1 << 15  # through one document, each a microsecond: brackets, strings that are cut

_MODEL = b"model"
_HOLDERS = (b"response", b"message")  # of the object that names it
_LONGEST = len('"response"')  # of these keys
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_MEMBERS = re.compile(  # that are none of ours, while they hold no others, each with its comma
    rb'(?:\s*+"(?!(?:model|response|message)")(?:[^"\\]++|\\.)*+"\s*+:'
    rb'\s*+(?:%b|[^"{}\[\],\s]++)\s*+,)*+' % _STRING,
    re.DOTALL,
)
_FLAT = rb'(?:[^"{}\[\]]++|%b)*+' % _STRING
_BESIDE_BRACKETS = re.compile(  # but for those of lists and objects that hold no others
    rb'(?:[^"{}\[\]]++|%b|\[%b\]|\{%b\})*+' % (_STRING, _FLAT, _FLAT), re.DOTALL
)
_BETWEEN = re.compile(rb'[^"{}\[\],]*+')
_SPACE = re.compile(rb"\s*+")
_DATA = b"data:"
_OPENING = b"{["
_QUOTE, _BACKSLASH, _COMMA, _OPEN = b'"\\,{'


class ModelRestorer:
    """Restores the name in the body of one response, JSON or server-sent events."""

    __slots__ = ("_begun", "_document", "_events", "_in_data", "_line_began")

    def __init__(self, name: str, *, events: bool) -> None:
        self._document = _Document(json.dumps(name).encode())
        self._events = events
        self._begun = b""  # what comes again with the next bytes
        self._line_began = True
        self._in_data = False  # in a line of data

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on, after the next ones came."""
        data = self._begun + chunk if self._begun else chunk
        out: list[bytes] = []
        if self._events:
            stop = self._lines(data, out)
        else:
            stop = self._document.scan(data, 0, len(data), out)
        self._begun = data[stop:]
        return b"".join(out)

    def finish(self) -> bytes:
        """What is left to pass on at the end of the body."""
        left, self._begun = self._begun, b""
        return left

    def _lines(self, data: bytes, out: list[bytes]) -> int:
        """An event's data may have several lines, and a string is in one of them."""
        document = self._document
        position = 0
        while position < len(data):
            if self._line_began:
                if len(data) - position < len(_DATA) and _DATA.startswith(data[position:]):
                    return position
                self._line_began = False
                self._in_data = data.startswith(_DATA, position)
                if self._in_data:
                    out.append(_DATA)
                    position += len(_DATA)
                elif data[position] in b"\r\n":
                    document.begin()
            end = data.find(b"\n", position) + 1
            stop = end or len(data)
            passed = document.scan(data, position, stop, out) if self._in_data else position
            if not end and self._in_data:
                return passed
            out.append(data[passed:stop])
            if end:
                self._line_began = True
            position = stop
        return position


class _Document:
    """One JSON document, read as far as it takes to know where its model is named."""

    __slots__ = (
        "_depth",
        "_done",
        "_escaped",
        "_key",
        "_level",
        "_name",
        "_quoted",
        "_replaces",
        "_steps",
        "_wants_key",
    )

    def __init__(self, name: bytes) -> None:
        self._name = name
        self.begin()

    def begin(self) -> None:
        """The next one."""
        self._done = False  # its model was named, or cannot be any more
        self._depth = 0  # of objects and lists
        self._level = 0  # the depth of the object whose keys are read
        self._wants_key = False  # there, rather than a value
        self._key = b""  # of the value that comes
        self._quoted = False  # in a string
        self._escaped = False  # a byte of it
        self._replaces = False  # that string
        self._steps = 0

    def scan(self, data: bytes, position: int, end: int, out: list[bytes]) -> int:
        """Pass on some bytes of it, but for a key at their end that may be one of ours.

        Returns where that begins: it must come again, with the next bytes.
        """
        start = position  # of what has not been passed on
        while position < end and not self._done:
            self._steps += 1
            if self._quoted:
                position = self._rest_of_string(data, position, end)
                if self._replaces:
                    start = position
                    self._done = not self._quoted
            elif self._steps > MAX_STEPS:
                self._done = True
            elif self._depth > self._level:
                position = self._nested(data, position, end)
            elif not self._depth:
                position = self._first(data, position, end)
            else:
                if self._wants_key:
                    position = _past(_MEMBERS, data, position, end)
                position = _past(_BETWEEN, data, position, end)
                if position == end:
                    break
                if data[position] != _QUOTE:
                    self._punctuation(data[position])
                    position += 1
                elif not self._wants_key:
                    self._quoted = True
                    if self._key == _MODEL:
                        self._replaces = True
                        out += (data[start:position], self._name)
                        start = position + 1
                    position += 1
                elif (after := _past(_WHOLE_STRING, data, position, end)) > position:
                    self._key = data[position + 1 : after - 1]
                    self._wants_key = False
                    position = after
                elif end - position < _LONGEST:
                    break
                else:
                    self._key = b""
                    self._wants_key = False
                    self._quoted = True
                    position += 1
        if self._done:
            position = end
        out.append(data[start:position])
        return position

    def _first(self, data: bytes, position: int, end: int) -> int:
        position = _past(_SPACE, data, position, end)
        if position == end:
            return end
        if data[position] == _OPEN:
            self._depth = self._level = 1
            self._wants_key = True
        else:
            self._done = True
        return position + 1

    def _rest_of_string(self, data: bytes, position: int, end: int) -> int:
        if self._escaped:
            position += 1
            self._escaped = False
        position = _past(_REST_OF_STRING, data, position, end)
        if position < end:
            self._escaped = data[position] == _BACKSLASH
            self._quoted = self._escaped
            position += 1
        return position

    def _nested(self, data: bytes, position: int, end: int) -> int:
        """What is deeper than the keys that are read: only its brackets count."""
        position = _past(_BESIDE_BRACKETS, data, position, end)
        if position == end:
            return end
        if data[position] == _QUOTE:
            self._quoted = True
        elif data[position] in _OPENING:
            self._depth += 1
        else:
            self._depth -= 1
        return position + 1

    def _punctuation(self, byte: int) -> None:
        if byte == _COMMA:
            self._wants_key = True
        elif byte in _OPENING:
            if byte == _OPEN and self._level == 1 and self._key in _HOLDERS:
                self._level = 2
                self._wants_key = True
            self._depth += 1
        else:
            self._depth -= 1
            self._level = self._depth
            self._done = not self._depth


def _past(pattern: re.Pattern[bytes], data: bytes, position: int, end: int) -> int:
    """Where a match ends; where it should begin if there is none."""
    match = pattern.match(data, position, end)
    return position if match is None else match.end()
