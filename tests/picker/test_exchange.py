from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.director import Outcome
from picker.exchange import Exchange
from picker.refusal import Refusal
from picker.replies import (
    MAX_CHUNK,
    Await,
    BodyMode,
    Chunk,
    Message,
    Replace,
    Reply,
    Steer,
    Tell,
)
from picker.splice import ModelRewrite, Splice, apply
from tests.picker.recording import RecordingDirector

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
POST = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r-1"}
OK = {":status": "200", "content-type": "application/json"}
SSE = {":status": "200", "content-type": "text/event-stream"}
USAGE = b'{"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'


class Routed(Exchange):
    """An exchange whose questions a director answers at once."""

    def __init__(self, director: RecordingDirector, **settings: Any) -> None:
        super().__init__(director.refused, **settings)
        self.director = director

    def request_headers(self, *told: Any) -> Sequence[Reply]:
        return self.answered(super().request_headers(*told))

    def request_body(self, *told: Any) -> Sequence[Reply]:
        return self.answered(super().request_body(*told))

    def request_trailers(self) -> Sequence[Reply]:
        return self.answered(super().request_trailers())

    def answered(self, replies: Sequence[Reply]) -> Sequence[Reply]:
        if self.asks is None:
            return replies
        assert replies == ()
        try:
            return self.routed(self.director.pick(self.asks))
        except Refusal as refusal:
            return self.refused(refusal)


class Talk:
    """An exchange and the director behind it."""

    def __init__(
        self,
        request: BodyMode | None = None,
        response: BodyMode = DUPLEX,
        *,
        max_body: int = 1_000_000,
        read_usage: bool = True,
        rewrites: bool = False,
    ) -> None:
        self.director = RecordingDirector()
        self.exchange = Routed(
            self.director, max_body=max_body, read_usage=read_usage, rewrites=rewrites
        )
        if request is not None:
            self.exchange.modes(request, response)

    def send(self, body: bytes = b"{}", headers: dict[str, str] = POST) -> Sequence[Reply]:
        """A whole request in full duplex."""
        before = self.exchange.request_headers(headers, False, None)
        return [*before, *self.exchange.request_body(body, True)]

    @property
    def outcome(self) -> Outcome | None:
        """How the one request ended; nothing that follows a pick was done twice."""
        assert len(self.director.ends) <= 1
        return self.director.ends[0].outcome if self.director.ends else None


def joined(replies: Sequence[Reply], message: Message) -> bytes:
    """The body in the chunks among some replies."""
    chunks = [each for each in replies if isinstance(each, Chunk) and each.message is message]
    assert all(len(chunk.data) <= MAX_CHUNK for chunk in chunks)
    assert not any(chunk.end for chunk in chunks[:-1])
    return b"".join(bytes(chunk.data) for chunk in chunks)


def pieces(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    """A body cut at some places, the same place twice for an empty piece."""
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[a:b] for a, b in pairwise(places)]


