"""Reads token usage from a response, at any cut of its bytes.

Understands the answers of OpenAI's completions, chat, embeddings and Responses APIs and of
Anthropic's messages, whole or as server-sent events. Whatever else comes has no usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_DOCUMENT = 1 << 20  # bytes of a JSON document, or of one event's line, that are read whole
MAX_TAIL = 1 << 16  # bytes at the end of a longer one, where servers put the usage
MAX_TRIES = 8  # objects named usage that are looked at there
MAX_TOKENS = 1 << 53  # a greater number is no count of tokens

_MARK = b'"usage"'
_DATA = b"data:"
_NULL = re.compile(rb"\s*:\s*null\b")
_OBJECT = re.compile(r'(?<!\\)"usage"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, as the engine counted them."""

    prompt_tokens: int  # with the cached ones
    cached_tokens: int | None  # of the prompt, taken from the cache; None where it was not told
    completion_tokens: int  # 0 where there are none, as with embeddings


def read_usage(*documents: bytes) -> Usage | None:
    """The usage that JSON objects tell, in any dialect; None where they tell none. Never raises.

    Where several tell a count, the last one's holds: Anthropic's streams tell the prompt's tokens
    at the beginning and the completion's at the end.
    """
    counts: dict[str, int] = {}
    for document in documents:
        counts.update(_counts(document))
    return _usage(counts) if counts else None


class UsageReader:
    """Finds the usage in the body of one response, fed as it comes.

    Every count that comes again replaces the one before: engines that tell usage with each event
    tell sums, and Anthropic's events tell the prompt's first and the completion's last. Of a
    document, or event, longer than `MAX_DOCUMENT` only its last `MAX_TAIL` bytes are read. Holds
    no more than that and one chunk, and never raises.
    """

    def __init__(self, content_type: str | None) -> None:
        media_type = (content_type or "").partition(";")[0].strip().lower()
        self._events = media_type == "text/event-stream"
        self._reads = self._events or media_type == "application/json"
        self._counts: dict[str, int] = {}
        self._begun = bytearray()  # a document, or a line, whose end has not come
        self._cut = False  # whether its beginning was dropped

    @property
    def usage(self) -> Usage | None:
        """What was told so far."""
        return _usage(self._counts) if self._counts else None

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        if not self._reads:
            return
        start = 0
        if self._events and (end := chunk.rfind(b"\n") + 1):
            if self._begun:
                start = chunk.find(b"\n") + 1
                self._keep(chunk[: start - 1])
                self._finish_document()
            self._read_lines(chunk, start, end)
            start = end
        if start < len(chunk):
            self._keep(chunk[start:] if start else chunk)

    def finish(self) -> None:
        """The body is over."""
        self._finish_document()
        self._reads = False

    def _read_lines(self, lines: bytes, start: int, end: int) -> None:
        """Read whole lines, of which few are looked at."""
        found = lines.find(_MARK, start, end)
        while found >= 0:
            line_end = lines.find(b"\n", found)
            if not _NULL.match(lines, found + len(_MARK)):
                line_start = max(start, lines.rfind(b"\n", start, found) + 1)
                self._read(lines[line_start:line_end], cut=line_end - line_start > MAX_DOCUMENT)
            found = lines.find(_MARK, line_end, end)

    def _keep(self, piece: bytes) -> None:
        self._begun += piece
        if len(self._begun) > MAX_DOCUMENT:
            del self._begun[:-MAX_TAIL]
            self._cut = True

    def _finish_document(self) -> None:
        if _MARK in self._begun:
            self._read(bytes(self._begun), cut=self._cut)
        self._begun.clear()
        self._cut = False

    def _read(self, document: bytes, *, cut: bool) -> None:
        if cut:
            self._counts.update(_counts_at_end(document[-MAX_TAIL:]))
        elif not self._events:
            self._counts.update(_counts(document))
        elif document.startswith(_DATA):
            self._counts.update(_counts(document[len(_DATA) :]))


_MISSING = msgspec.Raw()


class _Inner(msgspec.Struct):
    usage: msgspec.Raw = _MISSING


class _Document(msgspec.Struct):
    usage: msgspec.Raw = _MISSING
    response: msgspec.Raw = _MISSING  # of the Responses API's events
    message: msgspec.Raw = _MISSING  # of Anthropic's first event


_DOCUMENT = msgspec.json.Decoder(_Document)
_INNER = msgspec.json.Decoder(_Inner)
_USAGE = msgspec.json.Decoder(dict[str, Any])
_PREFIX = json.JSONDecoder()


def _counts(document: bytes) -> dict[str, int]:
    """The counts in a JSON object, under the names of `_usage`; empty without any."""
    found = _decoded(_DOCUMENT, document)
    if found is None:
        return {}
    counts: dict[str, int] = {}
    for outer in (found.message, found.response):
        # None where it is a text: an error's message
        if outer and (inner := _decoded(_INNER, outer)) is not None:
            counts.update(_named(_decoded(_USAGE, inner.usage) or {}))
    counts.update(_named(_decoded(_USAGE, found.usage) or {}))
    return counts


def _decoded(decoder: msgspec.json.Decoder[T], value: bytes | msgspec.Raw) -> T | None:
    """None for what is missing, or something else."""
    try:
        return decoder.decode(value) if value else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _counts_at_end(tail: bytes) -> dict[str, int]:
    """The counts in the last usage of a document whose beginning is lost."""
    text = tail.decode("latin-1")  # a character for each byte
    found = [match.end() for match in _OBJECT.finditer(text)]
    for start in found[: -MAX_TRIES - 1 : -1]:
        try:
            usage, _ = _PREFIX.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if counts := _named(usage):
            return counts
    return {}


_NAMES = (
    ("prompt", "prompt_tokens"),
    ("completion", "completion_tokens"),
    ("input", "input_tokens"),
    ("completion", "output_tokens"),
    ("read", "cache_read_input_tokens"),
    ("created", "cache_creation_input_tokens"),
)
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "prompt_token_details")


def _named(usage: dict[str, Any]) -> dict[str, int]:
    counts = {
        name: count
        for name, key in _NAMES
        if key in usage and (count := _count(usage[key])) is not None
    }
    for key in _DETAILS:
        details = usage.get(key)
        if isinstance(details, dict):
            cached = _count(details.get("cached_tokens"))
            if cached is not None:
                counts["cached"] = cached
    return counts


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_TOKENS else None


def _usage(counts: Mapping[str, int]) -> Usage:
    prompt = counts.get("prompt")
    if prompt is None:  # Anthropic's input leaves out what the cache held or took
        prompt = sum(counts.get(name, 0) for name in ("input", "read", "created"))
    cached = counts.get("cached", counts.get("read"))
    return Usage(prompt, cached, counts.get("completion", 0))
