"""Usage that the picker asks for and clients do not see, through real Envoy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from picker.config import Envoy, Size
from picker.names import SPLICE
from picker.sse import MAX_EVENT, UsageStripper
from tests.e2e.gateway import CHAT, JSON, Gateway, chat, running_gateway
from tests.e2e.http2 import connected
from tests.e2e.pods import ACT, DONE, TOKENS, USAGE, USAGE_EVENT, Pod
from tests.e2e.splice_lua import SEPARATOR, running_splice
from tests.e2e.test_modes import MODES, listener_for_each_mode
from tests.worker.process import running_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIN = b"".join((*TOKENS, DONE))
WITH_USAGE = b"".join((*TOKENS, USAGE_EVENT, DONE))
OPTIONS = '"stream_options":{"include_usage":true}'


@pytest.fixture(scope="module", params=["standard", "lean"])
def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(profile: str) -> AsyncIterator[Gateway]:
    async with running_gateway(profile=profile) as gateway:
        gateway.service.director.counts_usage = True
        yield gateway
        assert "script" not in gateway.envoy.log


def asked(pods: Sequence[Pod]) -> tuple[dict[str, str], bytes]:
    """What reached a pod since the last time: headers and body."""
    ((headers, body),) = [each for pod in pods for each in pod.asked]
    for pod in pods:
        pod.reset()
    assert headers.get("content-length", str(len(body))) == str(len(body))
    assert SPLICE not in headers
    return headers, body


async def answered(
    gateway: Gateway, body: Any, *, act: str = "tokens", id: str = "", **headers: str
) -> bytes:
    """The bytes of a stream."""
    told = JSON | {ACT: act, "x-request-id": id or "any"} | headers
    async with gateway.http.post(CHAT, data=body, headers=told) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream"
        return await response.read()


async def told_usage(gateway: Gateway, id: str) -> Any:
    await gateway.idle()
    return (await gateway.decision(id))["usage"]


COUNTED = {
    "promptTokens": USAGE["prompt_tokens"],
    "completionTokens": USAGE["completion_tokens"],
    "cachedTokens": None,
}


async def test_the_pod_is_asked_and_the_client_does_not_see_it(gateway: Gateway) -> None:
    body = chat("Grüße, 世界", stream=True, user="x")
    assert await answered(gateway, body, id="asked") == PLAIN
    headers, seen = asked(gateway.pods)
    assert seen == b"{" + OPTIONS.encode() + b"," + body[1:]
    assert headers["content-type"] == "application/json"
    assert await told_usage(gateway, "asked") == COUNTED


async def test_who_asks_for_usage_gets_it(gateway: Gateway) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    assert await answered(gateway, body, id="asks") == WITH_USAGE
    assert asked(gateway.pods)[1] == body
    assert await told_usage(gateway, "asks") == COUNTED


async def test_where_nobody_counts_streams_are_left_alone(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.service.director, "counts_usage", False)
    body = chat(stream=True)
    assert await answered(gateway, body, id="uncounted") == PLAIN
    assert asked(gateway.pods)[1] == body
    assert await told_usage(gateway, "uncounted") is None


@pytest.mark.parametrize("size", [100, 200_000, 3_000_000])
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_bodies_of_any_length(gateway: Gateway, size: int, in_pieces: bool) -> None:
    options = {"include_usage": False, "more": [1]}
    body = chat("x" * size, stream_options=options, stream=True)
    parts = pieces(body[:50], body[50 : size // 2], body[size // 2 :])
    assert await answered(gateway, parts if in_pieces else body) == PLAIN
    seen = asked(gateway.pods)[1]
    assert seen == body.replace(b'"include_usage": false', b'"include_usage": true')


@pytest.mark.parametrize("fail_open", [False, True])
async def test_the_longest_body(profile: Any, fail_open: bool) -> None:
    """What Envoy keeps of a body may not grow over its limit; in full duplex it keeps nothing."""
    settings = Envoy(profile=profile, fail_open=fail_open)
    keeps = profile == "lean" or fail_open
    async with running_gateway(envoy=settings, max_body=Size(100_000)) as gateway:
        gateway.service.director.counts_usage = True
        grows = len(OPTIONS) + 1
        for size in (100_000 - grows, 100_000 - grows + 1, 100_000):
            body = chat(stream=True)
            body += b" " * (size - len(body))
            assert await answered(gateway, body) == PLAIN
            spliced = not keeps or size + grows <= 100_000
            assert len(asked(gateway.pods)[1]) == size + grows * spliced


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_bodies_with_trailers_over_http2(gateway: Gateway) -> None:
    for trailers in (True, False):
        async with connected(gateway.envoy.port) as client:
            await client.headers("POST", CHAT, JSON | {ACT: "tokens"})
            await client.data(chat(stream=True), end=not trailers)
            if trailers:
                await client.trailers({"x-checksum": "1"})
            assert await client.response() == (200, PLAIN)
        assert json.loads(asked(gateway.pods)[1])["stream_options"] == {"include_usage": True}


async def test_an_answer_that_must_be_read_is_not_compressed(gateway: Gateway) -> None:
    headers = {"accept-encoding": "gzip"}
    assert await answered(gateway, chat(stream=True), act="gzip", id="gzip", **headers) == PLAIN
    assert await told_usage(gateway, "gzip") == COUNTED
    asked(gateway.pods)


async def test_other_answers_pass(gateway: Gateway) -> None:
    """The pod shows the request instead of streaming."""
    headers = JSON | {"x-request-id": "shown"}
    async with gateway.http.post(CHAT, data=chat(stream=True), headers=headers) as response:
        assert (await response.json())["usage"] == USAGE
    assert (await told_usage(gateway, "shown"))["promptTokens"] == USAGE["prompt_tokens"]


async def test_events_pass_one_by_one(gateway: Gateway) -> None:
    headers = JSON | {ACT: "stream", "x-request-id": "one-by-one"}
    async with gateway.http.post(CHAT, data=chat(stream=True), headers=headers) as response:
        decision = await gateway.decision("one-by-one")
        (pod,) = (pod for pod in gateway.pods if pod.address == decision["endpoint"])
        for number in range(3):
            pod.go.release()
            assert await response.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
        pod.stop()
        assert await response.content.read() == b""
    await gateway.idle()


# Real workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(profile: str) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway before real workers, and the address of one of them."""
    flags = ("--simulate", "instant", "--served-model-name", "m", "--no-kv-events")
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(running_worker(*flags)) for _ in range(2)]
        addresses = [worker.url.removeprefix("http://") for worker in running]
        gateway = await stack.enter_async_context(
            running_gateway(pods=0, addresses=addresses, profile=profile)
        )
        gateway.service.director.counts_usage = True
        yield gateway, running[0].url