bodies = st.builds(
    lambda size, seed: (seed * (size // len(seed) + 1))[:size],
    st.one_of(st.integers(0, 300), st.integers(MAX_CHUNK - 2, 3 * MAX_CHUNK + 2)),
    st.binary(min_size=1, max_size=40),
)
cuts = st.lists(st.integers(0, 1 << 20), max_size=6)


@given(bodies, cuts, st.booleans(), bodies, cuts, st.booleans(), st.booleans(), st.booleans())
def test_full_duplex_forwards_every_byte_in_order(
    body: bytes,
    body_cuts: list[int],
    trailers: bool,
    answer: bytes,
    answer_cuts: list[int],
    answer_trailers: bool,
    empty_last: bool,
    tells_length: bool,
) -> None:
    talk = Talk(DUPLEX)
    exchange = talk.exchange
    sent = pieces(body, body_cuts) + [b""] * empty_last
    early = list(exchange.request_headers(POST, False, None))
    for number, piece in enumerate(sent):
        if number == len(sent) - 1 and not trailers:
            break
        early += exchange.request_body(piece, False)
    assert early == []  # before the end there is nothing to route
    replies = exchange.request_trailers() if trailers else exchange.request_body(sent[-1], True)

    (request,) = talk.director.requests
    assert request.body == body
    assert isinstance(replies[0], Steer)
    assert replies[0].message is Message.REQUEST_HEADERS
    rest = replies[1:]
    if trailers:
        assert rest[-1] is Message.REQUEST_TRAILERS
        rest = rest[:-1]
    assert all(isinstance(reply, Chunk) for reply in rest)
    assert joined(rest, Message.REQUEST_BODY) == body
    if rest:
        assert isinstance(rest[-1], Chunk)
        assert rest[-1].end is not trailers
    else:
        assert trailers
        assert not body

    told = OK | ({"content-length": str(len(answer))} if tells_length else {})
    assert exchange.response_headers(told, False, None) == [Message.RESPONSE_HEADERS]
    returned = pieces(answer, answer_cuts) + [b""] * empty_last
    out: list[Reply] = []
    for number, piece in enumerate(returned):
        assert talk.outcome is None
        end = number == len(returned) - 1 and not answer_trailers
        now = exchange.response_body(piece, end)
        if not tells_length:
            assert joined(now, Message.RESPONSE_BODY) == piece  # at once
        out += now
    if answer_trailers:
        assert not exchange.over
        *last, after = exchange.response_trailers()
        assert after is Message.RESPONSE_TRAILERS
        out += last
    else:
        assert isinstance(out[-1], Chunk)
        assert out[-1].end
    assert joined(out, Message.RESPONSE_BODY) == answer
    assert exchange.over
    assert talk.outcome is Outcome.COMPLETED
    assert len(talk.director.first_tokens) == (1 if answer else 0)
    exchange.closed()
    assert talk.outcome is Outcome.COMPLETED


EVENTS = (
    lambda exchange, data, flag: exchange.request_headers(POST, flag, None),
    lambda exchange, data, flag: exchange.request_body(data, flag),
    lambda exchange, data, flag: exchange.request_trailers(),
    lambda exchange, data, flag: exchange.response_headers(OK, flag, None),
    lambda exchange, data, flag: exchange.response_body(data, flag),
    lambda exchange, data, flag: exchange.response_trailers(),
)


@given(
    st.sampled_from(BodyMode),
    st.sampled_from(BodyMode),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.binary(max_size=30), st.booleans())),
)
def test_no_order_of_messages_breaks_it(
    request: BodyMode, response: BodyMode, read_usage: bool, events: list
) -> None:
    talk = Talk(request, response, max_body=50, read_usage=read_usage)
    for event, data, flag in events:
        event(talk.exchange, data, flag)
        if talk.exchange.over:
            break
    talk.exchange.closed()
    talk.exchange.closed()
    assert len(talk.director.requests) <= 1
    assert len(talk.director.ends) == len(talk.director.picks)
    assert talk.exchange.held == 0


@given(bodies, st.sampled_from([BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL]), st.booleans())
def test_a_buffered_body_is_routed_by_its_answer(
    body: bytes, mode: BodyMode, trailers: bool
) -> None:
    talk = Talk(mode, BodyMode.BUFFERED)
    headers = POST | {"content-length": str(len(body))}
    assert talk.exchange.request_headers(headers, False, None) == [Await(None)]
    assert talk.director.requests == []
    (steer,) = talk.exchange.request_body(body, not trailers)
    assert isinstance(steer, Steer)
    assert steer.message is Message.REQUEST_BODY
    assert talk.director.requests[0].body == body
    if trailers:
        assert talk.exchange.request_trailers() == [Message.REQUEST_TRAILERS]
    assert talk.exchange.response_headers(OK, False, None) == [Message.RESPONSE_HEADERS]
    assert talk.exchange.response_body(USAGE, not trailers) == [Message.RESPONSE_BODY]
    assert talk.outcome is Outcome.COMPLETED
    assert talk.director.picks[0].usage is not None
    if trailers:  # they follow a body without end of stream
        assert not talk.exchange.over
        assert talk.exchange.response_trailers() == [Message.RESPONSE_TRAILERS]
    assert talk.exchange.over


def test_a_body_that_the_gateway_cut_is_not_read() -> None:
    for headers in (POST, POST | {"content-length": "4000"}):
        talk = Talk(BodyMode.BUFFERED_PARTIAL)
        talk.exchange.request_headers(headers, False, None)
        (steer,) = talk.exchange.request_body(b'{"model":', False)
        assert isinstance(steer, Steer)
        assert talk.director.requests[0].body is None


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_where_only_the_headers_can_carry_the_endpoint_they_do(mode: BodyMode) -> None:
    talk = Talk(mode)
    (steer,) = talk.exchange.request_headers(POST, False, ("192.0.2.1",))
    assert isinstance(steer, Steer)
    assert steer.message is Message.REQUEST_HEADERS
    (request,) = talk.director.requests
    assert request.body is None
    assert request.subset == ("192.0.2.1",)
    assert talk.exchange.request_body(b"abc", False) == [Message.REQUEST_BODY]
    assert talk.exchange.request_body(b"", True) == [Message.REQUEST_BODY]
    assert talk.exchange.request_trailers() == [Message.REQUEST_TRAILERS]


