"""The words of an ext_proc conversation: which messages Envoy sends, and how each is answered.

`exchange.py` chooses among them, and `messages.py` writes them as protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from picker.refusal import Refusal

MAX_CHUNK = 62_000  # bytes of a body in one answer, as the reference picker has it
# Of a request whose body changes on its way in full duplex, where nobody waits for its length. The
# answer is to be read, so it may not be compressed.
RESIZED = ("content-length", "accept-encoding")
REPLACED = ("accept-encoding",)


class BodyMode(IntEnum):
    """How Envoy sends a body and wants it answered; numbered as in its ProcessingMode."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class Message(IntEnum):
    """One message of Envoy. As a reply: let it go on as it is."""

    REQUEST_HEADERS = auto()
    REQUEST_BODY = auto()
    REQUEST_TRAILERS = auto()
    RESPONSE_HEADERS = auto()
    RESPONSE_BODY = auto()
    RESPONSE_TRAILERS = auto()


@dataclass(frozen=True, slots=True)
class Steer:
    """The request goes to an endpoint: set headers and metadata, remove owned headers."""

    message: Message  # the one that this answers: the request's headers or body
    destination: str  # for the header DESTINATION and the metadata of the same name
    request_id: str | None  # set as a header, unless None: the client's is as good
    remove: tuple[str, ...]  # headers that the client sent, besides OWNED_HEADERS
    retry_on: str | None = None  # for the header RETRY_ON, unless None
    responses_off: BodyMode | None = None  # see Await
    body: bytes | None = None  # in place of the one that this answers, with its length


@dataclass(frozen=True, slots=True)
class Await:
    """The request's headers may be followed by its body; the answer to that will steer it."""

    responses_off: BodyMode | None  # ask for no response bodies; the request's mode, which stays


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a body in full duplex."""

    message: Message
    data: bytes | memoryview  # at most MAX_CHUNK bytes
    end: bool


@dataclass(frozen=True, slots=True)
class Replace:
    """Other bytes in place of those that this answers, outside of full duplex."""

    message: Message
    data: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """The response's headers go on, with these set and those removed."""

    headers: Sequence[tuple[str, str]]
    remove: Sequence[str] = ()


Reply = Message | Steer | Await | Chunk | Replace | Tell | Refusal


def pieces(message: Message, body: bytes, *, end: bool) -> list[Chunk]:
    """A body in chunks; an empty one is one chunk."""
    if len(body) <= MAX_CHUNK:
        return [Chunk(message, body, end)]
    view = memoryview(body)
    chunks = [
        Chunk(message, view[start : start + MAX_CHUNK], False)
        for start in range(0, len(body), MAX_CHUNK)
    ]
    chunks[-1] = Chunk(message, chunks[-1].data, end)
    return chunks
