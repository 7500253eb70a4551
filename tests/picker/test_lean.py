from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httptools
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker import lean_connection
from picker.config import Config, Duration, Listen, Size
from picker.director import Director, Outcome
from picker.lean import LeanServer
from picker.names import DESTINATION, METHODS, REFUSAL, REFUSED, RETRY_AFTER, SPLICE, STREAM
from picker.refusal import Refusal
from picker.splice import ModelRewrite, Splice
from tests.picker import own_scorer
from tests.picker.core import Core
from tests.picker.recording import ENDPOINTS, RecordingDirector
from tests.picker.waiting import until

BODY = b'{"model":"m","prompt":"hello"}'
LIMIT = 100_000


class Answer:
    """One HTTP answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode()] = value.decode("ascii")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class Client:
    """A connection such as Envoy's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        answer = Answer()
        async with asyncio.timeout(60):
            while not answer.complete:
                head = await self.reader.readuntil(b"\r\n\r\n")
                answer.feed(head)
                length = int(answer.headers.get("content-length", "0"))
                if length:
                    answer.feed(await self.reader.readexactly(length))
        return answer

    async def closed(self) -> bytes:
        """What was left to read, once the other side has closed."""
        async with asyncio.timeout(60):
            return await self.reader.read()


class Picker:
    """A lean server before a recording director."""

    def __init__(self, director: Director | None = None, **more: Any) -> None:
        self.director = RecordingDirector()
        settings = {"max_body": Size(LIMIT)} | more
        config = Config(listen=Listen(http=0), **settings)
        asked: Any = director or self.director
        self.server = LeanServer(asked, config)
        self.port = 0

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def running(director: Director | None = None, **more: Any) -> AsyncIterator[Picker]:
    picker = Picker(director, **more)
    picker.port = await picker.server.start()
    await picker.server.serve()
    try:
        yield picker
    finally:
        await picker.server.stop()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    async with running() as picker:
        yield picker


@pytest.fixture
async def envoy(picker: Picker) -> AsyncIterator[Client]:
    async with picker.client() as client:
        yield client


def post(
    body: bytes = BODY,
    *,
    name: str = "1",
    path: str = "/pick/v1/completions",
    method: str = "POST",
    **headers: str,
) -> bytes:
    """A request as Envoy writes it. Underscores in names stand for dashes."""
    all_headers = {
        "host": "x",
        STREAM: name,
        "content-type": "application/json",
        "content-length": str(len(body)),
    } | {key.replace("_", "-"): value for key, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in all_headers.items() if value]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    head = post(b"", content_length="", transfer_encoding="chunked")
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


async def test_a_request_is_answered_with_its_endpoints(picker: Picker, envoy: Client) -> None:
    envoy.send(post(x_request_id="abc", X_Session_ID="mine", path="/pick/v1/completions?a=1"))
    answer = await envoy.answer()
    assert answer.status == 200
    assert answer.headers == {"content-length": "0", DESTINATION: ",".join(ENDPOINTS)}
    (request,) = picker.director.requests
    assert (request.method, request.path) == ("POST", "/v1/completions?a=1")
    assert (request.id, request.model, request.body) == ("abc", "m", BODY)
    assert request.headers["x-session-id"] == "mine"
    assert len(picker.server.tickets) == 1


async def test_headers_may_hold_any_text(picker: Picker, envoy: Client) -> None:
    envoy.send(post(x_tenant="müller-日本"))
    assert (await envoy.answer()).status == 200
    (request,) = picker.director.requests
    assert request.headers["x-tenant"] == "müller-日本"


@pytest.mark.parametrize("unfit", ["\xff", "a" * 200])
async def test_an_unfit_request_id_is_replaced(picker: Picker, envoy: Client, unfit: str) -> None:
    envoy.send(post(x_request_id=unfit))
    answer = await envoy.answer()
    (request,) = picker.director.requests
    assert answer.headers["x-request-id"] == request.id != unfit


@pytest.mark.parametrize("usage", [True, False])
async def test_a_splice_is_named_where_the_answer_is_read(usage: bool) -> None:
    async with running(usage=usage) as picker, picker.client() as envoy:
        picker.director.splice = Splice(12, 3, b'{"a":1, "b":[]}')
        envoy.send(post())
        answer = await envoy.answer()
        assert answer.headers[DESTINATION] == ",".join(ENDPOINTS)
        assert answer.headers.get(SPLICE) == ('1 0 12 3 15 {"a":1, "b":[]}' if usage else None)
        assert (picker.director.picks[0].splice is not None) is usage
        picker.director.splice = None
        envoy.send(post(name="2"))
        assert SPLICE not in (await envoy.answer()).headers


