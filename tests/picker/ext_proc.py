"""The gateway's side of ext_proc, over a real gRPC stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    ProcessingRequest,
    ProcessingResponse,
)

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
POST = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r-1"}


class Gateway:
    """One stream to a picker."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, message: ProcessingRequest) -> None:
        await self.call.write(message.SerializeToString())

    async def headers(
        self,
        headers: Mapping[str, str] = POST,
        end: bool = False,
        *,
        modes: tuple[int, int] | None = (DUPLEX, DUPLEX),
    ) -> None:
        await self.send(request_headers(headers, end, modes=modes))

    async def body(self, data: bytes, end: bool = True) -> None:
        message = ProcessingRequest()
        message.request_body.body = data
        message.request_body.end_of_stream = end
        await self.send(message)

    async def respond(self, headers: Mapping[str, str], end: bool = False) -> None:
        message = ProcessingRequest()
        fill(message.response_headers, headers, end)
        await self.send(message)

    async def response_body(self, data: bytes, end: bool) -> None:
        message = ProcessingRequest()
        message.response_body.body = data
        message.response_body.end_of_stream = end
        await self.send(message)

    async def read(self) -> ProcessingResponse:
        data = await self.call.read()
        assert data is not grpc.aio.EOF, "the picker ended the stream"
        return ProcessingResponse.FromString(data)

    async def ended(self) -> grpc.StatusCode:
        """Wait until the picker has ended the stream."""
        with suppress(grpc.aio.AioRpcError):
            assert await self.call.read() is grpc.aio.EOF
        return await self.call.code()


def fill(part: Any, headers: Mapping[str, str], end: bool) -> None:
    for name, value in headers.items():
        part.headers.headers.add(key=name, raw_value=value.encode())
    part.end_of_stream = end


def request_headers(
    headers: Mapping[str, str],
    end: bool = False,
    *,
    modes: tuple[int, int] | None = (DUPLEX, DUPLEX),
) -> ProcessingRequest:
    message = ProcessingRequest()
    fill(message.request_headers, headers, end)
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = (
            modes
        )
    return message


def set_headers(mutation: Any) -> dict[str, str]:
    """The headers that an answer sets, all of them by their raw value, all overwritten."""
    assert all(not option.header.value for option in mutation.set_headers)
    assert all(option.append_action == 2 for option in mutation.set_headers)
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def destination(response: ProcessingResponse, part: str = "request_headers") -> str:
    """The endpoint in an answer: header and metadata say the same."""
    header = set_headers(getattr(response, part).response.header_mutation)[
        "x-gateway-destination-endpoint"
    ]
    assert response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == header
    return header


@asynccontextmanager
async def channel_to(port: int, **options: int) -> AsyncIterator[grpc.aio.Channel]:
    pairs = [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=pairs) as channel:
        yield channel


def stream(channel: grpc.aio.Channel, **metadata: str) -> Gateway:
    """Underscores in the names of metadata stand for dashes."""
    pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return Gateway(channel.stream_stream(PATH)(metadata=pairs))
