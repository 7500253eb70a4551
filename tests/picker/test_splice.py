from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.refusal import Refusal
from picker.request import LLMRequest, parse
from picker.splice import Splice, apply, ask_for_usage, name_model

JSON = {"content-type": "application/json"}
OPTION = '"include_usage":true'
OPTIONS = f'"stream_options":{{{OPTION}}}'


def read(body: str, path: str = "/v1/completions") -> LLMRequest:
    return parse("POST", path, JSON, body.encode())


def changed(body: str) -> str:
    """A body that asks for its usage; unchanged where there is nothing to change."""
    request = read(body)
    splice = ask_for_usage(request.body, request.stream_options)
    return body if splice is None else apply([splice], request.body).decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"stream":true}', f'{{{OPTIONS},"stream":true}}'),
        ('\n { "stream" : true }\r\n', f'\n {{{OPTIONS}, "stream" : true }}\r\n'),
        ('{"stream_options": null }', f'{{"stream_options": {{{OPTION}}} }}'),
        ('{"stream_options":{ } }', f'{{"stream_options":{{{OPTION}}} }}'),
        ('{"stream_options":{ "a" : [1] } }', f'{{"stream_options":{{{OPTION}, "a" : [1] }} }}'),
        (
            '{"x":"ü", "stream_options":{"a":1,"include_usage" : false,"b":2}}',
            '{"x":"ü", "stream_options":{"a":1,"include_usage" : true,"b":2}}',
        ),
        ('{"stream\\u005foptions":null}', f'{{"stream\\u005foptions":{{{OPTION}}}}}'),
        (  # the last one counts, as with the engines
            '{"stream_options":{"include_usage":true,"include_usage":null}}',
            '{"stream_options":{"include_usage":true,"include_usage":true}}',
        ),
        ('{"stream_options":{"include_usage":"No"}}', '{"stream_options":{"include_usage":true}}'),
    ],
)
def test_one_member_changes(before: str, after: str) -> None:
    assert changed(before) == after


@pytest.mark.parametrize(
    "options",
    [
        '{"include_usage":true}',
        '{"include_usage":1}',
        '{"include_usage":"yes"}',
        '{"include_usage":"TRUE"}',
        '{"include_usage":"\\u0074rue"}',
        '{"include_usage":2}',
        '{"include_usage":"maybe"}',
        '{"include_usage":[]}',
        '{"include_usage":{}}',
        '{"include_usage":1e999}',
        '{"include_usage":"' + "x" * 100 + '"}',
        "[]",
        '"include_usage"',
        "7",
        "true",
    ],
)
def test_who_asks_or_asks_nonsense_is_left_alone(options: str) -> None:
    body = f'{{"stream":true,"stream_options":{options}}}'
    assert changed(body) == body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/x/v1/completions"])
@pytest.mark.parametrize(
    ("stream", "is_one"),
    [
        *((value, True) for value in ("true", "1", "1.0", '"true"', '"On"', '"\\u0079es"')),
        *(
            (value, False)
            for value in ("false", "null", "0", '"no"', "2", "[]", "1e999", '"maybe"')
        ),
    ],
)
def test_a_stream_is_what_engines_take_for_one(path: str, stream: str, is_one: bool) -> None:
    assert read(f'{{"stream":{stream}}}', path).stream is is_one


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/responses", "/other"])
def test_other_calls_tell_usage_anyway(path: str) -> None:
    assert not read('{"stream":true}', path).stream


@pytest.mark.parametrize("name", ["stream", "stream_options"])
def test_a_repeated_field_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match=name):
        read(f'{{"{name}":null,"{name}":null}}')


# Any body

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
names = st.text(max_size=6).filter(
    lambda name: name not in ("prompt", "model", "cache_salt", "stream", "stream_options")
)
spaces = st.text(" \t\r\n", max_size=3)
members = st.lists(st.tuples(names, values), max_size=5)  # names may come again
flags = st.sampled_from([False, None, 0, "off"])


@st.composite
def written(draw: st.DrawFn, pairs: list[tuple[str, str]]) -> str:
    """An object of members that are written already, with spaces wherever they may be."""

    def pair(name: str, value: str) -> str:
        key = json.dumps(name, ensure_ascii=draw(st.booleans()))
        return "".join((draw(spaces), key, draw(spaces), ":", draw(spaces), value, draw(spaces)))

    inside = ",".join(pair(*each) for each in pairs) or draw(spaces)
    return f"{{{inside}}}"


@st.composite
def options_objects(draw: st.DrawFn) -> str:
    others = draw(st.dictionaries(names, values, max_size=3))
    if draw(st.booleans()):
        others["include_usage"] = draw(flags)
    pairs = [(name, json.dumps(value)) for name, value in others.items()]
    return draw(written(draw(st.permutations(pairs))))