@pytest.mark.parametrize("usage", [True, False])
async def test_a_rewrite_is_named_with_what_to_undo(usage: bool) -> None:
    async with running(usage=usage) as picker, picker.client() as envoy:
        picker.director.rewrite = ModelRewrite('a "b" é\x7f', Splice(9, 3, b'"other"'))
        picker.director.splice = Splice(1, 0, b'"x":1,')
        envoy.send(post())
        told = (await envoy.answer()).headers[SPLICE]
        name = '"a \\"b\\" \\u00e9\\u007f"'
        assert told == f"{usage:d} {len(name)} {name}" + '1 0 6 "x":1,' * usage + '9 3 7 "other"'
        picker.director.splice = None
        envoy.send(post(name="2"))
        assert (await envoy.answer()).headers[SPLICE] == f'0 {len(name)} {name}9 3 7 "other"'


async def test_a_rewritten_body_over_the_limit_is_refused(picker: Picker, envoy: Client) -> None:
    """The pod would not know the model by the name that its client has for it."""
    picker.director.rewrite = ModelRewrite("m", Splice(9, 3, b'"other"'))
    picker.director.splice = Splice(1, 0, b"12345")
    for room in (9, 8, 4, 3):
        for hold in (None, asyncio.Event()):
            picker.director.hold = hold
            if hold is not None:
                hold.set()
            envoy.send(post(BODY.ljust(LIMIT - room), name=f"{room} {hold}"))
            answer = await envoy.answer()
            assert answer.status == (200 if room >= 4 else 413)
            if answer.status == 200:
                assert ("12345" in answer.headers[SPLICE]) is (room == 9)
            else:
                assert json.loads(answer.body)["error"]["code"] == "body_too_large"
                assert picker.director.picks[-1].outcome is Outcome.ABORTED
    assert len(picker.server.tickets) == 6
    assert [refusal.status for refusal in picker.director.refusals] == [413, 413]


async def test_a_body_does_not_grow_over_the_limit(picker: Picker, envoy: Client) -> None:
    picker.director.splice = Splice(1, 0, b"12345")
    for room, fits in ((5, True), (4, False)):
        for hold in (None, asyncio.Event()):
            picker.director.hold = hold
            if hold is not None:
                hold.set()
            envoy.send(post(BODY.ljust(LIMIT - room), name=f"{room} {hold}"))
            assert (SPLICE in (await envoy.answer()).headers) is fits


async def test_what_comes_on_one_connection_does_not_mix(picker: Picker, envoy: Client) -> None:
    envoy.send(post(b"", method="GET", path="/pick/v1/models", name="1", content_length="0"))
    assert (await envoy.answer()).status == 200
    envoy.send(post(name="2", x_request_id="second", x_session_id="mine"))
    assert (await envoy.answer()).status == 200
    envoy.send(post(name="3"))
    assert (await envoy.answer()).status == 200
    first, second, third = picker.director.requests
    assert (first.method, first.path, first.body) == ("GET", "/v1/models", b"")
    assert (second.body, second.headers["x-session-id"]) == (BODY, "mine")
    assert "x-session-id" not in third.headers
    assert len(picker.server.tickets) == 3


@pytest.mark.parametrize("method", sorted(METHODS))
async def test_every_method_can_be_asked_for(picker: Picker, envoy: Client, method: str) -> None:
    envoy.send(post(b"", method=method, path="/pick/"))
    assert (await envoy.answer()).status == 200
    assert picker.director.requests[0].method == method


async def test_a_repeated_header_is_joined(picker: Picker, envoy: Client) -> None:
    envoy.send(post().replace(b"host: x", b"host: x\r\nx-a: 1\r\nX-A: 2"))
    await envoy.answer()
    assert picker.director.requests[0].headers["x-a"] == "1,2"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
