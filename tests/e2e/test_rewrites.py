"""Requests for one model that pods get as requests for another, through real Envoy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from picker.config import Envoy, Rewrite, RewriteTarget, Size
from picker.names import SPLICE
from picker.restore import ModelRestorer
from tests.e2e.gateway import CHAT, JSON, Gateway, chat, refused, running_gateway
from tests.e2e.http2 import connected
from tests.e2e.pods import ACT, Pod
from tests.e2e.splice_lua import SEPARATOR, running_splice
from tests.e2e.test_modes import MODES, listener_for_each_mode
from tests.worker.process import running_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

TARGET = "meta/the target"
HEADER = "x-gateway-model-name-rewrite"
RULES = [Rewrite(models=["m"], targets=[RewriteTarget(model=TARGET)])]
IN_JSON = json.dumps(TARGET).encode()
STREAM = "text/event-stream"

WHOLE = (
    b'{"id":"c","object":"chat.completion","created":1,"model":%b,"choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"{\\"model\\":\\"meta/the target\\"}","model":%b}}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":3}}'
)
EVENT = b'data: {"id":"c","model": %b,"choices":[{"delta":{"content":"\\"model\\": \\"x\\""}}]}\n\n'
USAGE_EVENT = (
    b'data: {"model":%b,"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"
ANTHROPIC = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[],'
    b'"model":%b,"usage":{"input_tokens":7}}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":3}}\n\n'
)
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","tools":'
    b'[{"model":"x"}],"model":%b}}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"model":%b,'
    b'"usage":{"input_tokens":7,"output_tokens":3}}}\n\n'
)


def naming(answer: bytes, *names: str) -> bytes:
    """An answer with names of models in their places."""
    return answer % tuple(json.dumps(name).encode() for name in names)


@pytest.fixture(scope="module", params=["standard", "lean"])
def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(profile: str) -> AsyncIterator[Gateway]:
    async with running_gateway(profile=profile, rewrites=RULES) as gateway:
        yield gateway
        assert "script" not in gateway.envoy.log


def says(gateway: Gateway, kind: str, *pieces: bytes) -> None:
    for pod in gateway.pods:
        pod.reset()
        pod.says = kind, pieces


def asked(pods: Sequence[Pod]) -> tuple[dict[str, str], bytes]:
    """What reached a pod: headers and body."""
    ((headers, body),) = [each for pod in pods for each in pod.asked]
    assert headers.get("content-length", str(len(body))) == str(len(body))
    assert SPLICE not in headers
    return headers, body


async def ask(
    gateway: Gateway, body: Any, *, path: str = CHAT, id: str = "any", **headers: str
) -> bytes:
    """The bytes of an answer, with the length that it tells."""
    told = JSON | {ACT: "say", "x-request-id": id} | headers
    async with gateway.http.post(path, data=body, headers=told) as response:
        assert response.status == 200
        data = await response.read()
        assert response.headers.get("content-length", str(len(data))) == str(len(data))
        return data


async def test_the_pod_sees_the_target_and_the_client_what_it_asked_for(gateway: Gateway) -> None:
    says(gateway, "application/json", naming(WHOLE, TARGET, TARGET))
    body = b'{ "x": {"model":"m"}, "model" :"m","messages":[{"role":"user","content":"\xc3\xbc"}]}'
    assert await ask(gateway, body, id="whole") == naming(WHOLE, "m", TARGET)
    headers, seen = asked(gateway.pods)
    assert seen == body.replace(b'"model" :"m"', b'"model" :' + IN_JSON)
    assert headers["content-type"] == "application/json"
    await gateway.idle()
    decision = await gateway.decision("whole")
    assert (decision["model"], decision["targetModel"]) == ("m", TARGET)
    assert decision["usage"]["promptTokens"] == 7
    labels = f'model_name="m",target_model_name="{TARGET}"'
    assert await gateway.metric("inference_objective_request_total", labels) >= 1


@pytest.mark.parametrize(
    ("path", "answer", "times"),
    [
        (CHAT, EVENT * 3 + DONE, 3),
        ("/v1/completions", EVENT * 3 + DONE, 3),
        ("/v1/messages", ANTHROPIC, 1),
        ("/v1/responses", RESPONSES, 2),
    ],
)
async def test_streams(gateway: Gateway, path: str, answer: bytes, times: int) -> None:
    sent, wanted = (naming(answer, *[name] * times) for name in (TARGET, "m"))
    random = Random(0)
    for number in range(6):
        cuts = [0, *sorted(random.sample(range(1, len(sent)), 3 * number)), len(sent)]
        says(gateway, STREAM, *(sent[start:end] for start, end in pairwise(cuts)))
        assert await ask(gateway, chat(stream=True), path=path, id="s") == wanted
        assert asked(gateway.pods)[1] == chat(stream=True).replace(b'"m"', IN_JSON)
    await gateway.idle()
    usage = (await gateway.decision("s"))["usage"]
    assert (usage is None) == (b"_tokens" not in answer)


async def test_usage_is_asked_for_in_the_same_body(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.service.director, "counts_usage", True)
    sent = naming(EVENT + USAGE_EVENT + DONE, TARGET, TARGET)
    for body in (chat("x" * 300_000, stream=True), b'{"stream":true,"prompt":"","model":"m"}'):
        says(gateway, STREAM, sent[:100], sent[100:])
        assert await ask(gateway, body, id="both") == naming(EVENT + DONE, "m")
        changes = {"model": TARGET, "stream_options": {"include_usage": True}}
        assert json.loads(asked(gateway.pods)[1]) == json.loads(body) | changes
    await gateway.idle()
    assert (await gateway.decision("both"))["usage"]["completionTokens"] == 3


async def test_who_asks_for_usage_gets_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.service.director, "counts_usage", True)
    says(gateway, STREAM, naming(EVENT + USAGE_EVENT + DONE, TARGET, TARGET))
    body = chat(stream=True, stream_options={"include_usage": True})
    assert await ask(gateway, body) == naming(EVENT + USAGE_EVENT + DONE, "m", "m")


async def test_other_models_are_left_alone(gateway: Gateway) -> None:
    answer = naming(WHOLE, TARGET, "m")
    says(gateway, "application/json", answer)
    body = chat().replace(b'"m"', b'"another"')
    headers = {HEADER: "forged"}
    assert await ask(gateway, body, **headers) == answer
    assert asked(gateway.pods)[1] == body


@pytest.mark.parametrize("size", [100, 300_000, 3_000_000])
async def test_bodies_of_any_length(gateway: Gateway, size: int) -> None:
    answer = naming(WHOLE.replace(b'"created":1', b'"created":"%b"' % (b"y" * size)), TARGET, "m")
    says(gateway, "application/json", answer[: size // 2], answer[size // 2 :])
    body = chat("x" * size)
    assert await ask(gateway, body) == answer.replace(IN_JSON, b'"m"', 1)
    assert asked(gateway.pods)[1] == body.replace(b'"m"', IN_JSON)


async def test_bodies_with_trailers_over_http2(gateway: Gateway) -> None:
    for trailers in (True, False):
        says(gateway, STREAM, naming(EVENT, TARGET), DONE)
        async with connected(gateway.envoy.port) as client:
            await client.headers("POST", CHAT, JSON | {ACT: "say"})
            await client.data(chat(stream=True), end=not trailers)
            if trailers:
                await client.trailers({"x-checksum": "1"})
            assert await client.response() == (200, naming(EVENT, "m") + DONE)
        assert json.loads(asked(gateway.pods)[1])["model"] == TARGET


async def test_an_answer_that_must_be_read_is_not_compressed(gateway: Gateway) -> None:
    says(gateway, STREAM, naming(EVENT, TARGET))
    answer = await ask(gateway, chat(stream=True), **{"accept-encoding": "gzip"})
    assert answer == naming(EVENT, "m")
    assert "accept-encoding" not in asked(gateway.pods)[0]


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


async def test_rules_change_while_requests_pass(gateway: Gateway) -> None:
    gateway.service.rewrites.update([Rewrite(targets=[RewriteTarget(model="new")])])
    try:
        says(gateway, "application/json", naming(WHOLE, "new", "new"))
        body = chat().replace(b'"m"', '"é\\"x"'.encode())
        assert await ask(gateway, body) == naming(WHOLE, 'é"x', "new")
        assert json.loads(asked(gateway.pods)[1])["model"] == "new"
    finally:
        gateway.service.rewrites.update(RULES)


async def test_where_a_header_is_believed_it_wins(profile: Any) -> None:
    async with running_gateway(
        profile=profile, rewrites=RULES, rewrite_headers=[HEADER], usage=False
    ) as gateway:
        says(gateway, "application/json", naming(WHOLE, "told", TARGET))
        assert await ask(gateway, chat(), **{HEADER: "told"}) == naming(WHOLE, "m", TARGET)
        assert json.loads(asked(gateway.pods)[1])["model"] == "told"
        for wrong in ("x" * 300, "naïve"):
            headers = JSON | {HEADER: wrong}
            async with gateway.http.post(CHAT, data=chat(), headers=headers) as response:
                assert await refused(response) == (400, "invalid_model")


@pytest.mark.parametrize("fail_open", [False, True])
async def test_the_longest_body(profile: Any, fail_open: bool) -> None:
    """What Envoy keeps of a body may not grow over its limit; in full duplex it keeps nothing."""
    settings = Envoy(profile=profile, fail_open=fail_open)
    keeps = profile == "lean" or fail_open
    async with running_gateway(envoy=settings, max_body=Size(100_000), rewrites=RULES) as gateway:
        grows = len(IN_JSON) - len('"m"')
        for size in (100_000 - grows, 100_000 - grows + 1, 100_000):
            says(gateway, STREAM, naming(EVENT, TARGET))
            body = chat(pad=size - len(chat()))
            if size + grows <= 100_000 or not keeps:
                assert await ask(gateway, body) == naming(EVENT, "m")
                assert len(asked(gateway.pods)[1]) == size + grows
            else:
                async with gateway.http.post(CHAT, data=body, headers=JSON) as response:
                    assert await refused(response) == (413, "body_too_large")
        await gateway.idle()


# Other gateways


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False])
async def any_mode(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    usage = request.param
    async with running_gateway(
        change=listener_for_each_mode, rewrites=RULES, usage=usage
    ) as gateway:
        yield gateway


@pytest.mark.parametrize(("request_mode", "response_mode"), MODES)
async def test_every_mode(any_mode: Gateway, request_mode: str, response_mode: str) -> None:
    name = f"{request_mode}-{response_mode}"
    rewrites = request_mode in ("FULL_DUPLEX_STREAMED", "BUFFERED", "BUFFERED_PARTIAL")
    restores = rewrites and response_mode != "NONE"
    url = f"http://127.0.0.1:{any_mode.envoy.ports[name]}"
    whole, stream = naming(WHOLE, TARGET, TARGET), naming(EVENT * 2 + DONE, TARGET, TARGET)
    async with aiohttp.ClientSession(url) as http:
        for text in ("short", "x" * 300_000):
            for kind, answer in (("application/json", whole), (STREAM, stream)):
                says(any_mode, kind, answer)
                body = chat(text)
                async with http.post(CHAT, data=body, headers=JSON | {ACT: "say"}) as response:
                    got = await response.read()
                    assert response.status == 200
                wanted = answer
                if restores:
                    count = 1 if kind == "application/json" else 2
                    wanted = answer.replace(IN_JSON, b'"m"', count)
                assert got == wanted
                seen = asked(any_mode.pods)[1]
                assert seen == (body.replace(b'"m"', IN_JSON) if rewrites else body)
    await any_mode.idle()
    for stat in ("spurious_msgs_received", "streams_failed"):
        assert await any_mode.envoy.stat(f"http.{name}.ext_proc.{stat}") == 0


# Real workers


async def test_the_official_client_with_real_workers(profile: str) -> None:
    flags = ("--simulate", "instant", "--served-model-name", TARGET, "--no-kv-events")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running_worker(*flags))
        gateway = await stack.enter_async_context(
            running_gateway(
                pods=0,
                addresses=[worker.url.removeprefix("http://")],
                profile=profile,
                rewrites=RULES,
            )
        )
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{gateway.envoy.url}/v1", api_key="none")
        )
        messages: Any = [{"role": "user", "content": "Tell me about harbours."}]
        whole = await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
        assert whole.model == "m"
        assert whole.choices[0].message.content
        stream = await client.completions.create(
            model="m", prompt="Harbours", max_tokens=5, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {"m"}
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


# splice.lua

RESTORER = r"""restorer('"as \\"k\\" ed"', kind == "stream")"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lua() -> AsyncIterator[aiohttp.ClientSession]:
    """Answers with what splice.lua makes of an answer: of the body, cut as the path tells."""
    async with running_splice(RESTORER) as http:
        yield http