@pytest.mark.parametrize("mode", [None, *BodyMode])
def test_a_request_of_headers_alone_gets_one_answer(mode: BodyMode | None) -> None:
    talk = Talk(mode)
    replies = talk.exchange.request_headers({":method": "GET", ":path": "/v1/models"}, True, None)
    (steer,) = replies
    assert isinstance(steer, Steer)
    assert steer.message is Message.REQUEST_HEADERS
    assert steer.destination == "192.0.2.1:8000,192.0.2.2:8000"
    (request,) = talk.director.requests
    assert (request.method, request.path, request.body) == ("GET", "/v1/models", b"")


def test_without_told_modes_bodies_are_in_full_duplex() -> None:
    talk = Talk()
    steer, chunk = talk.send(b"{}")
    assert isinstance(steer, Steer)
    assert chunk == Chunk(Message.REQUEST_BODY, b"{}", True)
    talk.exchange.response_headers(OK, False, None)
    assert talk.exchange.response_body(b"x", False) == [Chunk(Message.RESPONSE_BODY, b"x", False)]


def test_a_second_end_of_the_body_is_ignored() -> None:
    talk = Talk(DUPLEX)
    talk.send(b"{}")
    assert talk.exchange.request_body(b"tail", True) == ()
    assert talk.exchange.request_headers(POST, True, None) == ()
    assert len(talk.director.requests) == 1


def test_trailers_where_nothing_can_carry_the_endpoint_are_refused() -> None:
    talk = Talk(BodyMode.BUFFERED)
    talk.exchange.request_headers(POST, False, None)
    (refusal,) = talk.exchange.request_trailers()
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert talk.exchange.over


def test_bodies_whose_headers_were_not_sent_pass() -> None:
    talk = Talk(DUPLEX)
    assert talk.exchange.request_body(b"a", False) == [Chunk(Message.REQUEST_BODY, b"a", False)]
    assert talk.exchange.request_trailers() == [Message.REQUEST_TRAILERS]
    talk = Talk(BodyMode.BUFFERED)
    assert talk.exchange.request_body(b"a", True) == [Message.REQUEST_BODY]


# Headers


def test_the_request_id_is_set_where_it_is_missing_or_unfit() -> None:
    for headers, told in (
        (POST | {"x-request-id": "made-up-id"}, None),
        (POST | {"x-request-id": "not fit for logs"}, "made-up-id"),
        ({":method": "POST", ":path": "/"}, "made-up-id"),
        (POST | {"x-request-id": ""}, "made-up-id"),
    ):
        steer = Talk(DUPLEX).send(headers=headers)[0]
        assert isinstance(steer, Steer)
        assert steer.request_id == told


def test_headers_that_only_the_picker_may_set_are_removed() -> None:
    evil = {
        "x-gateway-destination-endpoint": "evil",
        "x-gateway-destination-endpoint-elsewhere": "evil",
        "x-warmpath-anything": "evil",
        "x-gateway-inference-objective": "mine",
    }
    steer = Talk(DUPLEX).send(headers=POST | evil)[0]
    assert isinstance(steer, Steer)
    assert steer.remove == ("x-gateway-destination-endpoint-elsewhere", "x-warmpath-anything")


# Limits and refusals


@pytest.mark.parametrize("mode", [None, *BodyMode])
@pytest.mark.parametrize("length", ["51", "9" * 5000])
def test_a_length_over_the_limit_is_refused_at_once(mode: BodyMode | None, length: str) -> None:
    talk = Talk(mode, max_body=50)
    (refusal,) = talk.exchange.request_headers(POST | {"content-length": length}, False, None)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413
    assert talk.exchange.over
    assert talk.director.requests == []
    assert talk.director.refusals == [refusal]


def test_a_body_over_the_limit_is_refused_with_the_byte_too_much() -> None:
    talk = Talk(DUPLEX, max_body=50)
    assert talk.exchange.request_headers(POST, False, None) == ()
    assert talk.exchange.request_body(bytes(50), False) == ()
    assert talk.exchange.held == 50
    (refusal,) = talk.exchange.request_body(b"x", False)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413
    assert talk.exchange.over
    assert talk.exchange.held == 0
    assert talk.director.requests == []

    talk = Talk(BodyMode.BUFFERED, max_body=50)
    talk.exchange.request_headers(POST, False, None)
    (refusal,) = talk.exchange.request_body(bytes(51), True)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413


