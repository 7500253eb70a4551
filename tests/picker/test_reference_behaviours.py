"""What gateways rely on in the reference endpoint picker, through a real gRPC stream of ext_proc.

The whole picker runs, before pods that tell their load. Where the reference differs from the
protocol's text, the text holds. What its own tests ask for, and where it is asked for here:

| of the reference's tests | here |
|---|---|
| chunks around 62,000 bytes, both ways | test_bodies_of_any_length_come_in_chunks |
| streaming or not, trailers or not | test_a_response_is_finished_and_counted_once |
| early disconnect completes once | test_who_leaves_early_is_counted_once; test_server.py |
| immediate responses | test_an_empty_pool_is_503, test_a_refusal_is_json_and_ends_the_stream |
| `:status` of model servers' errors | test_errors_of_pods_are_counted_by_their_status |
| cached tokens, usage in two pieces | test_usage_is_read_wherever_it_is_cut |
| served metadata | test_the_pod_that_served_is_believed; test_server.py |
| header and metadata equal, fallbacks in order | test_the_fallbacks_are_named_in_order |
| objective missing | test_a_request_without_objective_has_the_default_priority |
| rewrites: weighted, by header, precedence | test_rewrites_change_both_bodies; test_rewrites.py |
| scheduler finds nothing | test_filters_that_leave_nobody_are_503 |
| admission: shed, full, expired, cancelled, shut down | test_admission_codes; test_flow.py |
| the answer to headers waits for the body's end | test_nothing_is_answered_before_the_bodys_end |
| subsets: text, list, mixed, blanks, ports, empty | test_subsets_are_kept_to; test_server.py |
| random pod for headers alone | test_requests_of_headers_alone_are_spread_within_their_subset |
| duplicate headers kept | test_repeated_headers_are_left_alone |
| pickers: ties, proportions | test_equal_pods_take_turns; test_choosers.py |
| scores clamped, order of filters, configuration | test_schedule.py, test_filters.py |
| health by name | test_server.py |

Not followed: a subset told by a request header, which any client could send.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.service import Service
from tests.picker.ext_proc import (
    POST,
    Gateway,
    channel_to,
    destination,
    fill,
    request_headers,
    set_headers,
    stream,
)
from tests.picker.test_service import config_of, get, model_server, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUSY = """\
vllm:num_requests_running 9
vllm:num_requests_waiting 9
vllm:kv_cache_usage_perc 0.9
"""
GET = {":method": "GET", ":path": "/v1/models"}
JSON = {":status": "200", "content-type": "application/json"}
EVENTS = {":status": "200", "content-type": "text/event-stream"}
USAGE = (
    b'"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":5}}'
)
CHUNK = 62_000  # bytes
DESTINATION = "x-gateway-destination-endpoint"


@dataclass
class Picker:
    """A whole picker, and a channel to it."""

    service: Service
    pods: Sequence[str]
    channel: grpc.aio.Channel
    admin: int
    streams: list[Gateway] = field(default_factory=list)

    def stream(self) -> Gateway:
        gateway = stream(self.channel)
        self.streams.append(gateway)
        return gateway

    async def close(self) -> None:
        """End all streams, and wait until the picker knows."""
        for gateway in self.streams:
            gateway.call.cancel()
        self.streams.clear()
        await self.idle()

    async def asked(self, message: ProcessingRequest, body: bytes | None = None) -> Gateway:
        """A stream on which a request was asked."""
        gateway = self.stream()
        await gateway.send(message)
        if body is not None:
            await gateway.body(body)
        return gateway

    async def answer(
        self, message: ProcessingRequest, body: bytes | None = None
    ) -> ProcessingResponse:
        """The first answer to a request."""
        return await (await self.asked(message, body)).read()

    async def picked(self, message: ProcessingRequest) -> list[str]:
        return destination(await self.answer(message)).split(",")

    async def counts(self, metric: str) -> Counter[str]:
        """A metric's values by labels."""
        _, page = await get(self.admin, "/metrics")
        found = re.findall(rf"^{metric}(\{{.*?\}})? (\S+)$", page, re.MULTILINE)
        return Counter({labels: float(value) for labels, value in found})

    async def idle(self) -> None:
        """Wait until nothing counts as being served."""
        async with asyncio.timeout(30):
            while (await self.counts("inference_objective_running_requests")).total():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def picker_before(*pages: str, more: str = "") -> AsyncIterator[Picker]:
    """A picker before pods that show these pages."""
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(model_server(page)) for page in pages]
        service, ports = await stack.enter_async_context(running(config_of(*pods, more=more)))
        channel = await stack.enter_async_context(channel_to(ports.grpc))
        yield Picker(service, pods, channel, ports.admin)


