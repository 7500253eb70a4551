"""Usage is found in whatever a server answers, wherever its bytes are cut."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker.usage import MAX_DOCUMENT, MAX_TAIL, Usage, UsageReader, read_usage

DATA = Path(__file__).parents[1] / "data"
EVENTS = "text/event-stream; charset=utf-8"
JSON = "application/json"
TOLD = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def found(content_type: str | None, *chunks: bytes) -> Usage | None:
    reader = UsageReader(content_type)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    return reader.usage


def cut(body: bytes, *places: int) -> list[bytes]:
    edges = [0, *sorted(places), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


def events(*documents: object, end: str = "\n\n") -> bytes:
    shown = [d if isinstance(d, str) else json.dumps(d, ensure_ascii=False) for d in documents]
    return "".join(f"data: {text}{end}" for text in shown).encode()


CHAT = events(
    {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None},
    {"choices": [{"delta": {"content": 'the "usage": {"prompt_tokens": 1} €'}}], "usage": None},
    {"choices": [{"finish_reason": "stop", "delta": {"content": ""}}], "usage": None},
    {"choices": [], "usage": {**TOLD, "prompt_tokens_details": {"cached_tokens": 4}}},
    "[DONE]",
)
CONTINUOUS = events(
    *({"choices": [{}], "usage": {"prompt_tokens": 7, "completion_tokens": n}} for n in range(4)),
    "[DONE]",
)
RESPONSES = b"".join(
    b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps({"type": name, **data}).encode())
    for name, data in (
        ("response.created", {"response": {"id": "r", "usage": None}}),
        ("response.output_text.delta", {"delta": "usage"}),
        (
            "response.completed",
            {
                "response": {
                    "tools": [{"parameters": {"usage": {"input_tokens": 99}}}],
                    "usage": {
                        "input_tokens": 7,
                        "input_tokens_details": {"cached_tokens": 4},
                        "output_tokens": 3,
                        "output_tokens_details": {"reasoning_tokens": 0},
                        "total_tokens": 10,
                    },
                }
            },
        ),
    )
)
ANTHROPIC = b"".join(
    b"event: %b\r\ndata: %b\r\n\r\n" % (data["type"].encode(), json.dumps(data).encode())
    for data in (
        {
            "type": "message_start",
            "message": {
                "usage": {
                    "input_tokens": 2,
                    "cache_creation_input_tokens": 1,
                    "cache_read_input_tokens": 4,
                    "output_tokens": 1,
                }
            },
        },
        {"type": "content_block_delta", "delta": {"partial_json": '{"usage":{"input_tokens":9}}'}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 3},
        },
        {"type": "message_stop"},
    )
)
STREAMS = {
    "chat": (CHAT, Usage(7, 4, 3)),
    "lines ended by CR LF": (CHAT.replace(b"\n", b"\r\n"), Usage(7, 4, 3)),
    "no newline at the end": (CHAT[: CHAT.index(b"\n\ndata: [DONE]")], Usage(7, 4, 3)),
    "comments": (b": ping\n\n" + CHAT.replace(b"\n\n", b"\n\n:\n\n"), Usage(7, 4, 3)),
    "no space": (CHAT.replace(b"data: ", b"data:"), Usage(7, 4, 3)),
    "usage with each event": (CONTINUOUS, Usage(7, None, 3)),
    "responses": (RESPONSES, Usage(7, 4, 3)),
    "anthropic": (ANTHROPIC, Usage(7, 4, 3)),
    "no usage": (events({"choices": [{"text": "usage"}]}, "[DONE]"), None),
    "usage in the text only": (events({"text": '"usage":{"prompt_tokens":1}'}), None),
    "the old name of details": (
        events({"usage": {**TOLD, "prompt_token_details": {"cached_tokens": 4}}}),
        Usage(7, 4, 3),
    ),
    "recorded chat": ((DATA / "vllm_chat_stream.txt").read_bytes(), Usage(159, 128, 6)),
    "recorded completion": ((DATA / "vllm_completion_stream.txt").read_bytes(), None),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_cut_anywhere(name: str) -> None:
    body, usage = STREAMS[name]
    assert found(EVENTS, body) == usage
    assert found(EVENTS, *cut(body, *range(1, len(body)))) == usage
    for place in range(len(body)):
        assert found(EVENTS, *cut(body, place)) == usage


@UNHURRIED
@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 2000), max_size=8))
def test_streams_cut_in_many_places(name: str, places: list[int]) -> None:
    body, usage = STREAMS[name]
    assert found(EVENTS, *cut(body, *(min(place, len(body)) for place in places))) == usage


def test_what_came_before_an_abort_counts() -> None:
    reader = UsageReader(EVENTS)
    for chunk in cut(CONTINUOUS, CONTINUOUS.rindex(b"data: {") + 20):
        reader.feed(chunk)
        break
    assert reader.usage == Usage(7, None, 2)
    reader = UsageReader(EVENTS)
    reader.feed(ANTHROPIC[: ANTHROPIC.index(b"event: content")])
    assert reader.usage == Usage(7, 4, 1)


def test_recorded_answers() -> None:
    recorded = json.loads((DATA / "vllm_responses.json").read_text())
    expected = {
        "chat_first": Usage(175, 0, 8),
        "completion": Usage(60, 0, 6),
        "completion_token_ids": Usage(80, 0, 4),
        "tokenize": None,
    }
    assert expected.keys() <= recorded.keys()
    for name, usage in expected.items():
        body = json.dumps(recorded[name]["response"]).encode()
        assert found(JSON, body) == read_usage(body) == usage
        assert found(JSON, *cut(body, *range(1, len(body)))) == usage


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": TOLD}, Usage(7, None, 3)),
        ({"usage": {**TOLD, "prompt_tokens_details": None}}, Usage(7, None, 3)),
        ({"usage": {**TOLD, "prompt_tokens_details": {"cached_tokens": None}}}, Usage(7, None, 3)),
        ({"usage": {**TOLD, "prompt_tokens_details": {"cached_tokens": 0}}}, Usage(7, 0, 3)),
        ({"usage": {"prompt_tokens": 7, "total_tokens": 7}}, Usage(7, None, 0)),
        ({"usage": {"input_tokens": 7, "output_tokens": 3}}, Usage(7, None, 3)),
        (
            {"usage": {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 3}},
            Usage(7, 5, 3),
        ),
        (
            {"usage": {"input_tokens": 7, "cache_read_input_tokens": None, "output_tokens": 3}},
            Usage(7, None, 3),
        ),
        ({"message": "an error", "usage": TOLD}, Usage(7, None, 3)),
        ({"response": ["x"], "message": {"usage": 5}, "usage": TOLD}, Usage(7, None, 3)),
        ({"data": [{"usage": {"prompt_tokens": 1}}], "usage": TOLD}, Usage(7, None, 3)),
        ({"usage": TOLD, "data": [{"usage": {"prompt_tokens": 1}}]}, Usage(7, None, 3)),
        ({"usage": {**TOLD, "completion_tokens": "3"}}, Usage(7, None, 0)),
        ({"usage": {**TOLD, "completion_tokens": -3}}, Usage(7, None, 0)),
        ({"usage": {**TOLD, "completion_tokens": True}}, Usage(7, None, 0)),
        ({"usage": {**TOLD, "completion_tokens": 10**40}}, Usage(7, None, 0)),
        ({"usage": {"total_tokens": 10}}, None),
        ({"usage": {}}, None),
        ({"usage": None}, None),
        ({"usage": [TOLD]}, None),
        ({"error": {"message": "bad", "usage": TOLD}}, None),
        ({"text": json.dumps({"usage": TOLD})}, None),
        ([{"usage": TOLD}], None),
        ("usage", None),
    ],
)
def test_answers_in_one_piece(answer: object, usage: Usage | None) -> None:
    for indent in (None, 2):
        body = json.dumps(answer, indent=indent).encode()
        assert found(JSON, body) == usage
        assert found("application/json; charset=utf-8", body[:9], body[9:]) == usage
        assert read_usage(body) == usage


def test_counts_of_several_documents_complete_each_other() -> None:
    begun = b'{"usage":{"input_tokens":2,"cache_read_input_tokens":5,"output_tokens":1}}'
    ended = b'{"usage":{"output_tokens":3}}'
    assert read_usage(begun, ended) == Usage(7, 5, 3)
    assert read_usage(ended) == Usage(0, None, 3)
    assert read_usage(b"", ended, b"junk") == read_usage(ended)
    assert read_usage() is None


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (None, json.dumps({"usage": TOLD}).encode()),
        ("text/html", b'<script>{"usage":{"prompt_tokens":7}}</script>'),
        ("text/plain", json.dumps({"usage": TOLD}).encode()),
        (JSON, b'<html>"usage":{"prompt_tokens":7}</html>'),
        (JSON, gzip.compress(json.dumps({"usage": TOLD}).encode())),
        (EVENTS, gzip.compress(CHAT)),
        (JSON, b'upstream connect error, "usage"'),
        (JSON, json.dumps({"usage": TOLD}).encode()[:-1]),
        (JSON, b'{"usage":{"prompt_tokens":7},"x":"\xff'),
        (JSON, b'{"usage":' + b"[" * 100_000),
        (JSON, b'{"usage":{"prompt_tokens":' + b"9" * 10_000 + b"}}"),
        (JSON, b'{"usage":{"\xff":7}}'),
        (EVENTS, json.dumps({"usage": TOLD}).encode()),
        (EVENTS, b'event: "usage"\nid: {"usage":{"prompt_tokens":7}}\n\n'),
        (EVENTS, b"data: " + b'{"usage":' * 100_000 + b"\n\n"),
        (JSON, b""),
        (EVENTS, b""),
        (EVENTS, b"\n\n\n"),
    ],
)
def test_other_bodies_have_none(content_type: str | None, body: bytes) -> None:
    assert found(content_type, body) is None
    assert found(content_type, body[:10], body[10:]) is None


PIECES = st.lists(
    st.binary(max_size=20)
    | st.sampled_from(
        [
            b'"usage"',
            b'"usage":null',
            b":",
            b"{",
            b"}",
            b"\n",
            b"\r\n",
            b"data: ",
            b'"prompt_tokens":',
            b"5",
            b"[",
            b'{"usage":{"prompt_tokens":5}}',
            b'data: {"usage":{"output_tokens":6}}\n',
        ]
    ),
    max_size=15,
)


@UNHURRIED
@given(st.sampled_from([EVENTS, JSON, "text/html", "", None]), PIECES)
def test_any_bytes_in_any_pieces(content_type: str | None, pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    whole = found(content_type, body)
    assert found(content_type, *pieces) == whole
    assert found(content_type, *cut(body, *range(1, len(body)))) == whole
    if content_type == JSON:
        assert read_usage(body) == whole


def long_embeddings(usage: dict[str, Any], after: str = "") -> bytes:
    vectors = ",".join(["0.12345678"] * (2 * MAX_DOCUMENT // 11))
    return f'{{"data":[{vectors}],"usage":{json.dumps(usage)}{after}}}'.encode()


@pytest.mark.parametrize("size", [1000, 65_536, 1_000_003, 10_000_000])
def test_the_end_of_a_long_answer_is_enough(size: int) -> None:
    def read(body: bytes) -> Usage | None:
        return found(JSON, *(body[start : start + size] for start in range(0, len(body), size)))

    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read(long_embeddings(usage)) == Usage(7, 4, 0)
    assert read(long_embeddings(usage, f',"x":"{" " * (MAX_TAIL - 200)}"')) == Usage(7, 4, 0)
    assert read(long_embeddings(usage, f',"x":"{" " * MAX_TAIL}"')) is None
    fakes = ',"usage":{},"usage":{"x":1},"usage":{,"usage":null,"x":"\\"usage\\":{}"'
    assert read(long_embeddings(usage, fakes)) == Usage(7, 4, 0)
    assert read(long_embeddings(usage, ',"usage":{"a":' * 3000)) is None


@pytest.mark.parametrize("size", [1000, 65_536, 1_000_003, 10_000_000])
def test_the_end_of_a_long_event_is_enough(size: int) -> None:
    output = "word " * (MAX_DOCUMENT // 4)
    response = {"output": output, "usage": {"input_tokens": 7, "output_tokens": 3}}
    last = {"type": "response.completed", "response": response}
    body = events({"x": 1}, last, {"x": 2})
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    assert found(EVENTS, *chunks) == Usage(7, None, 3)
    assert found(EVENTS, *chunks, CHAT) == Usage(7, 4, 3)  # and the stream goes on


def test_memory_is_bounded() -> None:
    chunk = b"x" * 100_000
    for content_type in (JSON, EVENTS):
        tracemalloc.start()
        reader = UsageReader(content_type)
        for _ in range(100):
            reader.feed(chunk)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * MAX_DOCUMENT


def test_nothing_counts_after_the_end() -> None:
    reader = UsageReader(EVENTS)
    reader.feed(CHAT)
    reader.finish()
    reader.feed(events({"usage": {"prompt_tokens": 99}}))
    reader.finish()
    assert reader.usage == Usage(7, 4, 3)