def test_a_body_at_the_limit_passes() -> None:
    talk = Talk(DUPLEX, max_body=50)
    headers = POST | {"content-length": "50"}
    assert joined(talk.send(bytes(50), headers), Message.REQUEST_BODY) == bytes(50)


@pytest.mark.parametrize("mode", [DUPLEX, BodyMode.BUFFERED, BodyMode.NONE])
@pytest.mark.parametrize("method", ["FOO", "get", "", "PURGE"])
def test_an_unknown_method_is_refused(mode: BodyMode, method: str) -> None:
    talk = Talk(mode)
    replies = talk.send(headers=POST | {":method": method})
    (refusal,) = (reply for reply in replies if isinstance(reply, Refusal))
    assert refusal.status == 405
    assert talk.exchange.over
    assert talk.director.refusals == [refusal]
    assert talk.director.requests == []


@pytest.mark.parametrize("mode", [DUPLEX, BodyMode.BUFFERED, BodyMode.NONE])
def test_a_refusal_is_the_only_answer(mode: BodyMode) -> None:
    talk = Talk(mode)
    talk.director.refusal = Refusal(503, "no_endpoints", "none")
    replies = [reply for reply in talk.send() if not isinstance(reply, Await | Message)]
    assert replies == [talk.director.refusal]
    assert talk.exchange.over


# The response


def test_a_status_from_500_on_is_a_failure() -> None:
    for status, outcome in (("499", Outcome.COMPLETED), ("500", Outcome.FAILED)):
        talk = Talk(DUPLEX)
        talk.send()
        talk.exchange.response_headers({":status": status}, True, None)
        assert talk.exchange.over
        assert talk.outcome is outcome
        assert talk.director.picks[0].status == int(status)


def test_an_answer_of_the_gateways_own_is_no_usage() -> None:
    talk = Talk(DUPLEX)
    talk.send()
    told = b"upstream connect error or disconnect/reset before headers"
    headers = {":status": "503", "content-type": "text/plain"}
    talk.exchange.response_headers(headers, False, None)
    replies = talk.exchange.response_body(told, True)
    assert joined(replies, Message.RESPONSE_BODY) == told
    assert talk.outcome is Outcome.FAILED
    assert talk.director.picks[0].usage is None


def test_a_response_while_the_request_is_held_passes() -> None:
    talk = Talk(DUPLEX)
    talk.exchange.request_headers(POST, False, None)
    talk.exchange.request_body(b"half", False)
    assert talk.exchange.response_headers({":status": "408"}, False, None) == [
        Message.RESPONSE_HEADERS
    ]
    assert talk.exchange.response_body(b"late", True) == [
        Chunk(Message.RESPONSE_BODY, b"late", True)
    ]
    assert talk.exchange.over
    talk.exchange.closed()
    assert talk.director.requests == []


def test_the_last_byte_of_a_known_length_is_answered_with_the_end() -> None:
    headers = OK | {"content-length": "5"}
    for after, replies in (
        (lambda talk: talk.exchange.response_body(b"", True), [(b"lo", True)]),
        (lambda talk: talk.exchange.response_body(b"!", True), [(b"lo!", True)]),
        (lambda talk: talk.exchange.response_body(b"!", False), [(b"lo!", False)]),
        (lambda talk: talk.exchange.response_trailers(), [(b"lo", False), "trailers"]),
    ):
        talk = Talk(DUPLEX)
        talk.send()
        talk.exchange.response_headers(headers, False, None)
        assert talk.exchange.response_body(b"hel", False) == [
            Chunk(Message.RESPONSE_BODY, b"hel", False)
        ]
        assert talk.exchange.response_body(b"lo", False) == ()
        assert len(talk.director.first_tokens) == 1
        assert after(talk) == [
            Message.RESPONSE_TRAILERS
            if reply == "trailers"
            else Chunk(Message.RESPONSE_BODY, *reply)
            for reply in replies
        ]


def test_only_full_duplex_lets_the_last_byte_wait() -> None:
    talk = Talk(DUPLEX, BodyMode.STREAMED)
    talk.send()
    talk.exchange.response_headers(OK | {"content-length": "2"}, False, None)
    assert talk.exchange.response_body(b"{}", False) == [Message.RESPONSE_BODY]


