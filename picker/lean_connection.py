"""One connection of the lean profile: HTTP/1.1 of Envoy's ext_authz, see lean.py."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, cast

import httptools

from picker.director import Outcome, Pick
from picker.lean_answers import (
    CONTINUE,
    END,
    LAST,
    NOT_READY,
    PICKED,
    READY,
    refused,
    splice_header,
)
from picker.names import METHODS, OWNER, PICK_PATH, READY_PATH, REQUEST_ID, STREAM
from picker.refusal import Refusal, body_too_large, unknown_method

if TYPE_CHECKING:
    from picker.lean import LeanServer

log = logging.getLogger(__name__)

MAX_HEAD = 128 << 10  # bytes of a request line and headers; Envoy's own limit is 60 KiB
MAX_HEADERS = 400  # more than Envoy takes of a client
MAX_CONNECTIONS = 8192
MAX_HELD_BODIES = 32  # times the body limit: bytes of unfinished bodies, all connections together
SLOW = 30  # sweeps, after which an unfinished request is given up

_PREFIX = PICK_PATH.encode()
_READY_URL = READY_PATH.encode()
_USUAL = {  # headers of nearly every request, by their names as Envoy writes them; "": not read
    b"host": "",
    b"x-envoy-internal": "",
    b"x-envoy-auth-partial-body": "",
    b"x-envoy-expected-rq-timeout-ms": "",
    b"content-length": "content-length",
    b"content-type": "content-type",
    b"x-request-id": "x-request-id",
    STREAM.encode(): STREAM,
}


class Connection(asyncio.Protocol):
    """One connection of Envoy's: requests come and are answered in order.

    Envoy sends no request before the last one was answered. Nor may others, while one waits for
    its pick: reading goes on only to learn that Envoy has left.
    """

    __slots__ = (
        "_body",
        "_broken",
        "_head_bytes",
        "_header_count",
        "_headers",
        "_in_body",
        "_length",
        "_parser",
        "_server",
        "_sweeps",
        "_transport",
        "_url",
        "_waiting",
    )

    def __init__(self, server: LeanServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._head_bytes = 0
        self._sweeps = 0  # while a request is unfinished
        self._waiting: asyncio.Task[Pick] | None = None
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_count = 0
        self._body: list[bytes] = []
        self._length = 0
        self._in_body = False
        self._broken: Refusal | None = None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        connections = self._server.connections
        connections.add(self)
        if len(connections) > MAX_CONNECTIONS:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None:
            self._waiting.cancel()
        self._forget_body()
        self._server.gone(self)

    def pause_writing(self) -> None:
        if self._transport is not None:  # it asks, and does not read what we answer
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._waiting is not None:
            self.close()
            return
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:  # ours: no client can cause it
            log.exception("A request could not be answered")
            why = "the request could not be routed"
            self._break(Refusal(500, "internal_error", why))
        except httptools.HttpParserError as error:
            method = data.partition(b" ")[0].decode("latin-1")
            if "method" in str(error) and method.replace("-", "").isalnum():
                self._break(unknown_method(method))
            else:
                self._break(_bad_request("the picker was sent something else than HTTP/1.1"))
        except httptools.HttpParserUpgrade:
            pass  # refused when its headers were complete
        if not self._in_body and self._head_bytes > MAX_HEAD:
            self._break(_bad_request(f"the headers are longer than {MAX_HEAD} bytes", 431))
        if self._broken is not None:
            self._server.director.refused(self._broken)
            self._answer(self._broken, last=True)

    def sweep(self) -> None:
        """Called twice a second: a request that does not end is given up."""
        if self._head_bytes or self._in_body:
            self._sweeps += 1
            if self._sweeps > SLOW:
                self.close()

    def close_if_idle(self) -> None:
        if not (self._head_bytes or self._in_body or self._waiting):
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # httptools' callbacks

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._break(_bad_request(f"there are more than {MAX_HEADERS} headers", 431))
            return
        key = _USUAL.get(name)
        if key is None:
            key = name.decode("latin-1").lower()
        elif not key:
            return
        text = value.decode("utf-8", "replace")  # a tenant's name may be any
        headers = self._headers
        headers[key] = f"{headers[key]},{text}" if key in headers else text

    def on_headers_complete(self) -> None:
        self._in_body = True
        length = self._headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > self._server.max_body:
            self._break(body_too_large(self._server.max_body))
        elif self._parser.should_upgrade():
            self._break(_bad_request("Upgrade and CONNECT are not answered here"))
        elif "expect" in self._headers and self._transport is not None:
            self._transport.write(CONTINUE)

    def on_body(self, data: bytes) -> None:
        if self._broken is not None:
            return
        self._length += len(data)
        self._server.held += len(data)
        self._body.append(data)
        if self._length > self._server.max_body:
            self._break(body_too_large(self._server.max_body))
        elif self._server.held > MAX_HELD_BODIES * self._server.max_body:
            self._break(Refusal(429, "busy", "too many bodies are being sent", retry_after=1))

    def on_message_complete(self) -> None:
        if self._broken is not None or self._transport is None or self._transport.is_closing():
            return
        if self._waiting is not None:
            self.close()
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        answer = self._route(body)
        if answer is not None:
            self._answer(answer)
        self._forget_body()
        self._reset()
        self._head_bytes = self._sweeps = 0

    # What it is about

    def _route(self, body: bytes) -> str | Refusal | None:
        """Where to go, or why nowhere; None: that is answered later."""
        director = self._server.director
        name = self._headers.get(STREAM)
        if not name and self._url == _READY_URL:
            self._tell_ready()
            return None
        if not name:
            why = f"{STREAM} is missing: is Envoy set up by `warmpath envoy`?"
            return self._refuse(Refusal(400, "no_stream", why))
        if not self._url.startswith(_PREFIX):
            why = f"only paths under {PICK_PATH} are answered here"
            return self._refuse(Refusal(404, "not_found", why))
        method = self._parser.get_method().decode("latin-1")
        if method not in METHODS:
            return self._refuse(unknown_method(method))
        try:
            pick = director.route(
                method,
                self._url[len(_PREFIX) :].decode("latin-1"),
                self._headers,
                body,
            )
        except Refusal as refusal:
            return refusal
        told = self._headers.get(REQUEST_ID)
        room = self._server.max_body - len(body)  # Envoy keeps no body that has grown over it
        if isinstance(pick, Pick):
            return self._picked(pick, name, told, room)
        # The pick itself is the task: one that only awaits it, and is cancelled before it begins,
        # would leave it behind.
        self._waiting = asyncio.create_task(pick)
        self._waiting.add_done_callback(partial(self._answer_later, name, told, room))
        return None

    def _answer_later(
        self, name: str, told: str | None, room: int, pick: asyncio.Task[Pick]
    ) -> None:
        self._waiting = None
        if pick.cancelled():
            return  # Envoy has left
        answer: str | Refusal
        try:
            answer = self._picked(pick.result(), name, told, room)
        except Refusal as refusal:
            answer = refusal
        if self._transport is not None:
            self._answer(answer)

    def _picked(self, pick: Pick, name: str, told: str | None, room: int) -> str | Refusal:
        """The answer's headers, or why there can be none.

        Args:
            name: the stream's.
            told: the request id that came.
            room: bytes that the body may gain.
        """
        changes = ""
        if pick.splice is not None or pick.rewrite is not None:
            changed = self._changes(pick, room)
            if changed is None:
                pick.end(Outcome.ABORTED)
                return self._refuse(body_too_large(self._server.max_body))
            changes = changed
        self._server.tickets.open(name, pick)
        lines = pick.destination
        if pick.request_id != told:  # the client's was unfit
            lines += f"\r\n{REQUEST_ID}: {pick.request_id}"
        for header, value in pick.client_headers:
            lines += f"\r\n{header}: {value}"
        if self._server.owner:
            lines += f"\r\n{STREAM}: {name}{OWNER}{self._server.owner}"
        return lines + changes

    def _changes(self, pick: Pick, room: int) -> str | None:
        """The header that has Envoy change the body; None where it would not fit."""
        if pick.rewrite is not None:
            room -= pick.rewrite.splice.growth
            if room < 0:
                return None
        if pick.splice is not None and not (
            self._server.reads_usage and pick.splice.growth <= room
        ):
            pick.splice = None
        return splice_header(pick.splice, pick.rewrite)

    def _tell_ready(self) -> None:
        """To an Envoy that may ask other pickers."""
        assert self._transport is not None
        if self._server.ready:
            self._transport.write(READY)
        else:
            self._transport.write(NOT_READY)
            self._transport.close()

    def _refuse(self, refusal: Refusal) -> Refusal:
        """A refusal of our own."""
        self._server.director.refused(refusal)
        return refusal

    def _answer(self, answer: str | Refusal, *, last: bool = False) -> None:
        transport = self._transport
        assert transport is not None
        last = last or self._server.draining or not self._parser.should_keep_alive()
        end = LAST if last else END
        if isinstance(answer, str):
            transport.write(PICKED + answer.encode("latin-1") + end)
        else:
            no_body = self._parser.get_method() == b"HEAD"
            transport.write(refused(answer, end, no_body=no_body))
        if last:
            transport.close()

    def _break(self, refusal: Refusal) -> None:
        """Answer no more on this connection but this."""
        if self._broken is None:
            self._broken = refusal

    def _forget_body(self) -> None:
        self._server.held -= self._length
        self._length = 0
        self._body = []


def _bad_request(why: str, status: int = 400) -> Refusal:
    return Refusal(status, "bad_request", why)
