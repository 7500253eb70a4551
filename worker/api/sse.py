"""One response as server-sent events."""

from __future__ import annotations

import asyncio

from aiohttp import web

STALL_SECONDS = 30.0
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventStream:
    """Sends its headers with the first event, so that errors before it are ordinary answers."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._opening = asyncio.Lock()

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Write events, waiting while the client reads slower than they come.

        Raises:
            ConnectionError: the client is gone, or takes nothing for STALL_SECONDS.
        """
        if not events:
            return
        if not self.response.prepared:
            await self._open()
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self.response.write(events)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionError("the client has stopped reading") from None

    async def close(self, events: bytes) -> None:
        """Write the last events."""
        if not self.response.prepared:
            await self._open()
        await self.response.write_eof(events)

    async def _open(self) -> None:
        async with self._opening:
            if not self.response.prepared:
                await self.response.prepare(self._request)
