"""Listening for requests, and an orderly end.

On the first SIGTERM or SIGINT a worker drains: it goes on listening, so that probes and
metrics see what happens, but takes no new requests and lets the running ones finish. When
time is up, or on a second signal, the rest is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from aiohttp import web

from worker.api.errors import ApiError
from worker.api.lifecycle import LIFECYCLE, Lifecycle
from worker.api.middleware import error_response

log = logging.getLogger(__name__)

IDLE_SECONDS = 75.0  # for a connection to complete the headers of its next request
LINGER_SECONDS = 1.0  # for a client to read a refusal before it has sent its whole body
SHUTDOWN_SECONDS = 1.0  # for handlers that outlive the drain
BACKLOG = 1024  # connections that wait to be accepted


async def serve(
    app: web.Application,
    host: str,
    port: int,
    *,
    drain_seconds: float = 30.0,
    warm_up: Callable[[], Awaitable[None]] | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve `app` from server.make_app until a signal says stop; then drain and return.

    The worker listens while `warm_up` runs, but is not ready. `on_ready` is told the port,
    which matters when `port` is 0.

    Raises:
        OSError: the address cannot be listened on.
    """
    lifecycle = app[LIFECYCLE]
    with stop_signals() as (stop, hurry):
        async with listening(app, host, port) as bound:
            if await _warmed_up(lifecycle, warm_up, stop):
                if on_ready is not None:
                    on_ready(bound)
                await stop.wait()
            log.info("Draining %d requests", lifecycle.num_active)
            await lifecycle.drain(drain_seconds, hurry)


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Accept connections; gives the port."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    assert runner.server is not None
    try:
        loop = asyncio.get_running_loop()
        connection = partial(
            Connection,
            runner.server,
            loop=loop,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # a few bytes could become gigabytes; see bodies.py
            access_log=None,  # type: ignore[arg-type]  # middleware.observe logs requests
        )
        listener = await loop.create_server(connection, host, port, backlog=BACKLOG)
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            listener.close()
    finally:
        await runner.cleanup()


class Connection(web.RequestHandler):
    """aiohttp's side of a connection, with broken HTTP answered in the API's error shape."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        log.debug("A connection from %s failed: %r", request.remote, exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        text = "The request is not valid HTTP" if status == 400 else "Internal server error"
        response = error_response(ApiError(text, status=status))
        response.force_close()
        return response


@contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events for the first and for the second SIGTERM or SIGINT."""
    first, second = asyncio.Event(), asyncio.Event()

    def receive() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receive)
    try:
        yield first, second
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _warmed_up(
    lifecycle: Lifecycle, warm_up: Callable[[], Awaitable[None]] | None, stop: asyncio.Event
) -> bool:
    """Warm up, unless told to stop meanwhile."""
    if warm_up is not None:
        warming = asyncio.ensure_future(warm_up())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((warming, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not warming.done():
            warming.cancel()
            return False
        warming.result()
    lifecycle.warm = True
    return True
