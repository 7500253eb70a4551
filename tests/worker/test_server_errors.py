"""Bad input, hostile input, and an engine that fails: clean answers, and the service stays up."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any

import pytest

from tests.worker.api import (
    Api,
    ScriptedRunner,
    http_post,
    parse_events,
    serving,
)
from worker.api.bodies import BodyLimits
from worker.config import EngineConfig
from worker.scheduler import Scheduled

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GOOD = b'{"prompt": "x"}'
LARGE_CHUNK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n0\r\n\r\n"
HELLO: Any = [{"role": "user", "content": "Hello"}]


async def still_serves(api: Api) -> None:
    answer = await api.ok(COMPLETION, prompt="x", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    await api.until_idle()


def answered(data: bytes) -> tuple[int, Any]:
    """Status and error object of raw HTTP; the body must be OpenAI's error shape."""
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert len(data) < 2000
    assert b"Traceback" not in data
    assert b".py" not in data
    return status, error


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (COMPLETION, {"prompt": ""}, 400, "prompt", "must not be empty"),
        (COMPLETION, {"prompt": [""]}, 400, "prompt", "must not be empty"),
        (COMPLETION, {"prompt": []}, 400, "prompt", "must not be empty"),
        (COMPLETION, {"prompt": [[]]}, 400, "prompt", "must not be empty"),
        (COMPLETION, {"prompt": ["x", []]}, 400, "prompt", "must not be empty"),
        (COMPLETION, {}, 400, "prompt", "must not be empty"),
        (COMPLETION, {"prompt": [1, "x"]}, 400, "prompt", "cannot mix"),
        (COMPLETION, {"prompt": [259]}, 400, "prompt", "Token id 259 is out of vocabulary"),
        (COMPLETION, {"prompt": [1, -1]}, 400, "prompt", "Token id -1"),
        (COMPLETION, {"prompt": [[2**70]]}, 400, "prompt", "out of vocabulary"),
        (COMPLETION, {"prompt": ["x"] * 129}, 400, "prompt", "at most 128 choices"),
        (COMPLETION, {"prompt": ["x"] * 2, "n": 65}, 400, "prompt", "at most 128 choices"),
        (COMPLETION, {"prompt": "x" * 512}, 400, "input_tokens", "512 input tokens"),
        (COMPLETION, {"prompt": [1] * 600}, 400, "input_tokens", "600 input tokens"),
        (COMPLETION, {"prompt": "x" * 10**6}, 400, "input_text", "1000000 characters"),
        (COMPLETION, {"prompt": "x", "max_tokens": 512}, 400, "max_tokens", "total of 513 tokens"),
        (COMPLETION, {"prompt": "x", "stop": ["a"] * 10_000}, 400, "stop", "at most 64"),
        (COMPLETION, {"prompt": "x", "n": 10**9}, 400, "n", "at most 128"),
        (CHAT, {"messages": []}, 400, "messages", "must not be empty"),
        (CHAT, {"messages": [{}]}, 400, "messages", "messages[0].role"),
        (CHAT, {"messages": [{"role": 1}]}, 400, "messages", "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, 400, "messages", ".content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "only text is supported, got image_url",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, 400, "messages", "got int"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "messages",
            "messages[0].content[0].text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x" * 10**6}]},
            400,
            "input_text",
            "context length is 512 tokens",
        ),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            400,
            "chat_template_kwargs",
            "cannot set 'messages'",
        ),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"_budget": 1}},
            400,
            "chat_template_kwargs",
            "cannot set '_budget'",
        ),
        (
            CHAT,
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
            "Cannot set both",
        ),
        (
            CHAT,
            {"messages": HELLO, "model": "no-such-model"},
            404,
            "model",
            "The model `no-such-model` does not exist. Valid aliases: tiny, tiny-alias.",
        ),
        (CHAT, {"messages": HELLO, "model": "no", "stream": True}, 404, "model", "`no`"),
        (COMPLETION, {"prompt": "x", "model": "m" * 10**6}, 404, "model", "mmm..."),
        ("/tokenize", {}, 400, "prompt", "required"),
        ("/tokenize", {"prompt": "x" * 10**6}, 400, "input_text", "1000000 characters"),
        ("/tokenize", {"prompt": "x", "model": "no"}, 404, "model", "`no`"),
        (CHAT, {"messages": HELLO * 600}, 400, "messages", "at most 512"),
        ("/detokenize", {"tokens": [1] * 100_000}, 400, "tokens", "at most"),
        ("/detokenize", {"tokens": [999]}, 400, "prompt", "Token id 999"),
        ("/v1/nothing", {}, 404, None, "Not Found"),
    ],
)
async def test_refusals(
    path: str, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    async with serving() as api:
        got = answered(await api.raw(http_post(path, json.dumps(body).encode())))
        assert got[0] == status, got
        assert got[1]["param"] == param
        assert message in got[1]["message"]
        await still_serves(api)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (
            http_post(COMPLETION, b'{"prompt": "x"}').replace(b"application/json", b"text/plain"),
            400,
        ),
        (http_post(COMPLETION, GOOD).replace(b"Content-Type: application/json\r\n", b""), 400),
        (http_post(COMPLETION, gzip.compress(bytes(10**8), 9), "Content-Encoding: gzip"), 415),
        (http_post(COMPLETION, b"", "Content-Length: 5000000000"), 413),
        (http_post(COMPLETION, b"x" * 70_000, "Content-Length: 70000"), 413),
        (
            http_post(
                COMPLETION,
                b"10000\r\n" + b"x" * 65536 + b"\r\n0\r\n\r\n",
                "Transfer-Encoding: chunked",
            ),
            413,
        ),
        (http_post(COMPLETION, b"zz\r\n{}\r\n", "Transfer-Encoding: chunked"), 400),
        (http_post(COMPLETION, b"{}", "Content-Length: -2"), 400),
        (http_post(COMPLETION, b"{}", "X: " + "x" * 10_000), 400),
        (http_post(COMPLETION, b"{}", *[f"X{i}: y" for i in range(300)]), 400),
        (b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"BREW / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"complete nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), 400),  # TLS
    ],
)
async def test_broken_and_hostile_http(data: bytes, status: int) -> None:
    async with serving(body_limits=BodyLimits(max_bytes=65_000)) as api:
        got = answered(await api.raw(data))
        assert got[0] == status, got
        await still_serves(api)


