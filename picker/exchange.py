"""The ext_proc conversation as a state machine: what Envoy tells goes in, what to answer comes out.

It knows no protobuf, waits for nothing and takes no decision: once the request is complete, it asks
for a pick (`asks`) and goes on when it is told (`routed`, `refused`). One Exchange lives as long as
one gRPC stream, which is one HTTP request and its response.

Order of answers. In full duplex nothing is answered before the request's end, which is the end of
its body or its trailers; then its headers, its body in chunks, its trailers. A buffering Envoy
waits for the headers' answer before it sends the body, so there the endpoint rides on the body's
answer. Streamed, or without body, only the headers can carry it: such requests are routed by
load alone. The response is independent of all that: Envoy may answer a request that we still
hold (too large, timed out), and each of its messages is answered at once, but for the one with the
last byte of a body whose length is known. In full duplex that one is answered together with the
end of the stream, which Envoy tells in a message of its own right after it: one reply for both.

How streams end, seen on Envoy 1.40:

* Envoy ends the gRPC stream as often by a reset as by a close, and a response cut short by the
  client or by its pod looks like a whole one. Only an end of stream on a response message, or its
  trailers, tell that it is complete. After it we end the stream ourselves, which Envoy takes
  well and which spares the reset.
* `mode_override` is ignored when either body mode is FULL_DUPLEX_STREAMED, whatever
  `allow_mode_override` says. With the other modes, and allowed, it turns response bodies off; it
  is obeyed in the answer to the request's headers only.
* With response bodies off, Envoy ends the stream at once after the response's headers if it
  wants nothing more: header-only requests with response trailers SKIPped, and every request where
  its body is not sent either. With response trailers at SEND the stream lasts as long as the
  response, trailers or not, so an override asks for them: in-flight counts stay right. A
  complete response and a cut one cannot be told apart there; its status has to do.
* Trailers after a buffered body leave that body without end of stream; so does a body that
  BUFFERED_PARTIAL cut.

A pick may change the request's body. By its `splice`, the server tells the usage of a stream; that
is done where all of the response's body is shown to us, so that what the server adds for it can be
taken out again; elsewhere the splice is taken back. By its `rewrite`, another model is asked for,
which has to be; whatever of the response's body is shown to us then gets back the name that the
client gave. Both need to be shown the whole request's body and to answer with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from picker.director import Outcome, Pick
from picker.names import METHODS, OWNED_HEADERS, OWNED_PREFIXES, REQUEST_ID
from picker.refusal import Refusal, body_too_large, unknown_method
from picker.replies import (
    REPLACED,
    RESIZED,
    Await,
    BodyMode,
    Message,
    Replace,
    Reply,
    Steer,
    Tell,
    pieces,
)
from picker.restore import ModelRestorer
from picker.splice import Splice, apply
from picker.sse import UsageStripper
from picker.usage import UsageReader


class Ask(NamedTuple):
    """A complete request, which wants an endpoint."""

    method: str
    path: str
    headers: Mapping[str, str]  # lower-case names
    body: bytes | None  # None: it was not shown to us, or not all of it
    subset: tuple[str, ...] | None  # endpoints that it may go to; None: all
    claim: str | None = None  # of a token that the gateway has verified: who asks


_ALWAYS_REMOVED = frozenset(OWNED_HEADERS)  # DESTINATION is overwritten
_NO_REPLY: tuple[Reply, ...] = ()
_NOT_ALL_SHOWN = (BodyMode.NONE, BodyMode.BUFFERED_PARTIAL)  # of a body


class Exchange:
    """One request and its response. Each event returns the replies to write, in order.

    When an event leaves a question in `asks`, its replies are those of `routed` or `refused`, one
    of which is to be called before the next event but `closed`.
    """

    __slots__ = (
        "_body_unseen",
        "_carrier",
        "_chunks",
        "_claim",
        "_events",
        "_headers",
        "_last_piece",
        "_left",
        "_length",
        "_max_body",
        "_pick",
        "_read_usage",
        "_released",
        "_request_done",
        "_request_mode",
        "_response_mode",
        "_response_started",
        "_restorer",
        "_retry_on",
        "_rewrites",
        "_stripper",
        "_subset",
        "_tell_refusal",
        "_usage",
        "asks",
        "over",
    )

    def __init__(
        self,
        tell_refusal: Callable[[Refusal], None],
        *,
        max_body: int,
        read_usage: bool,
        rewrites: bool = False,
        retry_on: str | None = None,
    ) -> None:
        """
        Args:
            tell_refusal: told of refusals of our own.
            max_body: bytes of a request's body; a longer one is refused with 413.
            read_usage: look for token usage in the response's body.
            rewrites: the response's body may have to be changed, if not read.
            retry_on: set this as RETRY_ON on requests without trailers. An Envoy that may retry
                a request with trailers in full duplex sends its body twice (envoy#45470).
        """
        self._tell_refusal = tell_refusal
        self._max_body = max_body
        self._read_usage = read_usage
        self._rewrites = rewrites
        self._retry_on = retry_on
        self._request_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._response_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._headers: Mapping[str, str] | None = None
        self._subset: tuple[str, ...] | None = None
        self._claim: str | None = None
        self._chunks: list[bytes] = []
        self._length = 0
        self._request_done = False
        self.asks: Ask | None = None  # waits for `routed` or `refused`
        self._carrier = Message.REQUEST_HEADERS  # the message whose answer brings the endpoint
        self._released: tuple[bytes, bool] | None = None  # held body, and whether trailers follow
        self._pick: Pick | None = None
        self._response_started = False
        self._body_unseen = False  # of the response
        self._events = False  # whether the response is a stream of them
        self._usage: UsageReader | None = None
        self._restorer: ModelRestorer | None = None
        self._stripper: UsageStripper | None = None
        self._left = -1  # bytes of the response's body to come; below 0 when that is not known
        self._last_piece = b""  # of the response's body, which waits for the end of the stream
        self.over = False  # nothing more will be said: the stream can be ended

    @property
    def held(self) -> int:
        """Bytes of the request's body that wait for its end."""
        return 0 if self._request_done else self._length

    def modes(self, request: BodyMode, response: BodyMode) -> None:
        """What the first message tells of the bodies' modes; full duplex when it does not."""
        self._request_mode = request
        self._response_mode = response

    # The request

    def request_headers(
        self,
        headers: Mapping[str, str],
        end: bool,
        subset: tuple[str, ...] | None,
        claim: str | None = None,
    ) -> Sequence[Reply]:
        """
        Args:
            headers: lower-case names, `:method` and `:path` among them; repeated ones joined.
            end: there is neither body nor trailers.
            subset: the gateway's hint; empty when it allows no endpoint.
            claim: of a token that the gateway has verified.
        """
        if self._headers is not None:
            return _NO_REPLY
        self._headers, self._subset, self._claim = headers, subset, claim
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_body:
            return [self._refuse(body_too_large(self._max_body))]
        if end:
            return self._ask(Message.REQUEST_HEADERS, b"")
        match self._request_mode:
            case BodyMode.FULL_DUPLEX_STREAMED:
                return _NO_REPLY
            case BodyMode.BUFFERED | BodyMode.BUFFERED_PARTIAL:
                return [Await(self._responses_off())]
            case _:
                return self._ask(Message.REQUEST_HEADERS, None)

    def request_body(self, data: bytes, end: bool) -> Sequence[Reply]:
        if self._headers is None or self._request_mode in (BodyMode.NONE, BodyMode.STREAMED):
            return self._pass_body(Message.REQUEST_BODY, self._request_mode, data, end)
        duplex = self._request_mode is BodyMode.FULL_DUPLEX_STREAMED
        if self._request_done:  # a second end of stream, as some Envoys send
            return _NO_REPLY if duplex else [Message.REQUEST_BODY]
        self._length += len(data)
        if self._length > self._max_body:
            return [self._refuse(body_too_large(self._max_body))]
        if duplex:
            if data:
                self._chunks.append(data)
            return self._release(trailers=False) if end else _NO_REPLY
        whole = (
            end
            or self._request_mode is BodyMode.BUFFERED
            or self._headers.get("content-length") == str(len(data))
        )
        return self._ask(Message.REQUEST_BODY, data if whole else None)

    def request_trailers(self) -> Sequence[Reply]:
        if self._headers is None or self._request_done:
            return [Message.REQUEST_TRAILERS]
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return self._release(trailers=True)
        # An Envoy that buffers has nothing left to answer that could carry the endpoint.
        why = "the request has trailers but no body"
        return [self._refuse(Refusal(400, "missing_body", why))]

    def _release(self, *, trailers: bool) -> Sequence[Reply]:
        """The held request is complete: let it go."""
        chunks, self._chunks = self._chunks, []
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._released = body, trailers
        if trailers:
            self._retry_on = None
        return self._ask(Message.REQUEST_HEADERS, body)

    def _ask(self, carrier: Message, body: bytes | None) -> Sequence[Reply]:
        headers = self._headers
        assert headers is not None
        method = headers.get(":method", "")
        if method not in METHODS:
            return [self._refuse(unknown_method(method))]
        self._carrier = carrier
        self.asks = Ask(method, headers.get(":path", ""), headers, body, self._subset, self._claim)
        return _NO_REPLY

    def routed(self, pick: Pick) -> Sequence[Reply]:
        """The endpoint for what was asked."""
        ask, self.asks = self.asks, None
        self._request_done = True
        self._pick = pick
        changed = None
        if pick.splice is not None or pick.rewrite is not None:
            body = None if ask is None else ask.body
            splices = self._splices(pick, body)
            if body is not None and splices:
                if not self._fits(splices, body):
                    pick.end(Outcome.ABORTED)
                    return [self._refuse(body_too_large(self._max_body))]
                changed = apply(splices, body)
        replies: list[Reply] = [self._steer(pick, changed)]
        if self._released is not None:
            body, trailers = self._released
            if changed is not None:
                body = changed
            self._released = None
            if body or not trailers:
                replies += pieces(Message.REQUEST_BODY, body, end=not trailers)
            if trailers:
                replies.append(Message.REQUEST_TRAILERS)
        return replies

    def refused(self, refusal: Refusal) -> Sequence[Reply]:
        """Why what was asked has no endpoint."""
        self._give_up()
        return [refusal]

    def _splices(self, pick: Pick, body: bytes | None) -> list[Splice]:
        """What a pick changes in the request's body; the usage that nobody can ask for is not."""
        must = [] if pick.rewrite is None else [pick.rewrite.splice]
        if pick.splice is None:
            return must
        may = [*must, pick.splice]
        if (
            body is not None
            and self._read_usage
            and self._request_mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
            and self._response_mode not in _NOT_ALL_SHOWN
            and self._fits(may, body)
        ):
            return may
        pick.splice = None
        return must

    def _fits(self, splices: Sequence[Splice], body: bytes) -> bool:
        """Whether the gateway, where it keeps the body, keeps it up to our limit."""
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return True
        return len(body) + sum(splice.growth for splice in splices) <= self._max_body

    def _steer(self, pick: Pick, changed: bytes | None) -> Steer:
        headers = self._headers
        assert headers is not None
        remove = tuple(
            name
            for name in headers
            if name.startswith(OWNED_PREFIXES) and name not in _ALWAYS_REMOVED
        )
        replaced = self._carrier is Message.REQUEST_BODY
        if changed is not None:
            remove += REPLACED if replaced else RESIZED
        return Steer(
            self._carrier,
            pick.destination,
            None if headers.get(REQUEST_ID) == pick.request_id else pick.request_id,
            remove,
            self._retry_on,
            None if replaced else self._responses_off(),
            changed if replaced else None,
        )

    def _responses_off(self) -> BodyMode | None:
        """The request's mode for an override that turns response bodies off; None: leave them."""
        if (
            self._read_usage
            or self._rewrites
            or self._request_mode is BodyMode.FULL_DUPLEX_STREAMED
            or self._response_mode in (BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED)
        ):
            return None
        return self._request_mode

    def _refuse(self, refusal: Refusal) -> Refusal:
        """A refusal of our own."""
        self._tell_refusal(refusal)
        self._give_up()
        return refusal

    def _give_up(self) -> None:
        self.over = self._request_done = True
        self.asks = self._released = None
        self._chunks.clear()

    # The response

    def response_headers(
        self, headers: Mapping[str, str], end: bool, served: str | None
    ) -> Sequence[Reply]:
        """
        Args:
            headers: lower-case names, `:status` among them.
            end: there is neither body nor trailers.
            served: the endpoint that the response comes from, if the gateway tells.
        """
        status, length = headers.get(":status", ""), headers.get("content-length", "")
        if length.isdecimal():
            self._left = int(length[:20])
        if self._pick is not None:
            self._response_started = True
            # Until a body comes: whether our override was obeyed is not told.
            self._body_unseen = (
                self._response_mode is BodyMode.NONE or self._responses_off() is not None
            )
            self._pick.response_started(int(status) if status.isdecimal() else 0, served)
            if headers.get("content-encoding", "identity") == "identity":
                kind = headers.get("content-type", "")
                self._events = kind.startswith("text/event-stream")
                asked = self._pick.splice is not None and status.startswith("2")
                if asked and self._events and self._left < 0:
                    self._stripper = UsageStripper()
                if self._pick.rewrite is not None and not end:
                    self._restorer = self._restore(self._pick.rewrite.asked, kind)
                if self._read_usage:
                    self._usage = UsageReader(kind)
        if end:
            self._complete()
            self.over = True
        told = [] if self._pick is None else self._pick.client_headers
        remove = () if self._restorer is None else ("content-length",)
        return [Tell(told, remove) if told or remove else Message.RESPONSE_HEADERS]

    def _restore(self, model: str, content_type: str) -> ModelRestorer | None:
        is_json = content_type.partition(";")[0].strip().lower().endswith("json")
        if self._response_mode is BodyMode.NONE or not (self._events or is_json):
            return None
        return ModelRestorer(model, events=self._events)

    def response_body(self, data: bytes, end: bool) -> Sequence[Reply]:
        self._body_unseen = False
        if self._pick is not None and data:
            # Of a stream of events, a comment or half a line is no token yet.
            if self._pick.first_token_seconds is None and (not self._events or b"data:" in data):
                self._pick.first_token()
            if self._events:
                self._pick.streamed(data.count(b"data:"))
            if self._usage is not None:
                self._usage.feed(data)
        if end or self._response_mode is BodyMode.BUFFERED:
            self._complete()
            self.over = end
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            data = self._with_last_piece(data)
            self._left -= len(data)
            if data and not self._left and not end:
                self._last_piece = data
                return _NO_REPLY
        if self._stripper is None and self._restorer is None:
            return self._pass_body(Message.RESPONSE_BODY, self._response_mode, data, end)
        mode = self._response_mode
        is_last = end or mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
        left = self._edited(data, is_last)
        if mode is BodyMode.FULL_DUPLEX_STREAMED:
            return pieces(Message.RESPONSE_BODY, left, end=end) if left or end else _NO_REPLY
        return [Message.RESPONSE_BODY if left == data else Replace(Message.RESPONSE_BODY, left)]

    def _edited(self, data: bytes, is_last: bool) -> bytes:
        """A piece of the body as its client shall see it: with the name of the model that it asked
        for, without the usage that it did not ask for."""
        for editor in (self._restorer, self._stripper):
            if editor is not None:
                data = editor.feed(data)
                if is_last:
                    data += editor.finish()
        return data

    def response_trailers(self) -> Sequence[Reply]:
        self._complete()
        self.over = True
        last = self._with_last_piece(b"")
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            last = self._edited(last, is_last=True)
        before = pieces(Message.RESPONSE_BODY, last, end=False) if last else []
        return [*before, Message.RESPONSE_TRAILERS]

    def _with_last_piece(self, data: bytes) -> bytes:
        """The piece that waits, if one does, and what came after it."""
        last, self._last_piece = self._last_piece, b""
        return last + data if last else data

    def _complete(self) -> None:
        """The end of the response was seen."""
        pick = self._pick
        if pick is not None and pick.outcome is None:
            usage = None
            if self._usage is not None:
                self._usage.finish()
                usage = self._usage.usage
            status = pick.status or 0
            pick.end(Outcome.FAILED if status >= 500 else Outcome.COMPLETED, usage)

    def closed(self) -> None:
        """The stream is over, however it ended."""
        self._give_up()
        if self._response_started and self._body_unseen:
            self._complete()
        elif self._pick is not None:
            usage = None if self._usage is None else self._usage.usage
            self._pick.end(Outcome.ABORTED, usage)

    def _pass_body(
        self, message: Message, mode: BodyMode, data: bytes, end: bool
    ) -> Sequence[Reply]:
        if mode is BodyMode.FULL_DUPLEX_STREAMED:
            return pieces(message, data, end=end)
        return [message]