def test_a_stream_without_a_seen_end_is_aborted_with_what_was_told() -> None:
    talk = Talk(DUPLEX)
    talk.send()
    talk.exchange.response_headers(SSE, False, None)
    talk.exchange.response_body(b"data: " + USAGE + b"\n\n", False)
    talk.exchange.closed()
    assert talk.outcome is Outcome.ABORTED
    usage = talk.director.picks[0].usage
    assert usage is not None
    assert usage.completion_tokens == 3


def test_a_stream_that_ends_before_the_response_is_aborted() -> None:
    for response in (DUPLEX, BodyMode.NONE):
        talk = Talk(DUPLEX, response)
        talk.send()
        talk.exchange.closed()
        assert talk.outcome is Outcome.ABORTED


@given(cuts)
def test_usage_is_read_at_any_cut(where: list[int]) -> None:
    talk = Talk(DUPLEX)
    talk.send()
    talk.exchange.response_headers(SSE, False, None)
    stream = b'data: {"choices":[]}\n\ndata: ' + USAGE + b"\n\ndata: [DONE]\n\n"
    for piece in pieces(stream, where):
        talk.exchange.response_body(piece, False)
    talk.exchange.response_body(b"", True)
    usage = talk.director.picks[0].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)


def test_compressed_and_unwanted_bodies_are_not_read() -> None:
    for talk, headers in (
        (Talk(DUPLEX), OK | {"content-encoding": "gzip"}),
        (Talk(DUPLEX, read_usage=False), OK),
    ):
        talk.send()
        talk.exchange.response_headers(headers, False, None)
        talk.exchange.response_body(USAGE, True)
        assert talk.outcome is Outcome.COMPLETED
        assert talk.director.picks[0].usage is None


@pytest.mark.parametrize(
    ("headers", "pieces", "before"),
    [
        (SSE, [b": wait\n\n", b": wait\n\n", b"event: x\ndata: 1\n\n", b"data: 2\n\n"], 2),
        (SSE, [b"data: 1\n\n"], 0),
        (SSE | {"content-encoding": "gzip"}, [b"\x1f\x8b"], 0),
        (OK, [b"{"], 0),
        (OK, [b"", b"{"], 1),
    ],
)
def test_the_first_event_is_the_first_token(
    headers: dict[str, str], pieces: list[bytes], before: int
) -> None:
    talk = Talk(DUPLEX)
    talk.send()
    talk.exchange.response_headers(headers, False, None)
    for number, piece in enumerate(pieces):
        talk.exchange.response_body(piece, False)
        assert len(talk.director.first_tokens) == (0 if number < before else 1)


def test_the_endpoint_that_served_is_told() -> None:
    talk = Talk(DUPLEX)
    talk.send()
    talk.exchange.response_headers(OK, False, "192.0.2.2:8000")
    assert talk.director.moves == ["192.0.2.2:8000"]


# Response bodies off


def overrides(talk: Talk) -> list[BodyMode | None]:
    replies = talk.exchange.request_headers(POST, False, None)
    return [reply.responses_off for reply in replies if isinstance(reply, Await | Steer)]


def test_response_bodies_are_turned_off_where_envoy_obeys() -> None:
    streamed, buffered = BodyMode.STREAMED, BodyMode.BUFFERED
    assert overrides(Talk(buffered, streamed, read_usage=False)) == [buffered]
    assert overrides(Talk(BodyMode.NONE, buffered, read_usage=False)) == [BodyMode.NONE]
    assert overrides(Talk(buffered, streamed, read_usage=True)) == [None]
    assert overrides(Talk(buffered, DUPLEX, read_usage=False)) == [None]
    assert overrides(Talk(buffered, BodyMode.NONE, read_usage=False)) == [None]
    steer = Talk(DUPLEX, streamed, read_usage=False).send()[0]
    assert isinstance(steer, Steer)
    assert steer.responses_off is None


@pytest.mark.parametrize("status", ["200", "503"])
@pytest.mark.parametrize("response", [BodyMode.NONE, BodyMode.STREAMED])
def test_an_end_that_is_not_shown_counts_by_the_status(status: str, response: BodyMode) -> None:
    talk = Talk(BodyMode.BUFFERED, response, read_usage=False)
    talk.exchange.request_headers(POST, False, None)
    talk.exchange.request_body(b"{}", True)
    talk.exchange.response_headers({":status": status}, False, None)
    assert talk.outcome is None  # it is in flight as long as the stream
    talk.exchange.closed()
    assert talk.outcome is (Outcome.COMPLETED if status == "200" else Outcome.FAILED)