@dataclass
class Seen:
    """What the official client makes of a stream, but for what differs from answer to answer."""

    text: str = ""
    finish: str | None = None
    names: set[str] = field(default_factory=set)  # of members, besides `system_fingerprint`
    usage: Any = None
    without_choices: int = 0


async def streamed(url: str, call: str, **options: Any) -> Seen:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 12, "seed": 7, "stream": True, **options}
    seen = Seen()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        if call == "chat":
            messages = [{"role": "user", "content": "Tell me about harbours."}]
            stream = await client.chat.completions.create(messages=messages, **asked)
        else:
            stream = await client.completions.create(prompt="Harbours are", **asked)
        async for chunk in stream:
            seen.names |= set(chunk.model_dump(exclude_unset=True)) - {"system_fingerprint"}
            seen.usage = chunk.usage
            seen.without_choices += not chunk.choices
            for choice in chunk.choices:
                text = choice.delta.content if call == "chat" else choice.text
                seen.text += text or ""
                seen.finish = choice.finish_reason
    return seen


async def last_usage(gateway: Gateway) -> Any:
    await gateway.idle()
    async with gateway.admin.get("/debug/decisions") as response:
        return (await response.json())["decisions"][0]["usage"]


@pytest.mark.parametrize("call", ["chat", "completion"])
async def test_the_official_client_sees_what_it_would_have_seen(
    workers: tuple[Gateway, str], call: str
) -> None:
    gateway, worker = workers
    seen = await streamed(gateway.envoy.url, call)
    assert seen == await streamed(worker, call)
    assert seen.text
    assert (seen.finish, seen.usage, seen.without_choices) == ("length", None, 0)
    usage = await last_usage(gateway)
    assert usage["completionTokens"] == 12
    assert usage["promptTokens"] > 0


@pytest.mark.parametrize("call", ["chat", "completion"])
async def test_the_official_client_gets_the_usage_that_it_asks_for(
    workers: tuple[Gateway, str], call: str
) -> None:
    gateway, _ = workers
    seen = await streamed(gateway.envoy.url, call, stream_options={"include_usage": True})
    assert seen.without_choices == 1
    assert seen.usage.completion_tokens == 12
    assert (await last_usage(gateway))["promptTokens"] == seen.usage.prompt_tokens