@st.composite
def bodies(draw: st.DrawFn) -> str:
    pairs = [(name, json.dumps(value, ensure_ascii=False)) for name, value in draw(members)]
    pairs.append(("stream", "true"))
    if draw(st.booleans()):
        pairs.append(("stream_options", draw(st.just("null") | options_objects())))
    return draw(spaces) + draw(written(draw(st.permutations(pairs)))) + draw(spaces)


def pairs_of(body: str) -> list[tuple[str, Any]]:
    """Members in their order, repeated ones too, objects within as such lists."""
    found: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    return found


@given(bodies())
def test_any_body_is_the_same_but_for_that_member(body: str) -> None:
    after = changed(body)
    old, new = pairs_of(body), pairs_of(after)
    told = [value for name, value in new if name == "stream_options"]
    assert len(told) == 1
    assert told[0].count(("include_usage", True)) == 1
    assert [name for name, _ in told[0]].count("include_usage") == 1
    others = [pair for pair in new if pair[0] != "stream_options"]
    assert others == [pair for pair in old if pair[0] != "stream_options"]
    before = next((value for name, value in old if name == "stream_options"), None) or []
    assert [pair for pair in told[0] if pair[0] != "include_usage"] == [
        pair for pair in before if pair[0] != "include_usage"
    ]
    assert changed(after) == after


@given(bodies())
def test_no_byte_beside_that_member_changes(body: str) -> None:
    request = read(body)
    splice = ask_for_usage(request.body, request.stream_options)
    assert splice is not None
    after = apply([splice], request.body)
    rest = splice.offset + splice.drop
    assert after[: splice.offset] == request.body[: splice.offset]
    assert after[splice.offset + len(splice.text) :] == request.body[rest:]
    assert splice.text.isascii()
    assert splice.text.decode().isprintable()
    assert len(splice.text) <= len(OPTIONS) + 1
    dropped = request.body[splice.offset : rest]
    assert json.loads(dropped or b"null") in (False, None, "off", {})


def test_a_splice_may_be_anywhere() -> None:
    assert apply([Splice(0, 0, b"ab")], b"xyz") == b"abxyz"
    assert apply([Splice(3, 0, b"ab")], b"xyz") == b"xyzab"
    assert apply([Splice(1, 1, b"")], b"xyz") == b"xz"


def test_splices_are_applied_in_the_order_of_their_places() -> None:
    splices = [Splice(4, 1, b"+"), Splice(0, 2, b"."), Splice(3, 0, b"++")]
    assert apply(splices, b"abcdef") == b".c++d+f"


def renamed(body: str, model: str, path: str = "/v1/completions") -> str:
    request = read(body, path)
    assert request.model_value is not None
    return apply([name_model(request.body, request.model_value, model)], request.body).decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"model":"m"}', '{"model":"other"}'),
        ('\r\n{ "model" : "m" , "a":1 }\n', '\r\n{ "model" : "other" , "a":1 }\n'),
        ('{"a":{"model":"m"},"model":"m"}', '{"a":{"model":"m"},"model":"other"}'),
        (
            '{"prompt":"\\"model\\":\\"m","model":"m"}',
            '{"prompt":"\\"model\\":\\"m","model":"other"}',
        ),
        ('{"model":"m\\u0022\\\\ é","x":"é"}', '{"model":"other","x":"é"}'),
        ('{"mod\\u0065l":"m"}', '{"mod\\u0065l":"other"}'),
        ('{"model":""}', '{"model":"other"}'),
    ],
)
def test_only_the_value_of_model_changes(before: str, after: str) -> None:
    assert renamed(before, "other") == after


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("name", ['a "b" \\', "é 世界", "/models/llama"])
def test_any_name_can_be_put_in(path: str, name: str) -> None:
    told = json.loads(renamed('{"stream":true,"model":"m","n":1}', name, path))
    assert told == {"stream": True, "model": name, "n": 1}


def test_a_repeated_model_is_refused() -> None:
    """Else the pod might obey the one that was not rewritten."""
    for body in (
        '{"model":"a","model":"b"}',
        '{"model":"a","mod\\u0065l":"b"}',
        '{"model":"a","x":"%s","model":"a"}' % ("x" * 300_000),
    ):
        with pytest.raises(Refusal) as refusal:
            read(body)
        assert refusal.value.reason == "repeated_field"


@given(bodies(), st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9))
def test_a_body_can_be_asked_for_usage_and_another_model(body: str, asked: str, name: str) -> None:
    text = json.dumps(asked)
    model = f'"model": {text}'
    for both in (f"{{{model}," + body.strip()[1:], body.rstrip()[:-1] + f",{model}}}"):
        request = read(both)
        assert request.model_value is not None
        usage = ask_for_usage(request.body, request.stream_options)
        assert usage is not None
        splices = [name_model(request.body, request.model_value, name), usage]
        after = apply(splices, request.body)
        assert after == apply(splices[::-1], request.body)
        assert after.decode() == changed(renamed(both, name))
        assert json.loads(after)["model"] == name