def restored(data: bytes, cuts: Sequence[int], *, events: bool) -> bytes:
    """The same by the picker's own reader of answers, which has its own tests."""
    restorer = ModelRestorer('as "k" ed', events=events)
    places = [0, *cuts, len(data)]
    out = [restorer.feed(data[start:end]) for start, end in pairwise(places)]
    return SEPARATOR.join((*out, restorer.finish()))


ANSWERS = [
    naming(WHOLE, TARGET, TARGET),
    naming(EVENT + USAGE_EVENT + DONE, TARGET, '\\"\u20ac\\'),
    naming(ANTHROPIC, TARGET).replace(b"\n", b"\r\n"),
    naming(RESPONSES, TARGET, ""),
    b' \r\n{ "a" : [[{}],"]"] , "message":{"x":[{"model":1}],"model" : "t"}, "model":"t"}\n',
    b'{"response":{"a":1},"message":[{"model":"t"}],"b":"\\\\","\\"model":1,"model":"t\\"","model":"u"}',
    b'data: {"a":1,\r\ndata: "model":"t"}\r\n\r\ndata:{"model":null,"x":"model"}\n: x\n\ndata: [1]',
    b'[{"model":"t"}] {"model":"t"}',
    b'}{"model":"t"}]]{"a":{"model":"t"}},"model":"t"',
    b'{"mod',
    b"da",
]


def rare(data: bytes, random: Random) -> bytes:
    """The same, broken somewhere."""
    place = random.randrange(len(data))
    return data[:place] + random.choice((b"", b'"', b"\\", b"{", b"}", b"\n")) + data[place + 1 :]


@pytest.mark.parametrize("events", [False, True])
async def test_the_script_restores_at_any_cut(lua: aiohttp.ClientSession, events: bool) -> None:
    random = Random(0)
    for answer in ANSWERS:
        cuts: list[Sequence[int]] = [[], range(1, len(answer))]
        cuts += [[cut] for cut in range(1, len(answer))]
        cases = [(answer, each) for each in cuts]
        for _ in range(20):
            broken = rare(answer, random)
            places = range(1, len(broken))
            cases.append((broken, sorted(random.sample(places, min(3, len(places))))))
        for data, each in cases:
            path = f"/{'stream' if events else 'whole'}/" + ",".join(map(str, each))
            async with lua.post(path, data=data) as response:
                assert await response.read() == restored(data, each, events=events), (data, each)
