"""The model's name that a client asked for, put back into answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from picker.restore import MAX_STEPS, ModelRestorer

ASKED = 'gpt "4" é'
ASKED_JSON = json.dumps(ASKED).encode()
CHAT = (
    '{"id":"c","object":"chat.completion","created":1,"model":@,"choices":[{"index":0,"message":'
    '{"role":"assistant","content":"{\\"model\\":\\"target\\"} \\\\","model":"target"},"logprobs":'
    '{"content":[{"token":"\\"model\\"","bytes":[1,2]}]}}],"usage":{"model":"target"}}'
)
EVENTS = [  # @ is where the model is named
    'data: {"id":"c","model":@,"choices":[{"delta":{"content":"\\"model\\": \\"a\\""}}]}',
    'data:{"type":"response.created","response":{"id":"r","tools":[{"model":"target"}],'
    '"model":@,"x":{"model":"b"}},"sequence_number":0}',
    'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[],'
    '"model":@,"usage":{"input_tokens":1}}}',
    'data: {"type":"content_block_delta","delta":{"model":"target","text":"x"}}',
    "data: [DONE]",
    ': {"model":"target"}',
    'id: {"model":"target"}',
    'data: {"a":1,\ndata: "model":@}',
]


def both(text: str) -> tuple[bytes, bytes]:
    """As the pod says it, and as the client shall see it."""
    return text.replace("@", '"target"').encode(), text.encode().replace(b"@", ASKED_JSON)


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(places):
        yield data[start:end]


def restored(
    data: bytes, cuts: Sequence[int] = (), *, events: bool = False, name: str = ASKED
) -> bytes:
    restorer = ModelRestorer(name, events=events)
    out = b"".join(restorer.feed(piece) for piece in pieces(data, cuts))
    return out + restorer.finish()


def every_cut(data: bytes, wanted: bytes, *, events: bool = False) -> None:
    assert restored(data, events=events) == wanted
    assert restored(data, range(len(data)), events=events) == wanted
    for cut in range(len(data)):
        assert restored(data, [cut], events=events) == wanted


def test_only_the_name_at_the_top_changes() -> None:
    every_cut(*both(CHAT))


@pytest.mark.parametrize(
    "document",
    [
        '{"model":@}',
        ' \r\n{ "model" : @ , "a":1}\n',
        '{"data":[[[1,"]"]],{"a":{}}],"model":@}',
        '{"model":@,"x":"\\"model\\"","model":"again"}',
        '{"response":{"model":@,"a":[{}]},"b":2}',
        '{"message":{"a":{"model":"t"},"model":@}}',
        '{"response":{"a":1},"message":{},"model":@}',
        '{"models":"t","mode":"t","model ":"t"}',
        '{"model":null,"a":{"model":"t"}}',
        '{"model":["t"],"message":[{"model":"t"}],"response":"model"}',
        '{"a":{"model":"t"},"b":[{"model":"t"}],"c":{"response":{"model":"t"}}}',
        '{"message":{"response":{"model":"t"}}}',
        '[{"model":"t"}]',
        '"model"',
        "",
        '{"error":{"message":"the model \\"t\\" is not known","code":404}}',
        '{"' + "k" * 100 + '":"model","object":{"b":"' + "\\\\" * 50 + '"}}',
        '}}{"model":"t"}',
        '{"a":]]}{"model":"t"}',
    ],
)
def test_documents(document: str) -> None:
    every_cut(*both(document))


@pytest.mark.parametrize("name", ['"a \\" b \\\\"', '""', '"\\u0022, \\"model\\":"', '"cut off'])
def test_whatever_the_pod_calls_it(name: str) -> None:
    every_cut(b'{"a":1,"model": %b' % name.encode(), b'{"a":1,"model": %b' % ASKED_JSON)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events(end: str) -> None:
    stream = "".join(f"{event}\n\n" for event in EVENTS).replace("\n", end)
    every_cut(*both(stream), events=True)


names = st.sampled_from(["model", "response", "message", "a", "mode", 'model"', "models", "é\\"])
texts = st.one_of(st.text(max_size=6), st.sampled_from(['"model":"t"', "\\", '{"model":"t"}']))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)
spacings: list[tuple[Any, Any]] = [(None, (",", ":")), (None, (", ", ": ")), (1, (" ,", " : "))]
cuts = st.lists(st.integers(0, 10_000), max_size=12)


def replaced(document: Any) -> Any:
    """What the client shall see, by a reader of JSON: the first name that is a text."""
    if not isinstance(document, dict):
        return document
    wanted = dict(document)
    for key, value in document.items():
        if key == "model" and isinstance(value, str):
            return wanted | {"model": ASKED}
        if key in ("response", "message") and isinstance(value, dict):
            named = isinstance(value.get("model"), str)
            if named:
                return wanted | {key: value | {"model": ASKED}}
    return wanted


@given(values, cuts, st.sampled_from(spacings), st.booleans())
@example({"message": {"a": [{}], "model": "t"}}, [], spacings[2], True)
def test_documents_of_any_shape_at_any_cut(
    document: Any, where: list[int], spacing: tuple[Any, Any], ascii_only: bool
) -> None:
    indent, separators = spacing

    def write(value: Any) -> bytes:
        text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
        return text.encode()

    got = restored(write(document), where)
    assert json.loads(got) == replaced(document)
    if replaced(document) == document:
        assert got == write(document)


@given(st.lists(values, max_size=4), cuts)
def test_streams_of_any_documents_at_any_cut(documents: list[Any], where: list[int]) -> None:
    def write(values: Sequence[Any]) -> bytes:
        return b"".join(b"data: %b\n\n" % json.dumps(value).encode() for value in values)

    got = restored(write(documents), where, events=True)
    lines = got.split(b"\n\n")[:-1]
    assert [json.loads(line.removeprefix(b"data: ")) for line in lines] == [
        replaced(document) for document in documents
    ]


@given(st.binary(max_size=60), cuts, st.booleans())
def test_what_is_no_json_passes_whole(noise: bytes, where: list[int], events: bool) -> None:
    data = noise.replace(b"model", b"")
    assert restored(data, where, events=events) == data


@pytest.mark.parametrize(
    "endless",
    [
        lambda: b'{"' + b"k" * 4096,
        lambda: b"k" * 4096,
        lambda: b'{"model":"' + b"k" * 4096,
        lambda: b'{"a":' + b"[" * 4096,
    ],
)
@pytest.mark.parametrize("events", [False, True])
def test_hardly_anything_is_held_back(endless: Callable[[], bytes], events: bool) -> None:
    restorer = ModelRestorer(ASKED, events=events)
    beginning = b"data: " * events + endless()
    passed = sum(len(restorer.feed(piece)) for piece in pieces(beginning, range(0, 4096, 7)))
    swallowed = 4096 - len(ASKED_JSON) + 1 if b'"model":' in beginning else 0
    assert passed + len(restorer.finish()) == len(beginning) - swallowed
    assert len(restorer.finish()) == 0


def test_a_document_without_end_is_not_read_without_end() -> None:
    """Nobody's answer has so many brackets before it names its model."""
    few, many = (b'{"a":[%b],"model":"t"}' % (b"[[]]," * count) for count in (500, MAX_STEPS))
    assert restored(few) == few.replace(b'"t"', ASKED_JSON)
    assert restored(many) == many
