from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import msgspec
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.struct_pb2 import ListValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker import server
from picker.config import Config, Duration, Listen, Size
from picker.director import Outcome
from picker.health import Health, HealthServer
from picker.refusal import Refusal
from picker.replies import BodyMode
from picker.server import ExtProcServer
from tests.picker import own_scorer
from tests.picker.core import Core
from tests.picker.ext_proc import (
    DUPLEX,
    POST,
    Gateway,
    channel_to,
    destination,
    request_headers,
    set_headers,
    stream,
)
from tests.picker.recording import RecordingDirector
from tests.picker.waiting import until

BODY = b'{"model":"m","prompt":"hello"}'
LISTEN = Listen(grpc=0, health=0)
OK = {":status": "200", "content-type": "application/json"}


class Picker:
    """A server before a recording director."""

    def __init__(self, **settings: Any) -> None:
        self.director = RecordingDirector()
        self.config = Config(listen=LISTEN, **settings)
        self.server = ExtProcServer(self.director, self.config)  # type: ignore[arg-type]
        self.port = 0

    async def ended(self, count: int = 1) -> list[Outcome | None]:
        """The outcomes, once so many requests are over and no stream is left."""
        async with asyncio.timeout(60):
            while len(self.director.ends) < count or self.server.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return [pick.outcome for pick in self.director.ends]


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Picker]:
    picker = Picker(**settings)
    picker.port = await picker.server.start()
    try:
        yield picker
    finally:
        await picker.server.stop()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    async with running(max_body=Size(100_000)) as picker:
        yield picker


@pytest.fixture
async def gateway(picker: Picker) -> AsyncIterator[Gateway]:
    async with channel_to(picker.port) as channel:
        yield stream(channel)


async def test_a_request_and_its_response_in_full_duplex(picker: Picker, gateway: Gateway) -> None:
    body = BODY[:-1] + b" " * 70_000 + b"}"
    await gateway.headers(POST | {"x-warmpath-policy": "mine"})
    await gateway.body(body[:20], end=False)
    await gateway.body(body[20:], end=False)
    await gateway.body(b"")
    answer = await gateway.read()
    assert destination(answer) == "192.0.2.1:8000,192.0.2.2:8000"
    mutation = answer.request_headers.response.header_mutation
    assert set_headers(mutation).keys() == {"x-gateway-destination-endpoint"}
    assert "x-prefiller-host-port" in mutation.remove_headers
    assert "x-warmpath-policy" in mutation.remove_headers
    assert not answer.request_headers.response.clear_route_cache
    pieces = []
    while not pieces or not pieces[-1].end_of_stream:
        answer = await gateway.read()
        pieces.append(answer.request_body.response.body_mutation.streamed_response)
    assert [len(piece.body) for piece in pieces] == [62_000, len(body) - 62_000]
    assert b"".join(piece.body for piece in pieces) == body
    (request,) = picker.director.requests
    assert request.body == body

    await gateway.respond(OK)
    answer = await gateway.read()
    assert answer.SerializeToString() == b"\x12\x00"  # response_headers: {}
    await gateway.response_body(b'{"usage":{"prompt_tokens":7,"completion_tokens":3}}', False)
    answer = await gateway.read()
    streamed = answer.response_body.response.body_mutation.streamed_response
    assert streamed.body.startswith(b'{"usage"')
    assert not streamed.end_of_stream
    await gateway.response_body(b"", True)
    assert (await gateway.read()).response_body.response.body_mutation.streamed_response == (
        type(streamed)(end_of_stream=True)
    )
    assert await gateway.ended() is grpc.StatusCode.OK
    assert await picker.ended() == [Outcome.COMPLETED]
    usage = picker.director.picks[0].usage
    assert usage is not None
    assert usage.completion_tokens == 3


async def test_a_buffered_request_is_steered_by_the_bodys_answer(gateway: Gateway) -> None:
    headers = {":method": "POST", ":path": "/v1/completions"}
    await gateway.headers(headers, modes=(BodyMode.BUFFERED, BodyMode.NONE))
    assert (await gateway.read()).SerializeToString() == b"\x0a\x00"
    await gateway.body(BODY)
    answer = await gateway.read()
    assert destination(answer, "request_body") == "192.0.2.1:8000,192.0.2.2:8000"
    common = answer.request_body.response
    assert not common.HasField("body_mutation")
    assert set_headers(common.header_mutation)["x-request-id"]


async def test_a_request_of_headers_alone(gateway: Gateway) -> None:
    await gateway.headers({":method": "GET", ":path": "/v1/models"}, True)
    assert destination(await gateway.read())


