from __future__ import annotations

import tracemalloc

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    ProcessingRequest,
    ProcessingResponse,
)

from picker.messages import encode, jwt_claim
from picker.replies import Message, Replace, Steer
from tests.picker.ext_proc import destination, set_headers


def test_names_and_bodies_that_clients_make_up_are_not_kept() -> None:
    tracemalloc.start()
    for number in range(2000):
        name = f"x-warmpath-{number}".ljust(5000, "x")
        reply = Steer(Message.REQUEST_HEADERS, "192.0.2.1:8000", None, (name,))
        answer = ProcessingResponse.FromString(encode(reply))
        assert destination(answer) == "192.0.2.1:8000"
        assert name in answer.request_headers.response.header_mutation.remove_headers
        encode(Steer(Message.REQUEST_BODY, "192.0.2.1:8000", None, (), body=name.encode()))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


def verified(payload: dict[str, object]) -> ProcessingRequest:
    """A request whose token Envoy's jwt_authn has put into metadata."""
    message = ProcessingRequest()
    metadata = message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"]
    metadata.update({"jwt_payload": payload})
    return message


def test_claims_of_a_verified_token() -> None:
    message = verified(
        {"sub": "alice", "https://x.org/team": "red", "org": {"id": 42}, "roles": ["a"], "f": 1.5}
    )
    assert jwt_claim(message, "jwt_payload", "sub") == "alice"
    assert jwt_claim(message, "jwt_payload", "https://x.org/team") == "red"
    assert jwt_claim(message, "jwt_payload", "org.id") == "42"
    for claim in ("aud", "org", "org.name", "sub.x", "roles", "f", ""):
        assert jwt_claim(message, "jwt_payload", claim) is None
    assert jwt_claim(message, "other", "sub") is None
    assert jwt_claim(ProcessingRequest(), "jwt_payload", "sub") is None


def test_a_body_in_place_of_another_has_its_own_length() -> None:
    reply = Steer(Message.REQUEST_BODY, "192.0.2.1:8000", None, ("accept-encoding",), body=b"{}")
    answer = ProcessingResponse.FromString(encode(reply))
    assert destination(answer, "request_body") == "192.0.2.1:8000"
    response = answer.request_body.response
    assert response.body_mutation.body == b"{}"
    assert set_headers(response.header_mutation)["content-length"] == "2"
    assert "accept-encoding" in response.header_mutation.remove_headers


def test_a_piece_may_be_replaced_by_nothing() -> None:
    for data in (b"", b"x"):
        answer = ProcessingResponse.FromString(encode(Replace(Message.RESPONSE_BODY, data)))
        mutation = answer.response_body.response.body_mutation
        assert (mutation.body, mutation.clear_body) == (data, not data)
