"""A pod that shows what reached it, and misbehaves as told."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

METRICS = """\
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc 0.0
"""
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ACT = "x-act"  # a request header: see Pod; without it the request is shown
TOKENS = (  # a stream as model servers write it
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\"usage\\":{"},"finish":"stop"}]}\n\n',
)
USAGE_EVENT = b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(USAGE).encode()
DONE = b"data: [DONE]\n\n"


@dataclass(eq=False)
class Pod:
    """A server on a free port.

    With the header `x-act: stream` it answers with events, one for each `go.release()`, until
    `stop()`; with `x-act: comment` the same after a comment. With `x-act: cut` it breaks off after
    the first. With `x-act: tokens` it answers with `TOKENS`, and with `USAGE_EVENT` if it is asked
    for usage; with `x-act: gzip` the same, compressed if the request allows it. With `x-act: say`
    it answers with the pieces of `says`; JSON in one piece tells its length.
    """

    address: str = ""
    served: int = 0
    events: int = 0  # written to streams
    asked: list[tuple[dict[str, str], bytes]] = field(default_factory=list)  # for tokens
    says: tuple[str, Sequence[bytes]] = ("text/plain", ())  # content type and pieces of a body
    broken: int = 0  # streams that the other side broke off
    go: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    stopping: bool = False
    _runner: web.AppRunner | None = None
    _site: web.TCPSite | None = None

    async def start(self) -> None:
        """Listen; on the same port as before, if it was started before."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True
        )
        await self._runner.setup()
        port = int(self.address.rpartition(":")[2] or 0)
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def shut_the_door(self) -> None:
        """Take no new connection; the picker's for metrics stays, so that it notices nothing."""
        assert self._site is not None
        await self._site.stop()

    async def kill(self) -> None:
        """Close the port and break off whatever runs."""
        if self._runner is None:
            return
        server = self._runner.server
        assert server is not None
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    def reset(self) -> None:
        """As it was when it started."""
        self.served = self.events = self.broken = 0
        self.asked = []
        self.go, self.stopping = asyncio.Semaphore(0), False

    def stop(self) -> None:
        """Let streams end."""
        self.stopping = True
        self.go.release()

    async def wait_for_events(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.events < count:  # noqa: ASYNC110  # it goes through other processes
                await asyncio.sleep(0.01)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.served += 1
        match request.headers.get(ACT):
            case "stream" | "comment":
                return await self._stream(request)
            case "cut":
                return await self._cut(request)
            case "tokens" | "gzip":
                return await self._tokens(request)
            case "say":
                return await self._say(request)
        body = await request.read()
        return web.json_response(
            {
                "pod": self.address,
                "method": request.method,
                "path": request.path_qs,
                "headers": [(name.lower(), value) for name, value in request.headers.items()],
                "sha": hashlib.sha256(body).hexdigest(),
                "usage": USAGE,
            }
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            if request.headers[ACT] == "comment":
                await response.write(b": wait\n\n")
            number = 0
            while True:
                await self.go.acquire()
                if self.stopping:
                    break
                await response.write(b"data: %d\n\n" % number)
                number += 1
                self.events += 1
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.broken += 1
            raise
        return response

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        assert len({name for name, _ in headers}) == len(headers)
        self.asked.append((dict(headers), body))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if request.headers[ACT] == "gzip":
            response.enable_compression()  # as far as accept-encoding allows it
        await response.prepare(request)
        options = json.loads(body).get("stream_options") or {}
        for event in (*TOKENS, *[USAGE_EVENT] * (options.get("include_usage") is True), DONE):
            await response.write(event)
        await response.write_eof()
        return response

    async def _say(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((headers, await request.read()))
        kind, pieces = self.says
        response = web.StreamResponse(headers={"content-type": kind})
        if len(pieces) == 1 and "json" in kind:
            response.content_length = len(pieces[0])
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 0\n\n")
        await self.go.acquire()
        assert request.transport is not None
        request.transport.abort()
        return response


@asynccontextmanager
async def running_pods(count: int) -> AsyncIterator[list[Pod]]:
    pods = [Pod() for _ in range(count)]
    for pod in pods:
        await pod.start()
    try:
        yield pods
    finally:
        for pod in pods:
            await pod.kill()