async def test_response_bodies_are_turned_off_when_nobody_reads_them() -> None:
    async with running(usage=False) as picker, channel_to(picker.port) as channel:
        gateway = stream(channel)
        await gateway.headers(modes=(BodyMode.BUFFERED, BodyMode.STREAMED))
        override = (await gateway.read()).mode_override
        assert override.request_body_mode == BodyMode.BUFFERED
        assert override.response_body_mode == BodyMode.NONE
        assert override.response_trailer_mode == 1  # SEND: the stream lasts as the response does
        await gateway.body(BODY)
        await gateway.read()
        await gateway.respond(OK)
        await gateway.read()
        assert picker.director.ends == []
        await gateway.call.done_writing()
        assert await gateway.ended() is grpc.StatusCode.OK
        assert await picker.ended() == [Outcome.COMPLETED]


async def test_trailers_are_answered(gateway: Gateway) -> None:
    await gateway.headers()
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    await gateway.send(message)
    assert destination(await gateway.read())
    assert (await gateway.read()).SerializeToString() == b"\x2a\x00"
    await gateway.respond(OK)
    await gateway.read()
    message.response_trailers.SetInParent()
    await gateway.send(message)
    assert (await gateway.read()).SerializeToString() == b"\x32\x00"
    assert await gateway.ended() is grpc.StatusCode.OK


async def test_retries_are_asked_for_where_the_gateway_says_so(picker: Picker) -> None:
    """But never with trailers: see Exchange."""
    async with channel_to(picker.port) as channel:
        for metadata in ({}, {"x_warmpath_set_retry_on": "connect-failure"}):
            for trailers in (False, True):
                gateway = stream(channel, **metadata)
                await gateway.headers()
                await gateway.body(BODY, end=not trailers)
                if trailers:
                    message = ProcessingRequest()
                    message.request_trailers.SetInParent()
                    await gateway.send(message)
                answer = await gateway.read()
                assert destination(answer)
                headers = set_headers(answer.request_headers.response.header_mutation)
                told = "connect-failure" if metadata and not trailers else None
                assert headers.get("x-envoy-retry-on") == told


async def test_messages_that_are_not_known_are_passed_over(gateway: Gateway) -> None:
    await gateway.send(ProcessingRequest())
    await gateway.call.write(b"\xfa\x7f\x03abc")  # field 2047, from the future
    await gateway.headers({":method": "GET", ":path": "/"}, True)
    assert destination(await gateway.read())


async def test_bytes_that_are_no_message_end_their_stream_only(picker: Picker) -> None:
    async with channel_to(picker.port) as channel:
        bad, good = stream(channel), stream(channel)
        await bad.call.write(b"\xff\xff\xff")
        assert await bad.ended() is grpc.StatusCode.INVALID_ARGUMENT
        await good.headers(POST, True)
        assert destination(await good.read())


# Hints


async def with_hint(gateway: Gateway, value: Any) -> None:
    message = request_headers(POST, True)
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    field = hint.fields["x-gateway-destination-endpoint-subset"]
    match value:
        case list():
            field.list_value.CopyFrom(ListValue())
            field.list_value.extend(value)
        case str():
            field.string_value = value
        case bool():
            field.bool_value = value
        case dict():
            field.struct_value.update(value)
        case None:
            field.null_value = 0
    await gateway.send(message)
    await gateway.read()


@pytest.mark.parametrize(
    ("value", "subset"),
    [
        (["192.0.2.1:8000", "192.0.2.2"], ("192.0.2.1:8000", "192.0.2.2")),
        (["192.0.2.1:8000, 192.0.2.2:8000", " "], ("192.0.2.1:8000", "192.0.2.2:8000")),
        ("192.0.2.1:8000, [2001:db8::1]:80,", ("192.0.2.1:8000", "[2001:db8::1]:80")),
        ([], ()),
        ([1, {"a": "b"}], ()),
        ("", ()),
        (" , ", ()),
        (True, ()),
        (None, ()),
        ({"192.0.2.1:8000": True}, ()),
    ],
)
async def test_the_subset_hint(
    picker: Picker, gateway: Gateway, value: Any, subset: tuple[str, ...]
) -> None:
    await with_hint(gateway, value)
    assert picker.director.requests[0].subset == subset


async def test_other_metadata_is_no_hint(picker: Picker, gateway: Gateway) -> None:
    message = request_headers(POST, True)
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"other": "x"})
    message.metadata_context.filter_metadata["envoy.lb"].update({"x-y": "x"})
    await gateway.send(message)
    await gateway.read()
    assert picker.director.requests[0].subset is None


