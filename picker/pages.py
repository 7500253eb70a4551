"""One kept-alive HTTP/1.1 connection that asks a pod for its page, time and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

MAX_ANSWER = 4 << 20  # bytes, with headers; vLLM's page has 60 KB


class PageConnection(asyncio.Protocol):
    """The pod's side is hostile: whatever it sends, it ends in an answer, a failure, or nothing.

    A pod that sends nothing, or its page too slowly, is for the reader to time: it calls `drop`,
    and hears no more.

    Args:
        on_page: takes the body of an answer with status 200. Each question has one such call, or
            one of `on_failure`.
        on_failure: is told why there is none, and whether to try again, since the pod had closed
            the connection by the time it was used again.
    """

    def __init__(
        self, on_page: Callable[[bytes], None], on_failure: Callable[[str, bool], None]
    ) -> None:
        self.open = False  # fit for the next question
        self._on_page = on_page
        self._on_failure = on_failure
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._asked = False
        self._answers = 0
        self._begin()

    def ask(self, request: bytes) -> None:
        """Send a request, whole; the one before must have ended."""
        assert self._transport is not None
        self._begin()
        self._asked = True
        self._transport.write(request)

    def drop(self) -> None:
        """Close at once; the reader hears no more."""
        self.open = self._asked = False
        if self._transport is not None:
            self._transport.abort()

    def _begin(self) -> None:
        self._body = bytearray()
        self._received = 0
        self._status = 0
        self._sized = False  # the answer says where it ends, else the connection's end does
        self._complete = False
        self._keep = False

    # What the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.open = True

    def data_received(self, data: bytes) -> None:
        if not self._asked:
            self.drop()
            return
        self._received += len(data)
        if self._received > MAX_ANSWER:
            self._fail(f"its page has more than {MAX_ANSWER >> 20} MiB")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("it does not speak HTTP/1")
            return
        if self._complete:
            self._answer(keep=self._keep)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if not self._asked:
            return
        if self._status and not self._sized and exc is None:
            self._answer(keep=False)
        else:
            unused = self._answers > 0 and self._received == 0
            self._fail("it closed the connection before its page was whole", retry=unused)

    def _answer(self, *, keep: bool) -> None:
        self._asked = False
        self._answers += 1
        status, body = self._status, bytes(self._body)
        if not keep:
            self.drop()
        if status == 200:
            self._on_page(body)
        else:
            self._on_failure(f"it answers with status {status}", False)

    def _fail(self, why: str, *, retry: bool = False) -> None:
        self.drop()
        self._on_failure(why, retry)

    # What the parser tells

    def on_message_begin(self) -> None:
        self._keep = False  # if this begins after the answer: nothing was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self._sized = True
        elif name == b"transfer-encoding":
            self._sized = b"chunked" in value.lower()

    def on_headers_complete(self) -> None:
        if not self._complete:
            self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._body += body

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._keep = not self._complete and self._parser.should_keep_alive()
            self._complete = True
        else:
            self._status = 0  # 1xx: the answer is still to come
