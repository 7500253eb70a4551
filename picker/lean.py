"""The lean profile's face: Envoy's ext_authz asks over HTTP/1.1, one request and one answer.

Envoy posts the client's method, path, some of its headers and its body under `/pick`. The answer
is 200 with the endpoint in a header; or a refusal. One of 4xx is the client's answer. A 503
Envoy would replace, so it is a 200 too, with what to say in headers that a route of Envoy's
answers with. An answer of 500 itself means that the picker failed, and Envoy fails open or closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools

from picker.config import Config
from picker.director import Director, Outcome, Pick
from picker.exchange import unknown_method
from picker.names import (
    DESTINATION,
    METHODS,
    OWNER,
    PICK_PATH,
    READY_PATH,
    REFUSAL,
    REFUSED,
    REQUEST_ID,
    RETRY_AFTER,
    SPLICE,
    STREAM,
)
from picker.refusal import Refusal
from picker.sockets import of_all_addresses
from picker.splice import ModelRewrite, Splice
from picker.tickets import Tickets

log = logging.getLogger(__name__)

MAX_HEAD = 128 << 10  # bytes of a request line and headers; Envoy's own limit is 60 KiB
MAX_HEADERS = 400  # more than Envoy takes of a client
MAX_CONNECTIONS = 8192
BACKLOG = 1024  # connections that wait to be taken: a busy Envoy opens many at once
MAX_HELD_BODIES = 32  # times the body limit: bytes of unfinished bodies, all connections together
SLOW = 30  # sweeps, after which an unfinished request is given up
SWEEP_SECONDS = 0.5  # as often as Envoy tells of running requests

_PICKED = f"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n{DESTINATION}: ".encode()
_END = b"\r\n\r\n"
_LAST = b"\r\nconnection: close\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_IS_READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_IS_NOT = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_PREFIX = PICK_PATH.encode()
_READY = READY_PATH.encode()
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


class LeanServer:
    """Answers Envoy on `listen.http`. `tickets` are for the access log to settle."""

    def __init__(self, director: Director, config: Config) -> None:
        self.director = director
        self.max_body = config.max_body
        self.reads_usage = config.usage
        self.tickets = Tickets()
        self.owner = ""  # in names of requests: who picked, where there are several pickers
        self.connections: set[Connection] = set()
        self.held = 0  # bytes of unfinished bodies
        self.ready = False  # as told at READY_PATH
        self.draining = False
        self._config = config
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()

    def reconfigure(self, config: Config) -> None:
        """Drain by this; ports and limits stay."""
        self._config = config

    async def start(self) -> int:
        """Take a port, and return it. Connections to it are refused until `serve`.

        Raises:
            OSError: the port is in use, or the host is none of this machine.
        """
        listen = self._config.listen
        loop = asyncio.get_running_loop()
        everywhere = of_all_addresses(listen.host, listen.http)
        where: dict[str, Any] = {"sock": everywhere}
        if everywhere is None:
            where = {"host": listen.host.strip("[]"), "port": listen.http}
        self._server = await loop.create_server(
            lambda: Connection(self),
            **where,
            backlog=BACKLOG,
            start_serving=False,
        )
        self._sweep_on()
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self) -> None:
        """Take connections. Envoy does not ask this port whether the picker is ready."""
        assert self._server is not None, "started"
        await self._server.start_serving()

    async def drain(self) -> None:
        """Let Envoy go elsewhere: take no connection, and close those that are idle.

        Returns when the others have had their answers and the access log has told how the picked
        requests ended, at the latest after `drain` seconds.
        """
        assert self._server is not None
        self.draining = True
        self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        self._look_whether_drained()
        try:
            async with asyncio.timeout(self._config.drain):
                await self._drained.wait()
        except TimeoutError:
            unfinished = len(self.connections) + len(self.tickets)
            log.warning("%d requests had not ended after %gs", unfinished, self._config.drain)

    def _look_whether_drained(self) -> None:
        if self.draining and not self.connections and not self.tickets:
            self._drained.set()

    async def stop(self) -> None:
        """Close all, and end every open pick as aborted."""
        if self._server is not None:
            self._server.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self.connections):
            connection.close()
        self.tickets.abandon()

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._look_whether_drained()

    def sweep(self) -> None:
        """Give up what does not end: picks without news, requests that are sent too slowly."""
        self.tickets.sweep()
        for connection in list(self.connections):
            connection.sweep()
        self._look_whether_drained()

    def _sweep_on(self) -> None:
        self.sweep()
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_on)


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
            self._break(500, "internal_error", "the request could not be routed")
        except httptools.HttpParserError as error:
            method = data.partition(b" ")[0].decode("latin-1")
            if "method" in str(error) and method.replace("-", "").isalnum():
                self._break(*unknown_method(method))
            else:
                self._break(400, "bad_request", "the picker was sent something else than HTTP/1.1")
        except httptools.HttpParserUpgrade:
            pass  # refused when its headers were complete
        if not self._in_body and self._head_bytes > MAX_HEAD:
            self._break(431, "bad_request", f"the headers are longer than {MAX_HEAD} bytes")
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
            self._break(431, "bad_request", f"there are more than {MAX_HEADERS} headers")
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
            self._too_large()
        elif self._parser.should_upgrade():
            self._break(400, "bad_request", "Upgrade and CONNECT are not answered here")
        elif "expect" in self._headers and self._transport is not None:
            self._transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        if self._broken is not None:
            return
        self._length += len(data)
        self._server.held += len(data)
        self._body.append(data)
        if self._length > self._server.max_body:
            self._too_large()
        elif self._server.held > MAX_HELD_BODIES * self._server.max_body:
            self._break(429, "busy", "too many bodies are being sent", retry_after=1)

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
        if not name and self._url == _READY:
            self._tell_ready()
            return None
        if not name:
            return self._refuse(
                400, "no_stream", f"{STREAM} is missing: is Envoy set up by `warmpath envoy`?"
            )
        if not self._url.startswith(_PREFIX):
            return self._refuse(404, "not_found", f"only paths under {PICK_PATH} are answered here")
        method = self._parser.get_method().decode("latin-1")
        if method not in METHODS:
            return self._refuse(*unknown_method(method))
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
                return self._refuse(*self._over_limit())
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
            self._transport.write(_IS_READY)
        else:
            self._transport.write(_IS_NOT)
            self._transport.close()

    def _refuse(self, status: int, reason: str, message: str) -> Refusal:
        """A refusal of our own."""
        refusal = Refusal(status, reason, message)
        self._server.director.refused(refusal)
        return refusal

    def _answer(self, answer: str | Refusal, *, last: bool = False) -> None:
        transport = self._transport
        assert transport is not None
        last = last or self._server.draining or not self._parser.should_keep_alive()
        end = _LAST if last else _END
        if isinstance(answer, str):
            transport.write(_PICKED + answer.encode("latin-1") + end)
        else:
            no_body = self._parser.get_method() == b"HEAD"
            transport.write(_refused(answer, end, no_body=no_body))
        if last:
            transport.close()

    def _over_limit(self) -> tuple[int, str, str]:
        limit = self._server.max_body
        return 413, "body_too_large", f"the request body is over the limit of {limit} bytes"

    def _too_large(self) -> None:
        self._break(*self._over_limit())

    def _break(
        self, status: int, reason: str, message: str, *, retry_after: int | None = None
    ) -> None:
        """Answer no more on this connection but this."""
        if self._broken is None:
            self._broken = Refusal(status, reason, message, retry_after=retry_after)

    def _forget_body(self) -> None:
        self._server.held -= self._length
        self._length = 0
        self._body = []


def splice_header(usage: Splice | None, rewrite: ModelRewrite | None) -> str:
    """The header by which Envoy changes the body and undoes it in the answer, for splice.lua."""
    if usage is None and rewrite is None:
        return ""
    name = "" if rewrite is None else json.dumps(rewrite.asked).replace("\x7f", "\\u007f")
    splices = [] if usage is None else [usage]
    if rewrite is not None:
        splices.append(rewrite.splice)
    told = f"\r\n{SPLICE}: {int(usage is not None)} {len(name)} {name}"
    for splice in sorted(splices):
        told += f"{splice.offset} {splice.drop} {len(splice.text)} {splice.text.decode('ascii')}"
    return told


def _refused(refusal: Refusal, end: bytes, *, no_body: bool) -> bytes:
    body = refusal.body
    if refusal.status != HTTPStatus.SERVICE_UNAVAILABLE:
        lines = [f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in refusal.headers]
        lines.append(f"content-length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1") + end + (b"" if no_body else body)
    # ASCII, so that it passes as a header; DEL is all that JSON leaves of the control characters.
    text = json.dumps(json.loads(body)).replace("\x7f", "\\u007f")
    lines = ["HTTP/1.1 200 OK", "content-length: 0", f"{REFUSED}: {refusal.reason}"]
    lines.append(f"{REFUSAL}: {text}")
    if refusal.retry_after is not None:
        lines.append(f"{RETRY_AFTER}: {refusal.retry_after}")
    return "\r\n".join(lines).encode("ascii") + end
