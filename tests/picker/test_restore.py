"""The model's name that a client asked for, put back into answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from picker.restore import ModelRestorer

ASKED = 'gpt "4" é'
ASKED_JSON = json.dumps(ASKED).encode()
CHAT = (
    '{"id":"c","object":"chat.completion","created":1,"model":"target","choices":[{"index":0,'
    '"message":{"role":"assistant","content":"{\\"model\\":\\"target\\"} \\\\","model":"target"},'
    '"logprobs":{"content":[{"token":"\\"model\\"","bytes":[1,2]}]}}],"usage":{"model":"target"}}'
)
EVENTS = [
    'data: {"id":"c","model":"target","choices":[{"delta":{"content":"\\"model\\": \\"a\\""}}]}',
    'data:{"type":"response.created","response":{"id":"r","tools":[{"model":"target"}],'
    '"model":"target","x":{"model":"b"}},"sequence_number":0}',
    'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[],'
    '"model":"target","usage":{"input_tokens":1}}}',
    'data: {"type":"content_block_delta","delta":{"model":"target","text":"x"}}',
    "data: [DONE]",
    ': {"model":"target"}',
    'id: {"model":"target"}',
    'data: {"a":1,\ndata: "model":"target"}',
]
RESTORED = [
    EVENTS[0].replace('"model":"target"', f'"model":{ASKED_JSON.decode()}'),
    EVENTS[1].replace('],"model":"target"', f'],"model":{ASKED_JSON.decode()}').replace(
        '}],\n', '}],'
    ),
    EVENTS[2].replace('"target"', ASKED_JSON.decode()),
    *EVENTS[3:7],
    EVENTS[7].replace('"target"', ASKED_JSON.decode()),
]


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in zip(places, places[1:], strict=False):
        yield data[start:end]


def restored(
    data: bytes, cuts: Sequence[int] = (), *, events: bool = False, name: str = ASKED
) -> bytes:
    restorer = ModelRestorer(name, events=events)
    out, fed = b"", 0
    for piece in pieces(data, cuts):
        out += restorer.feed(piece)
        fed += len(piece)
    return out + restorer.finish()


def every_cut(data: bytes, wanted: bytes, *, events: bool = False) -> None:
    assert restored(data, events=events) == wanted
    assert restored(data, range(len(data)), events=events) == wanted
    for cut in range(len(data)):
        assert restored(data, [cut], events=events) == wanted


def test_only_the_name_at_the_top_changes() -> None:
    wanted = CHAT.replace('1,"model":"target"', f'1,"model":{ASKED_JSON.decode()}')
    every_cut(CHAT.encode(), wanted.encode())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"model":"t"}', '{"model":N}'),
        (' \r\n{ "model" : "t" , "a":1}\n', ' \r\n{ "model" : N , "a":1}\n'),
        ('{"data":[[[1,"]"]],{"a":{}}],"model":"t"}', '{"data":[[[1,"]"]],{"a":{}}],"model":N}'),
        ('{"model":"a \\" b \\\\","x":"\\"model\\""}', '{"model":N,"x":"\\"model\\""}'),
        ('{"response":{"model":"t","a":[{}]},"b":2}', '{"response":{"model":N,"a":[{}]},"b":2}'),
        ('{"message":{"a":{"model":"t"},"model":"t"}}', '{"message":{"a":{"model":"t"},"model":N}}'),
        ('{"response":{"a":1},"message":{},"model":"t"}', '{"response":{"a":1},"message":{},"model":N}'),
        ('{"model":""}', '{"model":N}'),
        ('{"model":"t', '{"model":N'),
        ('{"models":"t","mode":"t","model ":"t"}', None),
        ('{"model":null,"a":{"model":"t"}}', None),
        ('{"model":["t"],"message":[{"model":"t"}],"response":"model"}', None),
        ('{"a":{"model":"t"},"b":[{"model":"t"}],"c":{"response":{"model":"t"}}}', None),
        ('{"message":{"response":{"model":"t"}}}', None),
        ('[{"model":"t"}]', None),
        ('"model"', None),
        ("", None),
        ('{"error":{"message":"the model \\"t\\" is not known","code":404}}', None),
        ('{"' + "k" * 100 + '":"model","object":{"b":"' + "\\\\" * 50 + '"}}', None),
        ('}}{"model":"t"}', None),
        ('{"a":]]}{"model":"t"}', None),
    ],
)
def test_documents(before: str, after: str | None) -> None:
    wanted = before if after is None else after.replace("N", ASKED_JSON.decode())
    every_cut(before.encode(), wanted.encode())


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_events(end: str) -> None:
    stream, wanted = (end.join([*each, ""]).replace("\n", end[: len(end) // 2]) for each in (EVENTS, RESTORED))
    every_cut(stream.encode(), wanted.encode(), events=True)


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
            if isinstance(value.get("model"), str):
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