async def answered_by(gateway: Gateway, metadata: str | None, attribute: str | None) -> None:
    await gateway.headers(POST, True)
    await gateway.read()
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", value="200")
    if metadata is not None:
        served = message.metadata_context.filter_metadata["envoy.lb"]
        served.update({"x-gateway-destination-endpoint-served": metadata})
    if attribute is not None:
        attributes = message.attributes["envoy.filters.http.ext_proc"]
        attributes.update({"upstream.address": attribute})
    await gateway.send(message)
    await gateway.read()


@pytest.mark.parametrize(
    ("metadata", "attribute", "moves"),
    [
        ("192.0.2.2:8000", "192.0.2.1:8000", ["192.0.2.2:8000"]),
        (None, "192.0.2.2:8000", ["192.0.2.2:8000"]),
        ("", "192.0.2.2:8000", ["192.0.2.2:8000"]),
        (None, "192.0.2.1:8000", []),
        (None, None, []),
        (None, "", []),
    ],
)
async def test_the_endpoint_that_served(
    picker: Picker, gateway: Gateway, metadata: str, attribute: str, moves: list[str]
) -> None:
    await answered_by(gateway, metadata, attribute)
    assert picker.director.moves == moves
    assert picker.director.picks[0].status == 200


async def test_headers_in_either_field_repeated_and_in_any_bytes(
    picker: Picker, gateway: Gateway
) -> None:
    message = request_headers(POST, True)
    headers = message.request_headers.headers.headers
    headers.add(key="X-A", raw_value=b"1", value="never")
    headers.add(key="x-a", value="2")
    headers.add(key="x-b", raw_value=b"\xff\x80")
    await gateway.send(message)
    await gateway.read()
    told = picker.director.requests[0].headers
    assert told["x-a"] == "1,2"
    assert told["x-b"] == "\N{REPLACEMENT CHARACTER}" * 2


# Refusals


async def test_a_pick_that_waits_holds_up_nobody_else(picker: Picker, gateway: Gateway) -> None:
    hold = picker.director.hold = asyncio.Event()
    await gateway.headers(POST)
    await gateway.body(BODY)
    await until(lambda: picker.director.waiting == 1)
    picker.director.hold = None
    async with channel_to(picker.port) as channel:
        other = stream(channel)
        await other.headers(POST)
        await other.body(BODY)
        assert destination(await other.read())
    hold.set()
    assert destination(await gateway.read()) == "192.0.2.1:8000,192.0.2.2:8000"
    answer = await gateway.read()
    assert answer.request_body.response.body_mutation.streamed_response.body == BODY


async def test_a_refusal_after_waiting_is_an_answer(picker: Picker, gateway: Gateway) -> None:
    picker.director.hold = asyncio.Event()
    await gateway.headers(POST)
    await gateway.body(BODY)
    await until(lambda: picker.director.waiting == 1)
    picker.director.refusal = Refusal(429, "busy", "come again", retry_after=3)
    picker.director.hold.set()
    assert (await gateway.read()).immediate_response.status.code == 429


async def test_who_leaves_while_its_pick_waits_is_not_picked_for(picker: Picker) -> None:
    hold = picker.director.hold = asyncio.Event()
    async with channel_to(picker.port) as channel:
        gateway = stream(channel)
        await gateway.headers(POST)
        await gateway.body(BODY)
        await until(lambda: picker.director.waiting == 1)
    await until(lambda: picker.director.waiting == 0)
    hold.set()
    assert await picker.ended(0) == []
    assert picker.director.picks == []


async def test_a_refusal_is_an_answer_of_its_own(picker: Picker, gateway: Gateway) -> None:
    picker.director.refusal = Refusal(503, "no_endpoints", "none", retry_after=5)
    await gateway.headers()
    await gateway.body(BODY)
    answer = (await gateway.read()).immediate_response
    assert answer.status.code == 503
    assert msgspec.json.decode(answer.body)["error"]["code"] == "no_endpoints"
    assert set_headers(answer.headers) == {
        "content-type": "application/json",
        "x-warmpath-refused": "no_endpoints",
        "retry-after": "5",
    }
    assert await gateway.ended() is grpc.StatusCode.OK


async def test_a_body_that_is_not_understood_is_refused(picker: Picker, gateway: Gateway) -> None:
    await gateway.headers(POST | {"content-type": "application/json"})
    await gateway.body(b"!")
    assert (await gateway.read()).immediate_response.status.code == 400
    assert picker.director.requests == []


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("mode", [DUPLEX, BodyMode.BUFFERED])
async def test_a_body_over_the_limit_is_413(gateway: Gateway, mode: int, told: bool) -> None:
    length = {"content-length": "100001"} if told else {}
    await gateway.headers(POST | length, modes=(mode, mode))
    if not told:
        if mode == BodyMode.BUFFERED:
            await gateway.read()
        await gateway.body(bytes(100_001), end=mode == BodyMode.BUFFERED)
    assert (await gateway.read()).immediate_response.status.code == 413
    assert await gateway.ended() is grpc.StatusCode.OK


