"""ext_proc's protobuf, and nothing else knows it: messages to events, replies to bytes.

Decoding is by upb, 1.5 µs a message. Replies that come again are serialised once. A chunk of a body
is its bytes between constant ones, so that a long body is copied once.

`clear_route_cache` is left off. The endpoint is read by the cluster's load balancer, after the
route is chosen, and no header that a route would match on is set here; choosing the route again
would cost time, and could send a request with one pool's endpoint into another pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from picker.config import Identity
from picker.exchange import Exchange
from picker.names import (
    DESTINATION,
    JWT_NAMESPACE,
    LB_NAMESPACE,
    OWNED_HEADERS,
    REQUEST_ID,
    RETRY_ON,
    SERVED,
    SUBSET,
    SUBSET_HINT,
)
from picker.refusal import Refusal
from picker.replies import (
    RESIZED,
    Await,
    BodyMode,
    Chunk,
    Message,
    Replace,
    Reply,
    Steer,
    Tell,
)

_REMOVED = tuple(name for name in OWNED_HEADERS if name != DESTINATION)  # which is overwritten


NOBODY = Identity()  # no claim is looked for


class Malformed(ValueError):
    """What came is no message of ext_proc's."""


# Messages in


def tell(exchange: Exchange, data: bytes, identity: Identity = NOBODY) -> Sequence[Reply]:
    """Hand a serialised ProcessingRequest to an exchange. An unknown kind of it gets no reply.

    Args:
        identity: which claim of a verified token names who asks.

    Raises:
        Malformed: it is something else.
    """
    try:
        message = ProcessingRequest.FromString(data)
    except DecodeError as error:
        raise Malformed("not a ProcessingRequest") from error
    if message.HasField("protocol_config"):  # in the first of a stream
        modes = message.protocol_config
        exchange.modes(body_mode(modes.request_body_mode), body_mode(modes.response_body_mode))
    match message.WhichOneof("request"):
        case "response_body":
            body = message.response_body
            return exchange.response_body(body.body, body.end_of_stream)
        case "request_body":
            body = message.request_body
            return exchange.request_body(body.body, body.end_of_stream)
        case "request_headers":
            part = message.request_headers
            headers = header_map(part.headers.headers)
            claim = jwt_claim(message, identity.payload, identity.claim) if identity.claim else None
            subset = subset_hint(message)
            return exchange.request_headers(headers, part.end_of_stream, subset, claim)
        case "response_headers":
            part = message.response_headers
            headers = header_map(part.headers.headers)
            return exchange.response_headers(headers, part.end_of_stream, served_by(message))
        case "request_trailers":
            return exchange.request_trailers()
        case "response_trailers":
            return exchange.response_trailers()
    return ()


def body_mode(number: int) -> BodyMode:
    """A mode of Envoy's; one that we do not know is taken for the nearest, full duplex."""
    return BodyMode(number) if number in _BODY_MODES else BodyMode.FULL_DUPLEX_STREAMED


_BODY_MODES = frozenset(BodyMode)


def header_map(headers: Iterable[Any]) -> dict[str, str]:
    """Names in lower case, values from `raw_value`, else `value`; repeated ones joined."""
    values: dict[str, str] = {}
    for header in headers:
        raw = header.raw_value
        value = raw.decode("utf-8", "replace") if raw else header.value
        name = header.key.lower()
        values[name] = f"{values[name]},{value}" if name in values else value
    return values


def subset_hint(message: ProcessingRequest) -> tuple[str, ...] | None:
    """The endpoints that the gateway allows: none of them when the hint is malformed."""
    value = _metadata(message, SUBSET_HINT, SUBSET)
    if value is None:
        return None
    match value.WhichOneof("kind"):
        case "list_value":
            words = [each.string_value for each in value.list_value.values]
        case _:
            words = [value.string_value]  # empty when it is something else
    endpoints = (endpoint.strip() for word in words for endpoint in word.split(","))
    return tuple(endpoint for endpoint in endpoints if endpoint)


def served_by(message: ProcessingRequest) -> str | None:
    """The endpoint that a response comes from: told by the gateway, else by Envoy's attributes."""
    value = _metadata(message, LB_NAMESPACE, SERVED)
    if value is not None and value.string_value:
        return str(value.string_value).strip()
    for attributes in message.attributes.values():
        if "upstream.address" in attributes.fields:
            return str(attributes.fields["upstream.address"].string_value) or None
    return None


def jwt_claim(message: ProcessingRequest, payload: str, claim: str) -> str | None:
    """A claim of the token that Envoy's jwt_authn has verified; None without one.

    Args:
        payload: jwt_authn's `payload_in_metadata`.
        claim: its name; where there is none of it, dots lead into objects.
    """
    value = _metadata(message, JWT_NAMESPACE, payload)
    if value is None:
        return None
    names = [claim] if claim in value.struct_value.fields else claim.split(".")
    for name in names:
        if name not in value.struct_value.fields:
            return None
        value = value.struct_value.fields[name]
    match value.WhichOneof("kind"):
        case "string_value":
            return str(value.string_value)
        case "number_value" if value.number_value.is_integer():
            return str(int(value.number_value))
    return None