async def test_the_end_of_the_stream_is_kept(workers: tuple[Gateway, str]) -> None:
    gateway, _ = workers
    data = chat("Hello", stream=True, max_tokens=3)
    async with gateway.http.post(CHAT, data=data, headers=JSON) as response:
        stream = await response.read()
    assert stream.endswith(b"\n\ndata: [DONE]\n\n")
    assert b"usage" not in stream


# Other gateways


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def any_mode() -> AsyncIterator[Gateway]:
    async with running_gateway(change=listener_for_each_mode) as gateway:
        gateway.service.director.counts_usage = True
        yield gateway


@pytest.mark.parametrize(("request_mode", "response_mode"), MODES)
async def test_every_mode(any_mode: Gateway, request_mode: str, response_mode: str) -> None:
    name = f"{request_mode}-{response_mode}"
    asks = request_mode in ("FULL_DUPLEX_STREAMED", "BUFFERED") and response_mode not in (
        "NONE",
        "BUFFERED_PARTIAL",
    )
    url = f"http://127.0.0.1:{any_mode.envoy.ports[name]}"
    id = f"the-splice-of-{name}".ljust(40, "-")
    headers = JSON | {ACT: "tokens", "x-request-id": id}
    async with aiohttp.ClientSession(url) as http:
        for text in ("short", "x" * 3_000_000):
            body = chat(text, stream=True)
            async with http.post(CHAT, data=body, headers=headers) as response:
                assert (response.status, await response.read()) == (200, PLAIN)
            seen_headers, seen = asked(any_mode.pods)
            assert seen == (b"{" + OPTIONS.encode() + b"," + body[1:] if asks else body)
            if asks:
                assert ("content-length" in seen_headers) == (request_mode == "BUFFERED")
            usage = await told_usage(any_mode, id)
            assert usage == (COUNTED if asks else None)
    for stat in ("spurious_msgs_received", "streams_failed"):
        assert await any_mode.envoy.stat(f"http.{name}.ext_proc.{stat}") == 0


# splice.lua


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lua() -> AsyncIterator[aiohttp.ClientSession]:
    """Answers with what splice.lua makes of a stream: of the body, cut as the path tells."""
    async with running_splice("stripper()") as http:
        yield http


def stripped(stream: bytes, cuts: Sequence[int]) -> bytes:
    """The same by the picker's own reader of streams, which has its own tests."""
    stripper = UsageStripper()
    places = [0, *cuts, len(stream)]
    out = [stripper.feed(stream[start:end]) for start, end in pairwise(places)]
    return SEPARATOR.join((*out, stripper.finish()))


STREAMS = [
    WITH_USAGE,
    WITH_USAGE.replace(b"\n", b"\r\n"),
    b": comment\n\n\n" + WITH_USAGE + b"\n\n\r\n",
    USAGE_EVENT + b"event: x\n" + USAGE_EVENT + TOKENS[0],
    TOKENS[0] + USAGE_EVENT[:-2],
    TOKENS[0] + USAGE_EVENT[:-9],
    b'data: {"choices":[],"usage":null}\n\ndata: {"choices": [ ], "usage" : {"a":{}}}\n\nrest',
]


@pytest.mark.parametrize("stream", STREAMS)
async def test_the_script_strips_at_any_cut(lua: aiohttp.ClientSession, stream: bytes) -> None:
    random = Random(0)
    all_bytes = range(1, len(stream))
    cuts: list[Sequence[int]] = [[], all_bytes, *([cut] for cut in all_bytes)]
    cuts += [sorted(random.sample(all_bytes, 3)) for _ in range(20)]
    for each in cuts:
        path = "/stream/" + ",".join(map(str, each))
        async with lua.post(path, data=stream) as response:
            assert await response.read() == stripped(stream, each), each


async def test_the_script_passes_an_event_that_is_too_long(lua: aiohttp.ClientSession) -> None:
    event = TOKENS[0].replace(b"a", b"a" * (MAX_EVENT + 10))
    for stream in (event + WITH_USAGE, event.replace(b"\n\n", b"\n\r\n") + WITH_USAGE):
        end = stream.index(b"\n")
        for cut in (1, MAX_EVENT - 5, end - 1, end, end + 1, end + 2, end + 3, end + 4):
            for cuts in (
                [cut],
                sorted({MAX_EVENT + 3, cut}),
                sorted({MAX_EVENT + 3, cut, cut + 1}),
            ):
                path = "/stream/" + ",".join(map(str, cuts))
                async with lua.post(path, data=stream) as response:
                    assert await response.read() == stripped(stream, cuts), cuts