def test_a_gateway_that_sends_bodies_all_the_same_shows_their_end() -> None:
    talk = Talk(BodyMode.BUFFERED, BodyMode.STREAMED, read_usage=False)
    talk.exchange.request_headers(POST, False, None)
    talk.exchange.request_body(b"{}", True)
    talk.exchange.response_headers(OK, False, None)
    assert talk.exchange.response_body(b"half", False) == [Message.RESPONSE_BODY]
    talk.exchange.closed()
    assert talk.outcome is Outcome.ABORTED


# Spliced bodies

ASKED = Splice(1, 0, b'"stream_options":{"include_usage":true},')
STREAMED = b'{"stream":true}'
SPLICED = apply([ASKED], STREAMED)
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
EXTRA = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def spliced(request: BodyMode, response: BodyMode = DUPLEX, *, read_usage: bool = True) -> Talk:
    talk = Talk(request, response, read_usage=read_usage)
    talk.director.splice = ASKED
    return talk


def answer(talk: Talk, *data: bytes, headers: dict[str, str] = SSE, trailers: bool = False) -> Any:
    """A response in pieces, the end with an empty one: the replies to its body."""
    talk.exchange.response_headers(headers, False, None)
    replies = [each for piece in data for each in talk.exchange.response_body(piece, False)]
    if trailers:
        *last, end = talk.exchange.response_trailers()
        assert end is Message.RESPONSE_TRAILERS
        return [*replies, *last]
    return [*replies, *talk.exchange.response_body(b"", True)]


@pytest.mark.parametrize("pad", [0, MAX_CHUNK - 20, 3 * MAX_CHUNK])
def test_full_duplex_sends_the_spliced_body_without_a_length(pad: int) -> None:
    talk = spliced(DUPLEX)
    body = STREAMED + b" " * pad
    steer, *chunks = talk.send(body, POST | {"content-length": str(len(body))})
    assert isinstance(steer, Steer)
    assert "content-length" in steer.remove
    assert "accept-encoding" in steer.remove  # its answer must be read
    assert steer.body is None
    assert joined(chunks, Message.REQUEST_BODY) == apply([ASKED], body)
    assert talk.director.picks[0].splice == ASKED


@pytest.mark.parametrize("room", [-1, 0])
def test_a_body_that_the_gateway_keeps_does_not_grow_over_the_limit(room: int) -> None:
    for mode in (DUPLEX, BodyMode.BUFFERED):
        talk = Talk(mode, max_body=len(SPLICED) + room)
        talk.director.splice = ASKED
        talk.send(STREAMED)
        fits = mode is DUPLEX or room == 0
        assert (talk.director.picks[0].splice is not None) is fits


def test_trailers_follow_the_spliced_body() -> None:
    talk = spliced(DUPLEX)
    talk.exchange.request_headers(POST, False, None)
    talk.exchange.request_body(STREAMED, False)
    _, chunk, trailers = talk.exchange.request_trailers()
    assert chunk == Chunk(Message.REQUEST_BODY, SPLICED, False)
    assert trailers is Message.REQUEST_TRAILERS


def test_a_buffered_body_is_replaced() -> None:
    talk = spliced(BodyMode.BUFFERED)
    _, steer = talk.send(STREAMED)
    assert isinstance(steer, Steer)
    assert steer.message is Message.REQUEST_BODY
    assert steer.body == SPLICED
    assert "content-length" not in steer.remove  # it is overwritten


@pytest.mark.parametrize("request_mode", BodyMode)
@pytest.mark.parametrize("response_mode", BodyMode)
@pytest.mark.parametrize("read_usage", [False, True])
def test_nobody_is_asked_where_the_answer_is_not_read(
    request_mode: BodyMode, response_mode: BodyMode, read_usage: bool
) -> None:
    talk = spliced(request_mode, response_mode, read_usage=read_usage)
    replies = talk.send(STREAMED)
    applied = (
        read_usage
        and request_mode in (DUPLEX, BodyMode.BUFFERED)
        and response_mode in (DUPLEX, BodyMode.STREAMED, BodyMode.BUFFERED)
    )
    assert (talk.director.picks[0].splice is not None) is applied
    bodies = [reply.body for reply in replies if isinstance(reply, Steer) and reply.body]
    bodies += [bytes(reply.data) for reply in replies if isinstance(reply, Chunk)]
    assert (SPLICED in bodies) is applied
    if not applied:
        data = TOKEN + EXTRA + DONE
        got = answer(talk, data)
        assert joined(got, Message.RESPONSE_BODY) in (b"", data)
        assert not any(isinstance(reply, Replace) for reply in got)