async def test_json_of_nothing_but_brackets() -> None:
    async with serving() as api:
        body = b'{"prompt": [' + b"[]," * 1_500_000 + b"[]]}"
        assert answered(await api.raw(http_post(COMPLETION, body)))[0] == 413
        await still_serves(api)


async def test_a_wrong_method_names_the_right_one() -> None:
    async with serving() as api, api.http.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("sent", [b"", b'{"prompt": "x'])
async def test_a_body_that_stays_away_times_out(sent: bytes) -> None:
    async with serving(body_limits=BodyLimits(seconds=0.05)) as api:
        got = answered(await api.raw(http_post(COMPLETION, sent, "Content-Length: 100")))
        assert got[0] == 408
        await still_serves(api)


async def test_a_client_that_leaves_within_its_body_leaves_nothing_behind() -> None:
    async with serving() as api:
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(http_post(COMPLETION, b'{"prompt": "x', "Content-Length: 100"))
        await api.until_active(1)
        writer.close()
        await api.until_active(0)
        await still_serves(api)


async def test_all_bodies_together_are_bounded() -> None:
    async with serving(body_limits=BodyLimits(max_total_bytes=1000)) as api:
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(http_post(COMPLETION, b"x" * 900, "Content-Length: 901"))
        await api.until_active(1)
        data = await api.raw(http_post(COMPLETION, b"x" * 200))
        assert answered(data)[0] == 503
        assert b"Retry-After: 1" in data
        writer.close()
        await api.until_active(0)
        await still_serves(api)


async def test_tools_nested_without_end() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    async with serving() as api:
        status, answer = await api.post(CHAT, {"messages": HELLO, "tools": [deep]})
        assert status == 400, answer
        await still_serves(api)


