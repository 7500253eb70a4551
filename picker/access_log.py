"""Envoy's access log: how picked requests of the lean profile go on and end.

Speaks envoy.service.accesslog.v3.AccessLogService. Envoy sends entries in batches, several times
while a request runs and once at its end. Of several pickers it tells one, which hands on what is
another's.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import grpc
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogCommon, HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from picker.director import Outcome
from picker.names import ACCESS_LOG, OWNER, STREAM, USAGE_NAMESPACE
from picker.tickets import Tickets
from picker.usage import Usage, read_usage

# Why Envoy answered itself what the picker refused, or what it was not asked about.
_NEVER_PICKED = frozenset(("ext_authz_denied", "direct_response", "request_payload_too_large"))


class Others(Protocol):
    """The other pickers; `replicas.news.News` in full."""

    @property
    def replica(self) -> int:
        """Our own number among them."""

    def hand(self, owner: int | None, entry: bytes) -> None:
        """Tell one of them of an entry; None: all."""


class AccessLogService:
    """Settles tickets by what Envoy tells about them."""

    def __init__(self, tickets: Tickets) -> None:
        self.others: Others | None = None
        self._tickets = tickets

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on a gRPC server that has not started yet."""
        handler = grpc.stream_unary_rpc_method_handler(self._stream, request_deserializer=_entries)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(ACCESS_LOG, {"StreamAccessLogs": handler}),)
        )

    async def _stream(self, _: Any, context: grpc.aio.ServicerContext) -> bytes:
        while (entries := await context.read()) is not grpc.aio.EOF:
            for entry in entries:
                self.settle(entry)
        return b""

    def settle(self, entry: HTTPAccessLogEntry) -> None:
        """One entry, of a request that goes on or has ended."""
        name = entry.request.request_headers.get(STREAM)
        if name is None:
            return
        if self.others is None:
            self._settle(name, entry)
            return
        name, _, told = name.partition(OWNER)
        owner = _replica(told)
        if owner is not None and owner != self.others.replica:
            self.others.hand(owner, entry.SerializeToString())
        elif not self._settle(name, entry) and owner is None:
            # Its client left before the pick was answered: whoever is asked yet has to know.
            self.others.hand(None, entry.SerializeToString())

    def handed(self, data: bytes) -> None:
        """An entry that another picker got."""
        with suppress(DecodeError):
            entry = HTTPAccessLogEntry.FromString(data)
            name = entry.request.request_headers.get(STREAM, "").partition(OWNER)[0]
            if name:
                self._settle(name, entry)

    def _settle(self, name: str, entry: HTTPAccessLogEntry) -> bool:
        """False: a request ended of which nothing is known here."""
        common, response = entry.common_properties, entry.response
        going_on = common.intermediate_log_entry
        pick = self._tickets.renew(name) if going_on else self._tickets.close(name)
        if pick is None:
            if going_on or response.response_code_details in _NEVER_PICKED:
                return True
            self._tickets.ended_early(name)
            return False
        status = response.response_code.value  # 0 before there is one
        # Without a byte from upstream, the answer is Envoy's own.
        heard = common.HasField("time_to_first_upstream_rx_byte")
        if status:
            pick.response_started(status, _address(common) if heard else None)
        told = common.metadata.filter_metadata
        found = told[USAGE_NAMESPACE].fields if USAGE_NAMESPACE in told else {}
        if heard and response.response_body_bytes:
            began = found["first"].number_value if "first" in found else None
            if began != 0:  # of a stream, only comments came yet
                pick.first_token(_first_token(common, began))
        if not going_on:
            after = max(0.0, _seconds(common.duration) - _seconds(common.time_to_last_rx_byte))
            pick.end(_outcome(status, common), _usage(found), after=after)
        return True


def _entries(message: bytes) -> list[HTTPAccessLogEntry]:
    """The entries of one message.

    Envoy copies `x-request-id` as the client sent it. One that is no UTF-8 makes its own entry
    unreadable, and must not take along those of others.
    """
    try:
        return list(StreamAccessLogsMessage.FromString(message).http_logs.log_entry)
    except DecodeError:
        pass
    entries = []
    for logs in _pieces(message, StreamAccessLogsMessage, "http_logs"):
        for entry in _pieces(logs, StreamAccessLogsMessage.HTTPAccessLogEntries, "log_entry"):
            with suppress(DecodeError):
                entries.append(HTTPAccessLogEntry.FromString(entry))
    return entries


def _pieces(data: bytes, kind: Any, field: str) -> list[bytes]:
    """The messages in one field of a message, unread."""
    number = kind.DESCRIPTOR.fields_by_name[field].number
    unread = UnknownFieldSet(Empty.FromString(data))
    return [each.data for each in unread if each.field_number == number]


def _replica(text: str) -> int | None:
    """A picker's number as it stands in names."""
    try:
        return int(text, 16) if 0 < len(text) <= 16 else None
    except ValueError:
        return None


def _outcome(status: int, common: AccessLogCommon) -> Outcome:
    if status >= 500:
        return Outcome.FAILED
    # Any flag tells of an end before its time: by the client, by the pod or by a timeout.
    if not status or (common.HasField("response_flags") and common.response_flags.ListFields()):
        return Outcome.ABORTED
    return Outcome.COMPLETED


def _address(common: AccessLogCommon) -> str | None:
    address = common.upstream_remote_address.socket_address
    if not address.address:
        return None
    host = f"[{address.address}]" if ":" in address.address else address.address
    return f"{host}:{address.port_value}"


def _first_token(common: AccessLogCommon, began: float | None) -> float:
    """Seconds from the end of the request to the first piece of the answer.

    `began` is when that came, in Unix milliseconds. Without it, the answer's headers have to do;
    servers that stream may send those long before.
    """
    if began is None:
        came = _seconds(common.time_to_first_upstream_rx_byte)
    else:
        start = common.start_time
        came = began / 1e3 - start.seconds - start.nanos / 1e9
    return max(0.0, came - _seconds(common.time_to_last_rx_byte))


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def _usage(found: Any) -> Usage | None:
    """Usage as the response told it last."""
    if "usage" not in found:
        return None
    return read_usage(found["usage"].string_value.encode())