async def test_any_cut_of_the_bytes_reads_the_same(data: st.DataObject) -> None:
    bodies = [BODY, b"", b'{"prompt":"' + b"x" * 3000 + b'"}']
    text = post(bodies[0], name="0") + chunked(BODY[:7], BODY[7:]) + post(bodies[2], name="2")
    places = data.draw(st.lists(st.integers(1, len(text) - 1), max_size=8, unique=True))
    cuts = sorted([0, *places, len(text)])
    async with running() as picker, picker.client() as client:
        for start, end in itertools.pairwise(cuts):
            client.send(text[start:end])
            await client.writer.drain()
            await asyncio.sleep(0)
        answers = [await client.answer() for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert [request.body for request in picker.director.requests] == [BODY, BODY, bodies[2]]


async def test_a_refusal_goes_to_the_client(picker: Picker, envoy: Client) -> None:
    picker.director.refusal = Refusal(429, "shed", "too much", retry_after=7)
    envoy.send(post())
    answer = await envoy.answer()
    assert answer.status == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers[REFUSED] == "shed"
    assert json.loads(answer.body)["error"]["message"] == "too much"
    assert len(picker.server.tickets) == 0


async def test_an_answer_to_head_has_no_body(picker: Picker, envoy: Client) -> None:
    picker.director.refusal = Refusal(404, "model_not_found", "no such model")
    envoy.send(post(b"", method="HEAD"))
    head = await envoy.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    picker.director.refusal = None
    envoy.send(post())
    assert (await envoy.answer()).status == 200


async def test_having_nobody_is_told_in_headers(picker: Picker, envoy: Client) -> None:
    picker.director.refusal = Refusal(503, "no_endpoints", "niemand für\n\x7f %", retry_after=5)
    envoy.send(post())
    answer = await envoy.answer()
    assert answer.status == 200
    assert DESTINATION not in answer.headers
    assert (answer.headers[REFUSED], answer.headers[RETRY_AFTER]) == ("no_endpoints", "5")
    assert answer.headers[REFUSAL].isprintable()
    error = json.loads(answer.headers[REFUSAL])["error"]
    assert (error["message"], error["code"]) == ("niemand für\n\x7f %", "no_endpoints")


async def test_bad_json_is_refused_and_counted(picker: Picker, envoy: Client) -> None:
    envoy.send(post(b"{"))
    answer = await envoy.answer()
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"
    assert [refusal.status for refusal in picker.director.refusals] == [400]
    envoy.send(post())
    assert (await envoy.answer()).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(name=""), 400),
        (post(path="/v1/completions"), 404),
        (post(method="PURGE"), 405),
    ],
)
async def test_who_asks_wrongly_is_told(envoy: Client, request_bytes: bytes, status: int) -> None:
    envoy.send(request_bytes)
    assert (await envoy.answer()).status == status
    envoy.send(post())
    assert (await envoy.answer()).status == 200


async def test_a_fault_of_our_own_lets_envoy_fail_open_or_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = Core(["192.0.2.1:8000"], scorers={f"{own_scorer.__name__}:Failing": 1})
    async with running(core.director) as picker, picker.client() as client:
        for _ in range(2):
            client.send(post())
            assert (await client.answer()).status == 500
    assert caplog.text.count("Traceback") == 1
    assert core.inflight() == [(0, 0)]


async def test_a_fault_outside_of_routing_is_no_fault_of_the_client(
    picker: Picker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, pick: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(picker.server.tickets, "open", broken)
    async with picker.client() as client:
        client.send(post())
        assert (await client.answer()).status == 500
        assert await client.closed() == b""
    assert "ZeroDivisionError" in caplog.text


async def test_a_pick_that_waits_holds_up_nobody_else(picker: Picker, envoy: Client) -> None:
    hold = picker.director.hold = asyncio.Event()
    envoy.send(post(BODY))
    await until(lambda: picker.director.waiting == 1)
    picker.director.hold = None
    async with picker.client() as other:
        other.send(post(BODY))
        assert (await other.answer()).headers[DESTINATION] == ",".join(ENDPOINTS)
    hold.set()
    assert (await envoy.answer()).headers[DESTINATION] == ",".join(ENDPOINTS)
    envoy.send(post(BODY))
    assert (await envoy.answer()).status == 200
    assert len(picker.director.picks) == 3


async def test_a_refusal_after_waiting_goes_to_the_client(picker: Picker, envoy: Client) -> None:
    picker.director.hold = asyncio.Event()
    envoy.send(post(BODY))
    await until(lambda: picker.director.waiting == 1)
    picker.director.refusal = Refusal(429, "busy", "come again", retry_after=3)
    picker.director.hold.set()
    answer = await envoy.answer()
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "asks again"])
async def test_who_leaves_while_its_pick_waits_is_not_picked_for(
    picker: Picker, leaves: bool
) -> None:
    hold = picker.director.hold = asyncio.Event()
    async with picker.client() as envoy:
        envoy.send(post(BODY))
        await until(lambda: picker.director.waiting == 1)
        for _ in range(lean_connection.SLOW + 1):
            picker.server.sweep()
        assert picker.director.waiting == 1
        if not leaves:
            envoy.send(post(BODY))
            assert await envoy.closed() == b""
    await until(lambda: picker.director.waiting == 0)
    hold.set()
    await until(lambda: not picker.server.connections)
    assert picker.director.picks == []