@given(cuts, st.booleans())
def test_the_extra_event_is_taken_out_at_any_cut(where: list[int], trailers: bool) -> None:
    stream = TOKEN + EXTRA + DONE
    talk = spliced(DUPLEX)
    talk.send(STREAMED)
    got = answer(talk, *pieces(stream, where), trailers=trailers)
    assert joined(got, Message.RESPONSE_BODY) == TOKEN + DONE
    assert talk.outcome is Outcome.COMPLETED
    usage = talk.director.picks[0].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)


@pytest.mark.parametrize("trailers", [False, True])
def test_an_unfinished_event_is_passed_at_the_end(trailers: bool) -> None:
    talk = spliced(DUPLEX)
    talk.send(STREAMED)
    got = answer(talk, TOKEN, b"data: [DO", b"NE]", trailers=trailers)
    assert len(got) == 2  # nothing is answered to what is held back
    assert joined(got, Message.RESPONSE_BODY) == TOKEN + b"data: [DONE]"


@given(cuts)
def test_each_piece_is_answered_outside_of_full_duplex(where: list[int]) -> None:
    talk = spliced(BodyMode.BUFFERED, BodyMode.STREAMED)
    talk.send(STREAMED)
    sent = [*pieces(TOKEN + EXTRA + DONE, where), b""]
    replies = answer(talk, *sent[:-1])
    assert len(replies) == len(sent)
    out = b""
    for piece, reply in zip(sent, replies, strict=True):
        assert reply is Message.RESPONSE_BODY or isinstance(reply, Replace)
        out += reply.data if isinstance(reply, Replace) else piece
    assert out == TOKEN + DONE


def test_a_buffered_answer_is_whole() -> None:
    talk = spliced(BodyMode.BUFFERED, BodyMode.BUFFERED)
    talk.send(STREAMED)
    talk.exchange.response_headers(SSE, False, None)
    replies = talk.exchange.response_body(TOKEN + EXTRA + DONE[:-2], False)  # trailers follow
    assert replies == [Replace(Message.RESPONSE_BODY, TOKEN + DONE[:-2])]


@pytest.mark.parametrize(
    "headers",
    [
        OK,
        SSE | {"content-length": str(len(EXTRA))},
        SSE | {":status": "400"},
        SSE | {":status": "503"},
        SSE | {"content-encoding": "gzip"},
    ],
)
def test_other_answers_are_untouched(headers: dict[str, str]) -> None:
    talk = spliced(DUPLEX)
    talk.send(STREAMED)
    assert joined(answer(talk, EXTRA, headers=headers), Message.RESPONSE_BODY) == EXTRA


def test_who_asked_for_usage_gets_it() -> None:
    talk = Talk(DUPLEX)
    talk.send(STREAMED)
    assert joined(answer(talk, TOKEN + EXTRA), Message.RESPONSE_BODY) == TOKEN + EXTRA


# Rewritten models

ASKING = b'{"model":"asked","stream":true}'
RENAMED = ModelRewrite("asked", Splice(9, 7, b'"a target"'))
ASKING_TARGET = b'{"model":"a target","stream":true}'
TARGETS = b'data: {"choices":[{"text":"\\"model\\":\\"target\\""}],"model":"a target"}\n\n'
CLIENTS = TARGETS.replace(b'"a target"', b'"asked"')
WHOLE = b'{"id":1,"model":"a target","choices":[{"model":"a target"}]}'
WHOLE_CLIENTS = WHOLE.replace(b'"a target"', b'"asked"', 1)


def rewritten(request: BodyMode, response: BodyMode = DUPLEX, **settings: Any) -> Talk:
    talk = Talk(request, response, **settings)
    talk.director.rewrite = RENAMED
    return talk


