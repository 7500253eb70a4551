"""The ext_proc gRPC service: one coroutine per stream.

Reads and writes are plain awaits on the call, and messages are bytes to gRPC: picker/messages.py
gives them their meaning, picker/exchange.py the order of the answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import grpc

from picker import grpc_port
from picker.config import MIB, Config
from picker.director import Director, Pick
from picker.exchange import Ask, Exchange
from picker.messages import Malformed, encode, tell
from picker.names import EXT_PROC, SET_RETRY_ON
from picker.refusal import Refusal
from picker.replies import Reply

log = logging.getLogger(__name__)

MAX_STREAMS = 16_384  # one lasts as long as its generation; a further one is refused
MAX_HELD_BODIES = 32  # as long as allowed: what all unfinished request bodies may take together
BUSY_RETRY_SECONDS = 1
# gRPC forgets streams that come while it tells clients by GOAWAY to send no more: it answers them
# when the connection ends. So we are quiet before: no stream has come for so long.
QUIET_SECONDS = 0.5
QUIET_SHARE = 0.5  # of the time to drain, after which GOAWAY is said to clients who do not stop
LAST_WORDS_SECONDS = 0.25  # to let the ends of streams reach Envoy before connections close

_FAULT = HTTPStatus.INTERNAL_SERVER_ERROR  # of our own: the gateway fails open or closed

# A buffered body comes as one message, and may be answered by one. gRPC answers a message over its
# limit by ending the stream, so the limit lies well above what we refuse ourselves with a 413.
MESSAGE_LIMIT_FACTOR = 2
MESSAGE_MARGIN = MIB
INT32_MAX = (1 << 31) - 1  # gRPC takes no more

OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 60_000),  # notices a dead Envoy under streams that wait for long
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),  # Envoy may ping as often as it is configured to
]


class ExtProcServer:
    """ext_proc on a port of its own. Other services can join `server` before `start`."""

    def __init__(
        self,
        director: Director,
        config: Config,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`credentials` are for TLS; None: without."""
        self._director = director
        self._config = config
        self._credentials = credentials
        self._streams: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._held = 0
        self._held_limit = MAX_HELD_BODIES * config.max_body
        self._came = -math.inf  # when the last one did
        self._idle = asyncio.Event()
        self._idle.set()
        limit = message_limit(config.max_body)
        lengths = (f"grpc.max_{way}_message_length" for way in ("receive", "send"))
        options = [*OPTIONS, *((length, limit) for length in lengths)]
        self.server = grpc_port.new_server(options)
        handler = grpc.stream_stream_rpc_method_handler(self._process)  # bytes in, bytes out
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(EXT_PROC, {"Process": handler}),)
        )

    @property
    def streams(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    def reconfigure(self, config: Config) -> None:
        """Streams that begin from now on go by this; ports and limits stay."""
        self._config = config

    async def start(self) -> int:
        """Listen. Returns the port. Raises OSError."""
        listen = self._config.listen
        return await grpc_port.start(self.server, listen.host, listen.grpc, self._credentials)

    async def drain(self, also: Awaitable[object] | None = None) -> None:
        """Take no new stream, and wait for those in flight, at most `drain` seconds; then stop.

        Clients are told by GOAWAY to go elsewhere, as soon as they have ceased to come of
        themselves, or half of the time is over.

        Other services' streams are not waited for: one of access logs lasts as long as its Envoy.

        Args:
            also: is waited for, too: the lean profile's drain, which access logs end.
        """
        seconds = self._config.drain
        until = asyncio.get_running_loop().time() + seconds
        await self._quiet(QUIET_SHARE * seconds)
        rest = until - asyncio.get_running_loop().time()
        stopping = asyncio.create_task(self.server.stop(rest + LAST_WORDS_SECONDS))
        try:
            async with asyncio.timeout(rest):
                await self._idle.wait()
                if also is not None:
                    await asyncio.shield(also)
        except TimeoutError:
            if self.streams:
                log.warning("%d requests were still in flight after %gs", self.streams, seconds)
        await self.stop()
        await stopping

    async def _quiet(self, at_most: float) -> None:
        """Wait until no stream has come for a while, or for so many seconds."""
        now = asyncio.get_running_loop().time()
        until = now + at_most
        while (pause := min(self._came + QUIET_SECONDS, until) - now) > 0:
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()

    async def stop(self) -> None:
        """End all streams now."""
        self._stopping = True
        for stream in self._streams:
            stream.cancel()
        await self.server.stop(LAST_WORDS_SECONDS)

    async def _process(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        self._idle.clear()
        self._came = asyncio.get_running_loop().time()
        exchange = Exchange(
            self._director.refused,
            max_body=self._config.max_body,
            read_usage=self._config.usage,
            rewrites=self._director.rewrites.active,
            retry_on=dict(context.invocation_metadata()).get(SET_RETRY_ON),
        )
        try:
            if len(self._streams) > MAX_STREAMS:
                await context.read()
                await self._refuse(context, "too many requests are in flight")
            else:
                await self._converse(exchange, context)
        except asyncio.CancelledError:
            if self._stopping:  # by us; Envoy may have gone too
                with suppress(grpc.aio.InternalError):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the picker stops")
            raise
        finally:
            exchange.closed()
            self._streams.discard(stream)
            if not self._streams:
                self._idle.set()

    async def _converse(self, exchange: Exchange, context: grpc.aio.ServicerContext) -> None:
        """Read and answer until the exchange or the stream is over."""
        held = 0
        try:
            while not exchange.over:
                data = await context.read()
                if data is grpc.aio.EOF:
                    return
                try:
                    replies = tell(exchange, data, self._config.identity)
                except Malformed as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                if exchange.held != held:
                    self._held += exchange.held - held
                    held = exchange.held
                    if self._held > self._held_limit and exchange.asks is None:
                        await self._refuse(context, "too many bodies are being sent")
                        return
                if exchange.asks is not None:
                    replies = await self._route(exchange, exchange.asks)
                    self._held -= held
                    held = 0
                for reply in replies:
                    if isinstance(reply, Refusal) and reply.status is _FAULT:
                        await context.abort(grpc.StatusCode.INTERNAL, reply.message)
                    await context.write(encode(reply))
        finally:
            self._held -= held

    async def _route(self, exchange: Exchange, ask: Ask) -> Sequence[Reply]:
        try:
            pick = self._director.route(*ask)
            return exchange.routed(pick if isinstance(pick, Pick) else await pick)
        except Refusal as refusal:
            return exchange.refused(refusal)

    async def _refuse(self, context: grpc.aio.ServicerContext, why: str) -> None:
        """Answer a request for which there is no room here."""
        refusal = Refusal(429, "busy", why, retry_after=BUSY_RETRY_SECONDS)
        self._director.refused(refusal)
        await context.write(encode(refusal))


def message_limit(max_body: int) -> int:
    """Bytes of the longest message that gRPC lets through."""
    return min(MESSAGE_LIMIT_FACTOR * max_body + MESSAGE_MARGIN, INT32_MAX)