async def test_who_leaves_before_its_pick_has_begun_leaves_nothing_behind(picker: Picker) -> None:
    """Also no coroutine that nobody awaits, of which Python would warn."""
    picker.director.hold = asyncio.Event()

    async def ask_and_leave() -> None:
        ours, theirs = socket.socketpair()
        connection = lean_connection.Connection(picker.server)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: connection, sock=ours)
        connection.data_received(post(BODY))
        connection.connection_lost(None)
        transport.abort()
        theirs.close()
        for _ in range(3):
            await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        await ask_and_leave()
        gc.collect()
    assert [str(each.message) for each in warned] == []
    assert picker.director.picks == [] and not picker.server.connections


async def test_a_drain_waits_for_a_pick_that_waits(picker: Picker, envoy: Client) -> None:
    picker.director.hold = asyncio.Event()
    envoy.send(post(BODY))
    await until(lambda: picker.director.waiting == 1)
    drain = asyncio.create_task(picker.server.drain())
    await until(lambda: picker.server.draining)
    picker.director.hold.set()
    assert (await envoy.answer()).headers["connection"] == "close"
    drain.cancel()


def hostile() -> Iterator[Any]:
    yield pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, id="TLS")
    yield pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2")
    yield pytest.param(post(method="FOO"), 405, id="unknown method")
    yield pytest.param(post(method="GETS"), 405, id="nearly known method")
    yield pytest.param(post(method="DESCRIBE"), 405, id="another protocol's method")
    yield pytest.param(b"GET /pick/ HTTP/1.1\r\nbad header\r\n\r\n", 400, id="no colon")
    yield pytest.param(post(content_length="-1"), 400, id="negative length")
    yield pytest.param(post(content_length="99999999999999999999999"), 400, id="huge length")
    yield pytest.param(post(transfer_encoding="chunked"), 400, id="length and chunks")
    yield pytest.param(chunked()[:-5] + b"zz\r\n", 400, id="chunk of no size")
    yield pytest.param(post(upgrade="websocket", connection="upgrade"), 400, id="upgrade")
    yield pytest.param(post(method="CONNECT", path="a:80"), 400, id="connect")
    many = {f"x{number}": "1" for number in range(lean_connection.MAX_HEADERS)}
    yield pytest.param(post(**many), 431, id="many headers")
    long = b"a" * lean_connection.MAX_HEAD
    yield pytest.param(b"GET /" + long, 431, id="long line")
    yield pytest.param(b"GET / HTTP/1.1\r\na: " + long, 431, id="long header")
    yield pytest.param(post(content_length=str(LIMIT + 1)), 413, id="long body, announced")
    yield pytest.param(chunked(b"x" * (LIMIT + 1)), 413, id="long body, in chunks")


@pytest.mark.parametrize(("sent", "status"), [*hostile()])
async def test_hostile_bytes_are_answered_once_and_closed(
    picker: Picker, sent: bytes, status: int
) -> None:
    async with picker.client() as client:
        client.send(sent)
        answer = await client.answer()
        assert answer.status == status
        assert json.loads(answer.body)["error"]["code"]
        assert await client.closed() == b""
    assert picker.director.requests == []
    assert [refusal.status for refusal in picker.director.refusals] == [status]
    async with picker.client() as client:
        client.send(post())
        assert (await client.answer()).status == 200


async def test_a_body_of_the_limit_passes(picker: Picker, envoy: Client) -> None:
    body = b'{"prompt":"' + b"x" * (LIMIT - 13) + b'"}'
    envoy.send(post(body))
    assert (await envoy.answer()).status == 200
    assert picker.director.requests[0].body == body
    assert picker.server.held == 0


async def test_a_client_that_waits_for_leave_gets_it(picker: Picker, envoy: Client) -> None:
    envoy.send(post(expect="100-continue").removesuffix(BODY))
    async with asyncio.timeout(60):
        assert await envoy.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    envoy.send(BODY)
    assert (await envoy.answer()).status == 200
    assert picker.director.requests[0].body == BODY


