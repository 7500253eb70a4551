from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from picker.access_log import AccessLogService
from picker.director import Outcome, Pick
from picker.names import ACCESS_LOG, STREAM
from picker.request import parse
from picker.tickets import MAX_ENDED, Tickets
from picker.usage import Usage
from tests.picker.recording import ENDPOINTS, RecordingDirector
from tests.picker.waiting import until

STARTED = 1_800_000_000


def entry(
    name: str = "a",
    *,
    status: int = 200,
    body: int = 100,
    served: str | None = ENDPOINTS[0],
    flags: tuple[str, ...] = (),
    going_on: bool = False,
    why: str = "via_upstream",
    **told: str | float,
) -> HTTPAccessLogEntry:
    """As Envoy tells of a request that came within 50 ms and was answered after 250 ms."""
    made = HTTPAccessLogEntry()
    made.request.request_headers[STREAM] = name
    made.response.response_code.value = status
    made.response.response_body_bytes = body
    made.response.response_code_details = why
    common = made.common_properties
    common.intermediate_log_entry = going_on
    common.start_time.seconds = STARTED
    common.time_to_last_rx_byte.nanos = 50_000_000
    common.duration.seconds = 3
    if served is not None:
        common.time_to_first_upstream_rx_byte.nanos = 250_000_000
        host, _, port = served.rpartition(":")
        common.upstream_remote_address.socket_address.address = host.strip("[]")
        common.upstream_remote_address.socket_address.port_value = int(port)
    for flag in flags:
        setattr(common.response_flags, flag, True)
    for key, value in told.items():
        field = common.metadata.filter_metadata["warmpath"].fields[key]
        if isinstance(value, str):
            field.string_value = value
        else:
            field.number_value = value
    return made


class Log:
    """A service, and picks that it settles."""

    def __init__(self) -> None:
        self.tickets = Tickets()
        self.director = RecordingDirector()
        self.service = AccessLogService(self.tickets)

    def picked(self, name: str = "a") -> Pick:
        pick = self.director.pick(parse("GET", "/", {}, b""))
        self.tickets.open(name, pick)
        return pick


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_complete_response(log: Log) -> None:
    pick = log.picked()
    usage = '{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}'
    log.service.settle(entry(usage=usage))
    assert (pick.status, pick.outcome) == (200, Outcome.COMPLETED)
    assert pick.usage == Usage(9, None, 2)
    assert pick.first_token_seconds == pytest.approx(0.2)
    assert pick.seconds == pytest.approx(2.95)  # by Envoy's clock: an entry may come late
    assert log.director.moves == []
    assert len(log.tickets) == 0


def test_the_first_piece_of_a_stream_counts_and_not_its_headers(log: Log) -> None:
    pick = log.picked()
    log.service.settle(entry(first=STARTED * 1000.0 + 1500))
    assert pick.first_token_seconds == pytest.approx(1.45)


def test_comments_before_the_first_event_are_no_token(log: Log) -> None:
    pick = log.picked()
    log.service.settle(entry(going_on=True, first=0))
    assert pick.first_token_seconds is None
    log.service.settle(entry(going_on=True, first=STARTED * 1000.0 + 1500))
    assert pick.first_token_seconds == pytest.approx(1.45)


def test_news_of_a_running_stream(log: Log) -> None:
    pick = log.picked()
    log.service.settle(entry(going_on=True, status=0, body=0, served=None))
    assert (pick.status, pick.first_token_seconds) == (None, None)
    log.service.settle(entry(going_on=True, body=0))
    assert (pick.status, pick.first_token_seconds) == (200, None)
    log.service.settle(entry(going_on=True))
    assert pick.first_token_seconds is not None
    assert (pick.outcome, len(log.tickets)) == (None, 1)
    log.service.settle(entry())
    assert pick.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("served", [ENDPOINTS[1], "[2001:db8::1]:8000"])
def test_who_serves_instead_is_told(log: Log, served: str) -> None:
    log.picked()
    log.service.settle(entry(served=served))
    assert log.director.moves == [served]


@pytest.mark.parametrize(
    ("status", "flags", "outcome"),
    [
        (200, (), Outcome.COMPLETED),
        (404, (), Outcome.COMPLETED),
        (500, (), Outcome.FAILED),
        (503, ("upstream_connection_termination",), Outcome.FAILED),
        (200, ("upstream_connection_termination",), Outcome.ABORTED),
        (200, ("upstream_remote_reset",), Outcome.ABORTED),
        (200, ("downstream_connection_termination",), Outcome.ABORTED),
        (200, ("downstream_remote_reset",), Outcome.ABORTED),
        (200, ("stream_idle_timeout",), Outcome.ABORTED),
        (200, ("duration_timeout",), Outcome.ABORTED),
        (0, ("downstream_connection_termination",), Outcome.ABORTED),
    ],
)
def test_how_it_ended(log: Log, status: int, flags: tuple[str, ...], outcome: Outcome) -> None:
    pick = log.picked()
    log.service.settle(entry(status=status, flags=flags))
    assert pick.outcome is outcome


