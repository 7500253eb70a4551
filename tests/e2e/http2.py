"""An HTTP/2 client for one request at a time, with every frame in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h2 = H2Connection()
        self._h2.initiate_connection()
        self._stream = 0

    async def headers(
        self, method: str, path: str, headers: Mapping[str, str] = {}, *, end: bool = False
    ) -> None:
        self._stream = self._h2.get_next_available_stream_id()
        pseudo = {":method": method, ":scheme": "http", ":authority": "test", ":path": path}
        self._h2.send_headers(self._stream, [*pseudo.items(), *headers.items()], end_stream=end)
        await self._flush()

    async def data(self, data: bytes, *, end: bool = False) -> None:
        self._h2.send_data(self._stream, data, end_stream=end)
        await self._flush()

    async def trailers(self, trailers: Mapping[str, str]) -> None:
        self._h2.send_headers(self._stream, list(trailers.items()), end_stream=True)
        await self._flush()

    async def response(self) -> tuple[int, bytes]:
        """Status and whole body."""
        status, body = 0, b""
        while True:
            for event in await self._events():
                match event:
                    case ResponseReceived():
                        status = int(dict(event.headers or [])[b":status"])
                    case DataReceived():
                        body += event.data or b""
                    case StreamEnded():
                        return status, body
                    case StreamReset():
                        raise ConnectionResetError(event.error_code)

    async def _events(self) -> list[Event]:
        data = await self._reader.read(65536)
        if not data:
            raise ConnectionResetError("the connection is closed")
        events = self._h2.receive_data(data)
        for event in events:
            if isinstance(event, DataReceived) and event.flow_controlled_length:
                self._h2.acknowledge_received_data(event.flow_controlled_length, self._stream)
        await self._flush()
        return events

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