def _metadata(message: ProcessingRequest, namespace: str, key: str) -> Value | None:
    if not message.HasField("metadata_context"):
        return None
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata or key not in metadata[namespace].fields:
        return None
    return metadata[namespace].fields[key]


# Replies out

_OURS = ((), RESIZED)  # headers to remove that no client has named


def encode(reply: Reply) -> bytes:
    """A reply as a serialised ProcessingResponse."""
    match reply:
        case Message():
            return _PASS[reply]
        case Chunk(message, data, end):
            before, after = _around_chunk(message, len(data), end)
            return b"".join((before, data, after))
        case Steer():
            ours = reply.request_id is None and reply.body is None and reply.remove in _OURS
            return _known_steer(reply) if ours else _steer(reply)
        case Replace(message, data):
            return _replace(message, data)
        case Tell():
            return _tell(reply)
        case Await(responses_off):
            return _AWAIT[responses_off]
        case Refusal():
            return _immediate(reply)


def _common(response: ProcessingResponse, message: Message) -> CommonResponse:
    """The part of a response that answers a message of headers or body."""
    return getattr(response, message.name.lower()).response


def _pass(message: Message) -> bytes:
    response = ProcessingResponse()
    getattr(response, message.name.lower()).SetInParent()
    return bytes(response.SerializeToString())


@lru_cache(4096)
def _around_chunk(message: Message, length: int, end: bool) -> tuple[bytes, bytes]:
    """What stands before and after the bytes of a chunk of some length."""
    response = ProcessingResponse()
    streamed = _common(response, message).body_mutation.streamed_response
    streamed.body = bytes(length)
    streamed.end_of_stream = end
    whole = bytes(response.SerializeToString())
    after = _END_OF_STREAM if end else b""
    return whole[: len(whole) - length - len(after)], after


def _responses_off(response: ProcessingResponse, request_mode: BodyMode) -> None:
    """Ask for no response bodies. Trailers keep the stream open until the response ends."""
    override = response.mode_override
    override.request_body_mode = int(request_mode)
    override.response_body_mode = ProcessingMode.NONE
    override.response_trailer_mode = ProcessingMode.SEND


def _tell(reply: Tell) -> bytes:
    response = ProcessingResponse()
    mutation = _common(response, Message.RESPONSE_HEADERS).header_mutation
    for name, value in reply.headers:
        _set(mutation.set_headers, name, value)
    mutation.remove_headers.extend(reply.remove)
    return bytes(response.SerializeToString())


def _await(responses_off: BodyMode | None) -> bytes:
    response = ProcessingResponse()
    response.request_headers.SetInParent()
    if responses_off is not None:
        _responses_off(response, responses_off)
    return bytes(response.SerializeToString())


def _steer(reply: Steer) -> bytes:
    response = ProcessingResponse()
    mutation = _common(response, reply.message).header_mutation
    _set(mutation.set_headers, DESTINATION, reply.destination)
    if reply.request_id is not None:
        _set(mutation.set_headers, REQUEST_ID, reply.request_id)
    if reply.retry_on is not None:
        _set(mutation.set_headers, RETRY_ON, reply.retry_on)
    mutation.remove_headers.extend(_REMOVED)
    mutation.remove_headers.extend(reply.remove)
    if reply.body is not None:
        _set(mutation.set_headers, "content-length", str(len(reply.body)))
        _common(response, reply.message).body_mutation.body = reply.body
    lb = response.dynamic_metadata.fields[LB_NAMESPACE].struct_value
    lb.fields[DESTINATION].string_value = reply.destination
    if reply.responses_off is not None:
        _responses_off(response, reply.responses_off)
    return bytes(response.SerializeToString())


_known_steer = lru_cache(1024)(_steer)  # the same endpoints come again and again


def _replace(message: Message, data: bytes) -> bytes:
    response = ProcessingResponse()
    mutation = _common(response, message).body_mutation
    if data:
        mutation.body = data
    else:
        mutation.clear_body = True
    return bytes(response.SerializeToString())


def _immediate(refusal: Refusal) -> bytes:
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = int(refusal.status)
    immediate.body = refusal.body
    immediate.details = f"warmpath_{refusal.reason}"  # Envoy's RESPONSE_CODE_DETAILS
    for name, value in refusal.headers:
        _set(immediate.headers.set_headers, name, value)
    return bytes(response.SerializeToString())


def _set(headers: Any, name: str, value: str) -> None:
    """Overwrite a header: an unset action means "append" to some data planes."""
    option = headers.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
    option.header.key = name
    option.header.raw_value = value.encode()


_PASS = {message: _pass(message) for message in Message}
_AWAIT = {mode: _await(mode) for mode in (None, *BodyMode)}
_END_OF_STREAM = StreamedBodyResponse(end_of_stream=True).SerializeToString()