async def test_an_old_client_is_closed_after_its_answer(envoy: Client) -> None:
    envoy.send(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = await envoy.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await envoy.closed() == b""


async def test_bodies_of_all_connections_together_are_bounded() -> None:
    async with running(max_body=Size(1024)) as picker:
        clients = [picker.client() for _ in range(lean_connection.MAX_HELD_BODIES)]
        opened = [await client.__aenter__() for client in clients]
        half = post(b"x" * 1024)[:-1]
        for client in opened:
            client.send(half)
        await until(lambda: picker.server.held == lean_connection.MAX_HELD_BODIES * 1023)
        async with picker.client() as one_too_many:
            one_too_many.send(half)
            answer = await one_too_many.answer()
            assert (answer.status, answer.headers[REFUSED]) == (429, "busy")
            assert answer.headers["retry-after"] == "1"
            assert await one_too_many.closed() == b""
        for client in clients:
            await client.__aexit__(None, None, None)
        await until(lambda: not picker.server.held)
        async with picker.client() as client:
            client.send(post(b'{"prompt":""}'))
            assert (await client.answer()).status == 200


async def test_who_sends_too_slowly_is_given_up_and_who_waits_is_not(picker: Picker) -> None:
    async with picker.client() as slow, picker.client() as idle:
        idle.send(post())
        await idle.answer()
        slow.send(post()[:50])
        gone = asyncio.create_task(slow.closed())
        while not gone.done():  # sweeps count from when it has begun
            picker.server.sweep()
            await asyncio.sleep(0)
        assert await gone == b""
        idle.send(post(name="2"))
        assert (await idle.answer()).status == 200


async def test_who_does_not_read_its_answers_is_not_read(picker: Picker) -> None:
    """What it pipelines waits in its socket, not in our memory."""
    picker.director.refusal = Refusal(429, "shed", "x" * 400)
    count = 20_000
    async with picker.client() as client:
        client.send(post() * count)
        await until(lambda: picker.director.requests)
        before = -1
        while before != len(picker.director.requests):  # until it stands
            before = len(picker.director.requests)
            await asyncio.sleep(0.1)
        assert before < count
        answers = b""
        async with asyncio.timeout(30):
            for _ in range(count):
                answers = await client.reader.readuntil(b"HTTP/1.1 429")
        assert answers
    assert len(picker.director.requests) == count


async def test_connections_are_bounded(picker: Picker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_connection, "MAX_CONNECTIONS", 1)
    async with picker.client() as first:
        first.send(post())
        assert (await first.answer()).status == 200
        async with picker.client() as second:
            assert await second.closed() == b""
        first.send(post(name="2"))
        assert (await first.answer()).status == 200


async def test_drain_lets_what_has_begun_finish(picker: Picker) -> None:
    async with picker.client() as idle, picker.client() as busy:
        idle.send(post(name="1"))
        await idle.answer()
        busy.send(post(name="2")[:-5])
        await until(lambda: picker.server.held)
        draining = asyncio.create_task(picker.server.drain())
        assert await idle.closed() == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", picker.port)
        assert not draining.done()
        busy.send(post(name="2")[-5:])
        answer = await busy.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert len(picker.server.tickets) == 2
        for name in ("1", "2"):
            picker.server.sweep()
            await asyncio.sleep(0)
            assert not draining.done()  # the access log is to tell the ends
            pick = picker.server.tickets.close(name)
            assert pick is not None
            pick.end(Outcome.COMPLETED)
        async with asyncio.timeout(60):
            await draining


async def test_drain_has_an_end() -> None:
    async with running(drain=Duration(0.01)) as picker, picker.client() as client:
        client.send(post()[:-5])
        await until(lambda: picker.server.held)
        async with asyncio.timeout(60):
            await picker.server.drain()


async def test_open_picks_end_with_the_server() -> None:
    async with running() as picker, picker.client() as client:
        client.send(post())
        await client.answer()
        await picker.server.stop()
        assert [pick.outcome for pick in picker.director.ends] == [Outcome.ABORTED]
        assert await client.closed() == b""


async def test_a_port_in_use_is_an_error(picker: Picker) -> None:
    config = Config(listen=Listen(http=picker.port))
    with pytest.raises(OSError):
        await LeanServer(picker.director, config).start()  # type: ignore[arg-type]
