from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.sse import MAX_EVENT, UsageStripper

RECORDED = Path(__file__).parents[1] / "data/vllm_chat_stream.txt"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def stripped(stream: bytes, cuts: Sequence[int] = ()) -> bytes:
    stripper = UsageStripper()
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    out = [stripper.feed(stream[start:end]) for start, end in pairwise(places)]
    return b"".join((*out, stripper.finish()))


cuts = st.lists(st.integers(0, 1 << 20), max_size=8)


@given(cuts)
def test_a_recorded_stream_loses_the_event_and_nothing_else(where: list[int]) -> None:
    stream = RECORDED.read_bytes()
    events = stream.split(b"\n\n")
    (extra,) = (event for event in events if b'"choices":[],"usage":{' in event)
    assert stripped(stream, where) == stream.replace(extra + b"\n\n", b"")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_single_bytes(end: bytes) -> None:
    stream = (TOKEN + USAGE + DONE).replace(b"\n", end)
    assert stripped(stream, range(len(stream))) == (TOKEN + DONE).replace(b"\n", end)


@pytest.mark.parametrize(
    "event",
    [
        b'data:{"usage":{"a":1}, "choices" : [ ]}\n\n',
        b'id: 1\nevent: x\ndata: {"choices":[],\ndata: "usage":{}}\nretry: 3\n\n',
        USAGE.replace(b"\n\n", b"\r\n\n"),
    ],
)
def test_other_ways_to_write_it(event: bytes) -> None:
    assert stripped(TOKEN + event + DONE) == TOKEN + DONE


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[]}\n\n',
        b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":7}}\n\n',
        b'data: {"usage":{"prompt_tokens":7}}\n\n',
        b'data: {"choices":null,"usage":{"prompt_tokens":7}}\n\n',
        b'data: {"choices":[{"text":"\\"choices\\":[],\\"usage\\":{"}]}\n\n',
        b': "choices":[],"usage":{}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":7}\n\n',
        b'data: {"choices":[],"of":{"usage":{"prompt_tokens":7}}}\n\n',
        b'data: {"error":{"message":"usage"}}\n\n',
        b'data: "usage"\n\n',
        b'event: {"choices":[],"usage":{}}\n\n',
    ],
)
def test_other_events_pass(event: bytes) -> None:
    assert stripped(TOKEN + event + DONE) == TOKEN + event + DONE


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("empty", [b"\n", b"\r\n", b"\n\n"])
def test_empty_lines_pass_wherever_they_come(empty: bytes, cut: int) -> None:
    stream = TOKEN + empty + USAGE + empty + DONE
    assert stripped(stream, [len(TOKEN) + cut]) == TOKEN + empty + empty + DONE


@given(st.binary(), cuts)
def test_any_bytes_pass(data: bytes, where: list[int]) -> None:
    assert stripped(data, where) == data


parts = st.lists(
    st.sampled_from([TOKEN, USAGE, DONE, b"\n", b"\r\n", b"\r", b": x\n", b"data: ", b"\xe4", b"}"])
)


@given(parts, cuts)
def test_the_cuts_do_not_matter(pieces: list[bytes], where: list[int]) -> None:
    stream = b"".join(pieces)
    assert stripped(stream, where) == stripped(stream)


@given(st.lists(st.sampled_from([TOKEN, USAGE, DONE])), cuts)
def test_complete_events_are_not_held_back(events: list[bytes], where: list[int]) -> None:
    stripper = UsageStripper()
    stream = b"".join(events)
    out = b""
    places = [0, *sorted(cut % (len(stream) + 1) for cut in where), len(stream)]
    for start, end in pairwise(places):
        out += stripper.feed(stream[start:end])
        complete = stream[: stream.rfind(b"\n\n", 0, end) + 2] if b"\n\n" in stream[:end] else b""
        assert out == complete.replace(USAGE, b"")


def test_an_unfinished_event_at_the_end_passes_unless_it_is_the_extra_one() -> None:
    for left in (b"", b"data: {", b"\n", TOKEN[:-1], USAGE[:-9]):
        assert stripped(TOKEN + left) == TOKEN + left
    for left in (USAGE[:-1], USAGE[:-2]):
        assert stripped(TOKEN + left) == TOKEN


@given(st.integers(-300, 300), cuts)
def test_what_is_held_is_bounded(more: int, where: list[int]) -> None:
    """An event that is too long passes, whatever it is; those after it are read again."""
    told = json.dumps({"choices": [], "usage": {}, "pad": "x" * (MAX_EVENT - 100 + more)})
    event = f"data: {told}\n\n".encode()
    stream = TOKEN + event + USAGE + DONE
    left = event if len(event) > MAX_EVENT else b""
    assert stripped(stream, where) == TOKEN + left + DONE


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n"])
@pytest.mark.parametrize("cut", [-1, 0, 1, 2, 3])
def test_the_end_of_an_event_that_is_too_long_may_be_cut(end: bytes, cut: int) -> None:
    event = b"data: " + b"x" * MAX_EVENT
    stream = event + end + USAGE + DONE
    assert stripped(stream, [len(event) + cut]) == event + end + DONE
    assert stripped(stream, [len(event) - 1, len(event) + cut]) == event + end + DONE


def test_a_stream_without_events_passes() -> None:
    stripper = UsageStripper()
    out = b"".join(stripper.feed(b"x" * 10_000) for _ in range(100))
    assert len(out) >= 1_000_000 - MAX_EVENT
    assert out + stripper.finish() == b"x" * 1_000_000