IDLE = BUSY.replace("9", "0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three() -> AsyncIterator[Picker]:
    async with picker_before(IDLE, IDLE, IDLE, more="scheduling: {picker: {fallbacks: 2}}") as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def picker(three: Picker) -> AsyncIterator[Picker]:
    """A picker before three idle pods, which serves nobody else."""
    yield three
    await three.close()


def body_of(size: int = 0, **fields: Any) -> bytes:
    """A completion of at least so many bytes."""
    body = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    return body + b" " * (size - len(body))


async def chunks(gateway: Gateway, part: str, trailers: bool = False) -> list[bytes]:
    """The pieces of a body, up to its end or its trailers."""
    pieces = []
    while True:
        answer = await gateway.read()
        if trailers and answer.WhichOneof("response").endswith("_trailers"):
            return pieces
        streamed = getattr(answer, part).response.body_mutation.streamed_response
        pieces.append(streamed.body)
        if streamed.end_of_stream:
            assert not trailers
            return pieces


def status_of(answer: ProcessingResponse) -> int:
    assert answer.WhichOneof("response") == "immediate_response"
    return int(answer.immediate_response.status.code)


def with_subset(value: Any, headers: Mapping[str, str] = POST) -> ProcessingRequest:
    message = request_headers(headers, True)
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint.update({"x-gateway-destination-endpoint-subset": value})
    return message


# Handlers


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 1])
async def test_bodies_of_any_length_come_in_chunks(picker: Picker, size: int) -> None:
    body = body_of(size)
    gateway = picker.stream()
    await gateway.headers()
    await gateway.body(body[: size // 2], end=False)
    await gateway.body(body[size // 2 :])
    assert destination(await gateway.read())
    full, rest = divmod(size, CHUNK)
    sizes = [CHUNK] * full + [rest] * (rest > 0)
    pieces = await chunks(gateway, "request_body")
    assert ([len(piece) for piece in pieces], b"".join(pieces)) == (sizes, body)
    await gateway.respond(JSON)
    await gateway.read()
    await gateway.response_body(body, True)
    pieces = await chunks(gateway, "response_body")
    assert ([len(piece) for piece in pieces], b"".join(pieces)) == (sizes, body)


async def test_nothing_is_answered_before_the_bodys_end(picker: Picker) -> None:
    gateway = picker.stream()
    await gateway.headers()
    await gateway.body(body_of()[:5], end=False)
    await gateway.body(body_of()[5:], end=False)
    first = asyncio.ensure_future(gateway.read())
    assert await picker.picked(with_subset(picker.pods[0]))  # others are answered meanwhile
    assert not first.done()
    await gateway.body(b"")
    assert destination(await first)
    assert b"".join(await chunks(gateway, "request_body")) == body_of()


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("asks_for_stream", [False, True])
async def test_a_response_is_finished_and_counted_once(
    picker: Picker, trailers: bool, streamed: bool, asks_for_stream: bool
) -> None:
    model = f"{trailers}-{streamed}-{asks_for_stream}"
    message = ProcessingRequest()
    gateway = picker.stream()
    await gateway.headers()
    await gateway.body(body_of(model=model, stream=asks_for_stream), end=not trailers)
    if trailers:
        message.request_trailers.SetInParent()
        await gateway.send(message)
    assert destination(await gateway.read())
    await chunks(gateway, "request_body", trailers)
    await gateway.respond(EVENTS if streamed else JSON)
    await gateway.read()
    answer = b'data: {"choices":[],%b}\n\ndata: [DONE]\n\n' if streamed else b'{"choices":[],%b}'
    await gateway.response_body(answer % USAGE, not trailers)
    if trailers:
        message.response_trailers.SetInParent()
        await gateway.send(message)
    assert b"".join(await chunks(gateway, "response_body", trailers)) == answer % USAGE
    assert await gateway.ended() is grpc.StatusCode.OK
    await picker.idle()
    for name, wanted in (("output_tokens", 3), ("input_tokens", 7), ("prompt_cached_tokens", 5)):
        sums = await picker.counts(f"inference_objective_{name}_sum")
        assert [value for labels, value in sums.items() if f'"{model}"' in labels] == [wanted]


@pytest.mark.parametrize("streamed", [False, True])
async def test_usage_is_read_wherever_it_is_cut(picker: Picker, streamed: bool) -> None:
    model = f"cut-{streamed}"
    answer = (b"data: {%b}\n\n" if streamed else b"{%b}") % USAGE
    places = range(1, len(answer), 7)
    for place in places:
        gateway = await picker.asked(request_headers(POST), body_of(model=model))
        await gateway.read()
        await chunks(gateway, "request_body")
        await gateway.respond(EVENTS if streamed else JSON)
        await gateway.read()
        await gateway.response_body(answer[:place], False)
        await gateway.response_body(answer[place:], True)
        assert b"".join(await chunks(gateway, "response_body")) == answer
    await picker.idle()
    sums = await picker.counts("inference_objective_prompt_cached_tokens_sum")
    assert [value for labels, value in sums.items() if model in labels] == [5 * len(places)]


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("when", ["request", "picked", "response", "body"])
async def test_who_leaves_early_is_counted_once(picker: Picker, how: str, when: str) -> None:
    gateway = picker.stream()
    before = await picker.counts("warmpath_ended_requests_total")
    await gateway.headers()
    await gateway.body(body_of(), end=when != "request")
    if when != "request":
        assert destination(await gateway.read())
    if when in ("response", "body"):
        await chunks(gateway, "request_body")
        await gateway.respond(EVENTS)
        await gateway.read()
    if when == "body":
        await gateway.response_body(b"data: {}\n\n", False)
        await gateway.read()
    if how == "cancel":
        gateway.call.cancel()
    else:
        await gateway.call.done_writing()
    await picker.idle()
    after = await picker.counts("warmpath_ended_requests_total") - before
    assert after.total() == (when != "request")
    assert all('outcome="aborted"' in labels for labels in after)


@pytest.mark.parametrize("field", ["raw_value", "value"])
async def test_errors_of_pods_are_counted_by_their_status(picker: Picker, field: str) -> None:
    model = f"status-{field}"
    for status in ("200", "404", "500", "503"):
        gateway = await picker.asked(request_headers(POST), body_of(model=model))
        await gateway.read()
        await chunks(gateway, "request_body")
        message = ProcessingRequest()
        value: Any = status.encode() if field == "raw_value" else status
        message.response_headers.headers.headers.add(key=":status", **{field: value})
        message.response_headers.end_of_stream = True
        await gateway.send(message)
        await gateway.read()
    await picker.idle()
    errors = await picker.counts("inference_objective_request_error_total")
    assert [
        (value, 'error_code="ModelServerError"' in labels)
        for labels, value in errors.items()
        if f'"{model}"' in labels
    ] == [(2, True)]


async def test_the_pod_that_served_is_believed(picker: Picker) -> None:
    gateway = await picker.asked(request_headers(POST | {"x-request-id": "moved"}, True))
    picked, fallback, _ = destination(await gateway.read()).split(",")
    told = ProcessingRequest()
    fill(told.response_headers, JSON, True)
    served = told.metadata_context.filter_metadata["envoy.lb"]
    served.update({"x-gateway-destination-endpoint-served": fallback})
    await gateway.send(told)
    await gateway.read()
    _, page = await get(picker.admin, "/debug/decisions?request_id=moved")
    (decision,) = json.loads(page)["decisions"]
    assert (decision["endpoint"], decision["picked"][0]) == (fallback, picked)


async def test_the_fallbacks_are_named_in_order(picker: Picker) -> None:
    """`destination` compares header and metadata."""
    picked = await picker.picked(request_headers(POST | {"x-request-id": "order"}, True))
    assert sorted(picked) == sorted(picker.pods)
    _, page = await get(picker.admin, "/debug/decisions?request_id=order")
    (decision,) = json.loads(page)["decisions"]
    assert decision["picked"] == picked
    totals = {each["endpoint"]: each["total"] for each in decision["candidates"]}
    assert [totals[each] for each in picked] == sorted(totals.values(), reverse=True)


async def test_repeated_headers_are_left_alone(picker: Picker) -> None:
    """They are neither set again, as one, nor removed."""
    message = request_headers(POST | {"x-a": "1", DESTINATION: "192.0.2.9:80"}, True)
    message.request_headers.headers.headers.add(key="x-a", raw_value=b"2")
    mutation = (await picker.answer(message)).request_headers.response.header_mutation
    assert set(set_headers(mutation)) == {DESTINATION}
    assert "x-a" not in mutation.remove_headers


# Candidates


@pytest.mark.parametrize("headers", [POST, GET])
@pytest.mark.parametrize(
    ("subset", "allowed"),
    [
        ("{0}", [0]),
        ("{0},{2}", [0, 2]),
        (" {1} , {2} ,", [1, 2]),
        (["{0}", "{1}"], [0, 1]),
        (["{0},{1}", " {2}"], [0, 1, 2]),
        (["{0}", 7, None], [0]),
        (["192.0.2.7:80", "{2}"], [2]),
        ("127.0.0.1", [0, 1, 2]),
        ("", None),
        (" ", None),
        ([], None),
        ([""], None),
        (7.0, None),
        (True, None),
        (None, None),
        ({"a": "{0}"}, None),
        ("192.0.2.7", None),
        ("127.0.0.1:1", None),
        ("no endpoint", None),
    ],
)
async def test_subsets_are_kept_to(
    picker: Picker, headers: Mapping[str, str], subset: Any, allowed: list[int] | None
) -> None:
    """Nothing that a gateway tells lets a request go outside of it, not even nonsense."""

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(each) for each in value]
        return value.format(*picker.pods) if isinstance(value, str) else value

    message = with_subset(filled(subset), headers)
    if allowed is None:
        answer = await picker.answer(message)
        assert status_of(answer) == 503
        assert json.loads(answer.immediate_response.body)["error"]["code"] == "empty_subset"
        assert "retry-after" in set_headers(answer.immediate_response.headers)
    else:
        picked = await picker.picked(message)
        assert sorted(picked) == sorted(picker.pods[each] for each in allowed)


async def test_requests_of_headers_alone_are_spread_within_their_subset(picker: Picker) -> None:
    first = Counter([(await picker.picked(with_subset("127.0.0.1", GET)))[0] for _ in range(40)])
    assert set(first) == set(picker.pods)
    some = ",".join(picker.pods[:2])
    first = Counter([(await picker.picked(with_subset(some, GET)))[0] for _ in range(30)])
    assert set(first) == set(picker.pods[:2])


async def test_equal_pods_take_turns(picker: Picker) -> None:
    first: Counter[str] = Counter()
    for number in range(60):
        answer = await picker.answer(request_headers(POST), body_of(prompt=f"{number} " * 50))
        first[destination(answer).split(",")[0]] += 1
        await picker.close()
    assert set(first) == set(picker.pods)
    assert max(first.values()) < 45


# Codes


@pytest.mark.parametrize("flow", ["", "flow: {enabled: true}"])
@pytest.mark.parametrize("objective", [None, "sheddable"])
async def test_an_empty_pool_is_503(flow: str, objective: str | None) -> None:
    """With a body, of headers alone, in a subset, whatever its priority."""
    more = flow and flow.replace("true", "true, objectives: {sheddable: -1}")
    headers = {} if objective is None else {"x-gateway-inference-objective": objective}
    async with picker_before(more=more) as picker:
        for message, body in (
            (request_headers(POST | headers), body_of()),
            (request_headers(GET | headers, True), None),
            (with_subset(["192.0.2.7:80"], POST | headers), None),
        ):
            answer = await picker.answer(message, body)
            assert status_of(answer) == 503
            assert int(set_headers(answer.immediate_response.headers)["retry-after"]) > 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no json", "invalid_json"),
        (b'{"model":1}', "invalid_field"),
        (b'{"model":"a","model":"b"}', "repeated_field"),
    ],
)
async def test_a_refusal_is_json_and_ends_the_stream(
    picker: Picker, body: bytes, reason: str
) -> None:
    headers = POST | {"content-type": "application/json"}
    gateway = await picker.asked(request_headers(headers), body)
    answer = await gateway.read()
    assert status_of(answer) == 400
    error = json.loads(answer.immediate_response.body)["error"]
    assert (error["code"], set(error)) == (reason, {"message", "type", "param", "code"})
    assert set_headers(answer.immediate_response.headers)["content-type"] == "application/json"
    assert await gateway.ended() is grpc.StatusCode.OK


async def test_filters_that_leave_nobody_are_503() -> None:
    more = "scheduling: {filters: [{type: label, matchLabels: {role: prefill}}]}"
    async with picker_before(IDLE, more=more) as picker:
        assert status_of(await picker.answer(request_headers(POST), body_of())) == 503


FLOW = """\
flow:
  enabled: true
  ttl: {ttl}
  maxRequests: 1
  objectives: {{sheddable: -1, urgent: 10}}
"""


async def test_admission_codes() -> None:
    """Saturated: 429 for what is shed, for what finds no room, and for what waited too long."""
    async with picker_before(BUSY, BUSY, more=FLOW.format(ttl="2s")) as picker:

        async def refused(gateway: Gateway) -> tuple[int, str]:
            answer = await gateway.read()
            code = json.loads(answer.immediate_response.body)["error"]["code"]
            assert int(set_headers(answer.immediate_response.headers)["retry-after"]) > 0
            return status_of(answer), code

        shed = POST | {"x-gateway-inference-objective": "sheddable"}
        assert await refused(await picker.asked(request_headers(shed), body_of())) == (
            429,
            "saturated",
        )
        waiting = await picker.asked(request_headers(POST), body_of())
        await until(lambda: picker.service.waiting == 1)
        full = await picker.asked(request_headers(POST), body_of())
        assert await refused(full) == (429, "queue_full")
        urgent = POST | {"x-gateway-inference-objective": "urgent"}
        displacing = await picker.asked(request_headers(urgent), body_of())
        assert await refused(waiting) == (429, "displaced")
        assert await refused(displacing) == (429, "queue_timeout")

        leaving = await picker.asked(request_headers(POST), body_of())
        await until(lambda: picker.service.waiting == 1)
        leaving.call.cancel()
        await until(lambda: picker.service.waiting == 0)
        assert not (await picker.counts("inference_objective_request_total")).total()


async def test_a_request_without_objective_has_the_default_priority() -> None:
    """One with an objective that nobody knows, too: neither is shed while pods are busy."""
    async with picker_before(BUSY, more=FLOW.format(ttl="60s")) as picker:
        for headers in ({}, {"x-gateway-inference-objective": "unknown"}):
            waiting = await picker.asked(request_headers(POST | headers), body_of())
            await until(lambda: picker.service.waiting == 1)
            waiting.call.cancel()
            await until(lambda: picker.service.waiting == 0)


async def test_rewrites_change_both_bodies() -> None:
    more = (
        "rewrites: [{models: [m], targets: [{model: target}]}]\n"
        "rewriteHeaders: [x-gateway-model-name-rewrite]\n"
    )
    async with picker_before(IDLE, more=more) as picker:
        for headers, target in (({}, "target"), ({"x-gateway-model-name-rewrite": "told"}, "told")):
            message = request_headers(POST | headers)
            gateway = await picker.asked(message, body_of(prompt='"model": "m"'))
            assert destination(await gateway.read())
            sent = b"".join(await chunks(gateway, "request_body"))
            assert sent == body_of(prompt='"model": "m"').replace(b'"m"', f'"{target}"'.encode(), 1)
            await gateway.respond(EVENTS)
            await gateway.read()
            event = b'data: {"model":"%b","choices":[{"text":"\\"model\\":\\"%b\\""}]}\n\n'
            name = target.encode()
            for piece in (event[:13], (event % (name, name))[13:]):
                await gateway.response_body(piece, False)
            await gateway.response_body(b"", True)
            got = b"".join(await chunks(gateway, "response_body"))
            assert got == event % (b"m", name)