async def test_pipelined_requests_are_answered_in_order() -> None:
    def request(text: str) -> bytes:
        body = json.dumps({"prompt": text, "max_tokens": 0, "echo": True}).encode()
        return http_post(COMPLETION, body).replace(b"Connection: close", b"Connection: keep-alive")

    last = http_post("/v1/nothing", b"{}")
    async with serving() as api:
        data = await api.raw(request("first") + request("second") + last)
    assert data.index(b'"first"') < data.index(b'"second"') < data.index(b"404 Not Found")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic sécret"}, 401),
        ({"Authorization": "Bearer sécret"}, 200),
        ({"Authorization": "bearer  sécret"}, 200),
    ],
)
async def test_the_api_key(headers: dict[str, str], status: int) -> None:
    async with serving(api_key="sécret") as api:
        got, answer = await api.post(COMPLETION, {"prompt": "x"}, headers)
        assert got == status
        if status == 401:
            assert answer["error"]["code"] == 401
        for path in ("/health", "/version", "/metrics", "/ping"):
            assert (await api.get(path))[0] == 200
        for path in ("/v1/models", "/load", "/kv_event_sources", "/v1/nothing"):
            assert (await api.get(path))[0] == 401


async def test_a_full_queue_is_503_and_counted() -> None:
    gate = threading.Event()
    config = EngineConfig(num_blocks=512, max_model_len=512, max_num_seqs=1, max_num_queued_reqs=2)
    async with serving(ScriptedRunner("x", lambda batch: gate.wait()), config=config) as api:
        try:
            first = asyncio.create_task(api.ok(COMPLETION, prompt="x"))
            await api.until_submitted(1)
            async with api.http.post(COMPLETION, json={"prompt": "y", "n": 5}) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert "waiting" in (await response.json())["error"]["message"]
        finally:
            gate.set()
        assert (await first)["choices"][0]["text"] == "x"
        await still_serves(api)
        assert b'reason="max_num_queued_reqs"} 1.0' in (await api.get("/metrics"))[1]


def fails_after(tokens: int, gate: threading.Event | None = None) -> ScriptedRunner:
    """Breaks down over any longer prompt, once an answer has so many tokens and `gate` is set."""

    def check(batch: list[Scheduled]) -> None:
        for sequence, _ in batch:
            if sequence.num_prompt_tokens > 1 and sequence.num_output_tokens >= tokens:
                assert gate is None or gate.wait(10)
                raise RuntimeError("secret: the model broke")

    return ScriptedRunner("hello", check)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_before_the_first_token(stream: bool, n: int) -> None:
    async with serving(fails_after(0)) as api:
        body = {"messages": HELLO, "stream": stream, "n": n}
        data = await api.raw(http_post(CHAT, json.dumps(body).encode()))
        status, error = answered(data)
        assert status == 500
        assert error["type"] == "InternalServerError"
        assert b"secret" not in data
        await still_serves(api)


@pytest.mark.parametrize("n", [1, 3])
async def test_an_engine_that_fails_within_a_stream(n: int) -> None:
    gate = threading.Event()
    options = {"include_usage": True}
    body = {"messages": HELLO, "stream": True, "n": n, "stream_options": options}
    async with serving(fails_after(3, gate)) as api:
        async with api.http.post(CHAT, json=body) as response:
            assert response.status == 200
            begun = await response.content.readuntil(b"\n\n")
            gate.set()
            text = (begun + await response.content.read()).decode()
        *events, last = parse_events(text)
        assert last["error"]["code"] == 500
        assert "secret" not in text
        assert events
        assert all(event["choices"] for event in events)  # no usage is made up
        await still_serves(api)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_engine() -> None:
    class Dying(ScriptedRunner):
        def run(self, batch: Any) -> Any:
            raise SystemExit  # passes by the engine's own handling, as a crash would

    async with serving(Dying("x")) as api:
        status, _ = await api.post(COMPLETION, {"prompt": "x"})
        assert status in (500, 503)
        status, answer = await api.post(COMPLETION, {"prompt": "x"})
        assert status == 503, answer
        assert (await api.post("/reset_prefix_cache", {}))[0] == 503
        assert (await api.get("/health"))[0] == 503
        assert (await api.get("/ready"))[0] == 503
        assert (await api.get("/metrics"))[0] == 200