@pytest.mark.parametrize("mode", [DUPLEX, BodyMode.BUFFERED])
async def test_a_fault_of_our_own_lets_the_gateway_fail_open_or_closed(
    mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream ends with an error; a stream that ended well would let the request pass."""
    core = Core(["192.0.2.1:8000"], scorers={f"{own_scorer.__name__}:Failing": 1})
    server = ExtProcServer(core.director, Config(listen=LISTEN))
    async with channel_to(await server.start()) as channel:
        for _ in range(3):
            gateway = stream(channel)
            await gateway.headers(modes=(mode, mode))
            if mode == BodyMode.BUFFERED:
                await gateway.read()
            await gateway.body(BODY)
            assert await gateway.ended() is grpc.StatusCode.INTERNAL
    await server.stop()
    assert "ZeroDivisionError" in caplog.text
    assert caplog.text.count("Traceback") == 1
    assert core.inflight() == [(0, 0)]


async def test_the_longest_body_that_can_be_allowed() -> None:
    async with running(max_body=Size(1 << 30)) as picker, channel_to(picker.port) as channel:
        gateway = stream(channel)
        await gateway.headers(modes=(BodyMode.BUFFERED, BodyMode.BUFFERED))
        await gateway.read()
        body = b'{"prompt":"%b"}' % (b"x" * 5_000_000)  # gRPC's own limit is less
        await gateway.body(body)
        assert destination(await gateway.read(), "request_body")


async def test_unfinished_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picker.server.MAX_HELD_BODIES", 2)
    body = BODY.ljust(1000)
    async with running(max_body=Size(1000)) as picker, channel_to(picker.port) as channel:
        gateways = [stream(channel) for _ in range(3)]
        reads = {asyncio.create_task(gateway.read()): gateway for gateway in gateways}
        for gateway in gateways:
            await gateway.headers()
            await gateway.body(body, end=False)
        (refused,), waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        answer = refused.result().immediate_response
        assert answer.status.code == 429
        assert set_headers(answer.headers)["retry-after"] == "1"
        assert len(picker.director.refusals) == 1
        for read in waiting:
            await reads[read].body(b"")  # its end sets it free
            assert destination(await read)
        again = stream(channel)
        await again.headers()
        await again.body(body)
        assert destination(await again.read())


async def test_streams_are_bounded(picker: Picker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picker.server.MAX_STREAMS", 1)
    async with channel_to(picker.port) as channel:
        first = stream(channel)
        await first.headers(POST, True)
        await first.read()
        second = stream(channel)
        await second.headers()
        answer = (await second.read()).immediate_response
        assert answer.status.code == 429
        assert set_headers(answer.headers)["retry-after"] == "1"
        assert await second.ended() is grpc.StatusCode.OK
        await first.respond(OK, True)
        await first.read()
        await picker.ended()
        third = stream(channel)
        await third.headers(POST, True)
        assert destination(await third.read())


# Endings


async def test_whatever_ends_a_stream_is_noticed_once(picker: Picker) -> None:
    async with channel_to(picker.port) as channel:
        for end in ("cancel", "done", "headers", "nothing"):
            gateway = stream(channel)
            await gateway.headers(POST, True)
            await gateway.read()
            if end == "headers":
                await gateway.respond(OK)
                await gateway.read()
                await gateway.response_body(b"data: 1\n\n", False)
                await gateway.read()
            if end == "done":
                await gateway.call.done_writing()
                await gateway.ended()
            elif end != "nothing":
                gateway.call.cancel()
    assert await picker.ended(4) == [Outcome.ABORTED] * 4


async def test_clients_that_leave_while_written_to_leave_no_trace_in_the_log(
    picker: Picker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with channel_to(picker.port) as channel:
        for wait in range(60):
            gateway = stream(channel)
            await gateway.headers(POST, True)
            await gateway.read()
            await gateway.respond(OK)
            for _ in range(20):
                await gateway.response_body(bytes(90_000), False)
            if wait % 3 == 0:
                await gateway.read()
            gateway.call.cancel()
    assert await picker.ended(60) == [Outcome.ABORTED] * 60
    assert caplog.text == ""


# The server


async def test_draining_finishes_what_is_in_flight(picker: Picker) -> None:
    async with channel_to(picker.port) as channel:
        gateway = stream(channel)
        await gateway.headers(POST, True)
        await gateway.read()
        draining = asyncio.create_task(picker.server.drain())
        await until_closed(picker.port)
        async with channel_to(picker.port, use_local_subchannel_pool=1) as other:
            assert await stream(other).ended() is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        await gateway.respond(OK)
        await gateway.read()
        await gateway.response_body(b"{}", True)
        await gateway.read()
        assert await gateway.ended() is grpc.StatusCode.OK
        async with asyncio.timeout(60):
            await draining
    assert set(await picker.ended()) == {Outcome.COMPLETED}


async def until_closed(port: int) -> None:
    """Wait until nobody listens."""
    async with asyncio.timeout(60):
        with suppress(ConnectionRefusedError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()


async def test_a_drain_waits_until_its_client_has_gone_elsewhere(
    picker: Picker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that come while gRPC says GOAWAY would hang."""
    monkeypatch.setattr(server, "QUIET_SECONDS", 2.0)  # on a busy machine
    async with channel_to(picker.port) as channel:
        for number in range(200):
            late = stream(channel)
            await late.headers(POST, True)
            async with asyncio.timeout(60):
                assert destination(await late.read())
            await late.respond(OK, True)
            await late.read()
            if number == 0:
                draining = asyncio.create_task(picker.server.drain())
        async with asyncio.timeout(60):
            await draining
    assert len(await picker.ended(200)) == 200


async def test_a_drain_does_not_wait_for_ever_for_a_client_that_comes_on() -> None:
    async with running(drain=Duration(0.4)) as picker, channel_to(picker.port) as channel:
        draining = asyncio.create_task(picker.server.drain())
        async with asyncio.timeout(60):
            while not draining.done():
                late = stream(channel)
                with suppress(grpc.aio.AioRpcError):
                    await late.headers(POST, True)
                    await late.read()
                    await late.respond(OK, True)
                    await late.read()
        await draining


async def test_draining_waits_for_no_other_service_and_not_for_ever() -> None:
    picker = Picker(drain=Duration(0.2))
    health = Health()
    health.add_to(picker.server.server)
    port = await picker.server.start()
    async with channel_to(port) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        gateway = stream(channel)
        await gateway.headers(POST, True)
        await gateway.read()
        async with asyncio.timeout(60):
            await picker.server.drain()
        assert await picker.ended() == [Outcome.ABORTED]
        watch.cancel()


async def test_stopping_ends_streams_quietly(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as picker, channel_to(picker.port) as channel:
        gateway = stream(channel)
        await gateway.headers(POST, True)
        await gateway.read()
        await picker.server.stop()
        assert await gateway.ended() is grpc.StatusCode.UNAVAILABLE
        assert await picker.ended() == [Outcome.ABORTED]
    assert caplog.text == ""


async def test_a_port_in_use_is_told(picker: Picker) -> None:
    other = Picker()
    other.config = Config(listen=Listen(grpc=picker.port))
    second = ExtProcServer(other.director, other.config)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=str(picker.port)):
        await second.start()
    with pytest.raises(OSError, match=str(picker.port)):
        await HealthServer(Health(), "127.0.0.1", picker.port).start()


# Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


@pytest.fixture
async def health() -> AsyncIterator[tuple[Health, Any]]:
    health = Health()
    server = HealthServer(health, "127.0.0.1", 0)
    async with channel_to(await server.start()) as channel:
        yield health, health_pb2_grpc.HealthStub(channel)
    await server.stop()


@pytest.mark.parametrize("ready", [True, False])
async def test_health_by_name(health: tuple[Health, Any], ready: bool) -> None:
    state, stub = health
    state.set_ready(not ready)
    state.set_ready(ready)
    expected = SERVING if ready else NOT_SERVING
    names = {"": expected, "readiness": expected, EXT_PROC: expected}
    names |= {"liveness": SERVING, "inference-extension": SERVING}
    for name, status in names.items():
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == status
    listed = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert {name: each.status for name, each in listed.items()} == names
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stub.Check(health_pb2.HealthCheckRequest(service="x"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_nothing_is_ready_before_it_is_said(health: tuple[Health, Any]) -> None:
    answer = await health[1].Check(health_pb2.HealthCheckRequest())
    assert answer.status == NOT_SERVING


async def test_watchers_are_told_of_changes(health: tuple[Health, Any]) -> None:
    state, stub = health
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == NOT_SERVING
    state.set_ready(True)
    assert (await watch.read()).status == SERVING
    state.set_ready(True)
    state.set_ready(False)
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()