def test_an_answer_of_envoy_itself_was_served_by_nobody(log: Log) -> None:
    pick = log.picked()
    failed = entry(status=503, served=None, flags=("upstream_connection_failure",))
    failed.common_properties.upstream_remote_address.socket_address.address = "192.0.2.9"
    log.service.settle(failed)
    assert (pick.status, pick.outcome) == (503, Outcome.FAILED)
    assert log.director.moves == []
    assert log.director.first_tokens == []


def test_entries_of_no_pick_of_ours_are_passed_over(log: Log) -> None:
    pick = log.picked()
    log.service.settle(HTTPAccessLogEntry())
    log.service.settle(entry("b"))
    log.service.settle(entry("b", going_on=True))
    assert pick.outcome is None
    log.service.settle(entry())
    log.service.settle(entry(status=500))
    assert log.director.ends == [pick]
    assert pick.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (400, "ext_authz_denied"),
        (503, "direct_response"),
        (413, "request_payload_too_large"),
    ],
)
def test_what_was_refused_takes_no_place_of_what_ended_early(
    log: Log, status: int, why: str
) -> None:
    log.service.settle(entry("early", status=0, served=None, why="downstream_remote_disconnect"))
    for number in range(MAX_ENDED):
        log.service.settle(entry(f"refused-{number}", status=status, served=None, why=why))
    assert log.picked("early").outcome is Outcome.ABORTED


@pytest.mark.parametrize("usage", ["", "{", '{"usage": 1}', '{"usage": {}}'])
def test_usage_that_is_none(log: Log, usage: str) -> None:
    pick = log.picked()
    log.service.settle(entry(usage=usage))
    assert (pick.outcome, pick.usage) == (Outcome.COMPLETED, None)


def test_an_error_has_no_usage(log: Log) -> None:
    pick = log.picked()
    log.service.settle(entry(status=404, usage='{"usage": {"prompt_tokens": 9}}'))
    assert (pick.outcome, pick.usage) == (Outcome.COMPLETED, None)


@pytest.fixture
async def channel(log: Log) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    log.service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def batch(*entries: HTTPAccessLogEntry) -> StreamAccessLogsMessage:
    message = StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return message


def stream(channel: grpc.aio.Channel) -> Any:
    return channel.stream_unary(
        f"/{ACCESS_LOG}/StreamAccessLogs",
        request_serializer=StreamAccessLogsMessage.SerializeToString,
    )()


async def test_batches_over_grpc(log: Log, channel: grpc.aio.Channel) -> None:
    picks = [log.picked(name) for name in "abc"]
    call = stream(channel)
    await call.write(StreamAccessLogsMessage(identifier={"log_name": "warmpath"}))
    await call.write(batch(entry("a"), entry("b", status=500), entry("c", going_on=True)))
    await call.done_writing()
    assert await call == b""
    assert [pick.outcome for pick in picks] == [Outcome.COMPLETED, Outcome.FAILED, None]


async def test_an_unreadable_entry_takes_no_other_along(
    log: Log, channel: grpc.aio.Channel
) -> None:
    """Envoy copies the client's x-request-id, whatever bytes it is made of."""
    picks = [log.picked(name) for name in "abc"]
    message = batch(entry("a"), entry("b"), entry("c"))
    message.http_logs.log_entry[1].request.request_id = "?" * 8
    broken = message.SerializeToString().replace(b"?" * 8, b"\xff" * 8)
    call = channel.stream_unary(f"/{ACCESS_LOG}/StreamAccessLogs")()
    await call.write(broken)
    await call.done_writing()
    assert await call == b""
    assert [pick.outcome for pick in picks] == [Outcome.COMPLETED, None, Outcome.COMPLETED]


async def test_an_envoy_that_comes_back_goes_on(log: Log, channel: grpc.aio.Channel) -> None:
    pick = log.picked()
    broken = stream(channel)
    await broken.write(batch(entry(going_on=True)))
    await until(lambda: pick.first_token_seconds is not None)
    broken.cancel()
    call = stream(channel)
    await call.write(batch(entry()))
    await call.done_writing()
    await call
    assert pick.outcome is Outcome.COMPLETED