@pytest.mark.parametrize("response_mode", BodyMode)
@pytest.mark.parametrize("request_mode", [DUPLEX, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
@pytest.mark.parametrize("read_usage", [False, True])
@pytest.mark.parametrize(
    ("headers", "sent", "wanted"), [(SSE, TARGETS, CLIENTS), (OK, WHOLE, WHOLE_CLIENTS)]
)
def test_a_model_is_rewritten_and_restored_wherever_bodies_are_shown(
    request_mode: BodyMode,
    response_mode: BodyMode,
    read_usage: bool,
    headers: dict[str, str],
    sent: bytes,
    wanted: bytes,
) -> None:
    talk = rewritten(request_mode, response_mode, read_usage=read_usage, rewrites=True)
    replies = talk.send(ASKING)
    steer = next(reply for reply in replies if isinstance(reply, Steer))
    if request_mode is DUPLEX:
        assert joined(replies, Message.REQUEST_BODY) == ASKING_TARGET
        assert "content-length" in steer.remove
    else:
        assert steer.body == ASKING_TARGET
    assert "accept-encoding" in steer.remove
    assert steer.responses_off is None
    assert all(not isinstance(reply, Await) or reply == Await(None) for reply in replies)
    told = headers | {"content-length": str(len(sent))}
    (reply,) = talk.exchange.response_headers(told, False, None)
    if response_mode is BodyMode.NONE:
        assert reply is Message.RESPONSE_HEADERS
        return
    assert reply == Tell([], ("content-length",))
    (reply, *_) = talk.exchange.response_body(sent, response_mode is not DUPLEX) or [None]
    if response_mode is DUPLEX:
        assert reply is None
        (reply,) = talk.exchange.response_body(b"", True)
        assert reply == Chunk(Message.RESPONSE_BODY, wanted, True)
    else:
        assert reply == Replace(Message.RESPONSE_BODY, wanted)
    assert talk.outcome is Outcome.COMPLETED


@given(cuts, st.booleans())
def test_usage_and_model_are_undone_together_at_any_cut(where: list[int], trailers: bool) -> None:
    talk = rewritten(DUPLEX)
    talk.director.splice = ASKED
    replies = talk.send(ASKING)
    assert joined(replies, Message.REQUEST_BODY) == apply([ASKED], ASKING_TARGET)
    stream = TARGETS + EXTRA.replace(b"{", b'{"model":"a target",', 1) + DONE
    got = answer(talk, *pieces(stream, where), trailers=trailers)
    assert joined(got, Message.RESPONSE_BODY) == CLIENTS + DONE
    assert talk.director.picks[0].usage is not None


@given(cuts)
def test_each_piece_of_a_restored_body_is_answered_outside_of_full_duplex(where: list[int]) -> None:
    talk = rewritten(BodyMode.BUFFERED, BodyMode.STREAMED)
    talk.send(ASKING)
    sent = [*pieces(WHOLE, where), b""]
    replies = answer(talk, *sent[:-1], headers=OK)
    assert len(replies) == len(sent)
    out = b""
    for piece, reply in zip(sent, replies, strict=True):
        assert reply is Message.RESPONSE_BODY or isinstance(reply, Replace)
        out += reply.data if isinstance(reply, Replace) else piece
    assert out == WHOLE_CLIENTS


@pytest.mark.parametrize("mode", [DUPLEX, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_a_rewritten_body_may_not_grow_over_what_the_gateway_keeps(mode: BodyMode) -> None:
    for room in (0, -1):
        talk = rewritten(mode, max_body=len(ASKING_TARGET) + room)
        last = talk.send(ASKING)[-1]
        if mode is DUPLEX or not room:
            assert talk.outcome is None
            continue
        assert isinstance(last, Refusal)
        assert last.status == 413
        assert talk.outcome is Outcome.ABORTED
        assert talk.exchange.over
        assert talk.director.refusals == [last]


@pytest.mark.parametrize(
    "headers",
    [
        OK | {"content-encoding": "gzip"},
        OK | {"content-type": "text/plain"},
        {":status": "200"},
    ],
)
def test_answers_that_are_no_json_are_untouched(headers: dict[str, str]) -> None:
    talk = rewritten(DUPLEX)
    talk.send(ASKING)
    assert joined(answer(talk, WHOLE, headers=headers), Message.RESPONSE_BODY) == WHOLE
    plain = Talk(DUPLEX)
    plain.send(ASKING)
    assert joined(answer(plain, WHOLE, headers=OK), Message.RESPONSE_BODY) == WHOLE


def test_an_answer_without_body_keeps_its_length() -> None:
    talk = rewritten(DUPLEX)
    talk.send(ASKING)
    told = OK | {"content-length": "10"}  # of a HEAD
    assert talk.exchange.response_headers(told, True, None) == [Message.RESPONSE_HEADERS]
