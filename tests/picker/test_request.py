"""Requests are understood as engines understand them, or refused by a 400 that says why."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from picker import prompt as limits
from picker.prompt import MEDIA_TOKENS
from picker.refusal import Refusal
from picker.request import Kind, LLMRequest, parse

DATA = Path(__file__).parents[1] / "data"
JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
PATHS = [CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES, "/tokenize", "/inference/v1/generate"]
HI = {"role": "user", "content": "hi"}
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ask(path: str, body: bytes) -> LLMRequest:
    return parse("POST", path, JSON, body)


def asked(path: str, **fields: object) -> LLMRequest:
    return ask(path, json.dumps(fields).encode())


def chat(*messages: dict[str, Any], **fields: object) -> LLMRequest:
    return asked(CHAT, messages=list(messages), **fields)


def refused(path: str, body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(path, body)
    assert caught.value.status == 400
    return caught.value


# --- what kind of request it is


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", Kind.COMPLETION),
        ("/v1/completions?x=/v1/embeddings", Kind.COMPLETION),
        ("/v1/completions/render", Kind.COMPLETION),
        ("/v1/chat/completions", Kind.CHAT),
        ("/team/a/v1/chat/completions/", Kind.CHAT),
        ("/v1/chat/completions/render", Kind.CHAT),
        ("/v1/responses", Kind.RESPONSES),
        ("/v1/embeddings", Kind.EMBEDDING),
        ("/v1/messages", Kind.MESSAGES),
        ("/v1/messages/count_tokens?beta=true", Kind.MESSAGES),
        ("/tokenize", Kind.TOKENIZE),
        ("/prefix/tokenize", Kind.TOKENIZE),
        ("/generate", Kind.GENERATE),
        ("/inference/v1/generate", Kind.GENERATE),
        ("/v1/models", Kind.OTHER),
        ("/v1/audio/transcriptions", Kind.OTHER),
        ("/v1/responses/resp_1/cancel", Kind.OTHER),
        ("/v1/chat", Kind.OTHER),
        ("/completions", Kind.OTHER),
        ("/detokenize", Kind.OTHER),
        ("/", Kind.OTHER),
        ("", Kind.OTHER),
        ("*", Kind.OTHER),
    ],
)
def test_the_path_tells_the_kind(path: str, kind: Kind) -> None:
    assert asked(path, model="m").kind == kind
    assert asked(path, model="m").model == (None if kind == Kind.OTHER else "m")


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("GET", {}, b""),
        ("GET", JSON, b"no json"),
        ("PUT", JSON, b"no json"),
        ("POST", {}, b""),
        ("POST", {"content-type": "multipart/form-data; boundary=x"}, b'--x\r\n{"model":1'),
        ("POST", {"content-type": "application/x-www-form-urlencoded"}, b'{"model":1}'),
        ("POST", {"content-type": "application/grpc"}, b"\0\0\0\0\5hello"),
        ("POST", {"content-type": ""}, b'{"model":1}'),
        ("POST", {**JSON, "content-encoding": "gzip"}, b"\x1f\x8b\x08\x00"),
    ],
)
def test_what_is_no_json_is_routed_by_load_alone(
    method: str, headers: dict[str, str], body: bytes
) -> None:
    for path in [*PATHS, "/v1/models"]:
        request = parse(method, path, headers, body, subset=("10.0.0.1",))
        assert request.kind == Kind.OTHER
        assert (request.method, request.path, request.body) == (method, path, body)
        assert (request.model, request.prompt, request.prompt_tokens) == (None, b"", 0)
        assert request.salt == b""
        assert request.subset == ("10.0.0.1",)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "Application/JSON"},
        {"content-type": "application/vnd.api+json"},
        {**JSON, "content-encoding": "identity"},
    ],
)
def test_json_is_read_also_where_nobody_says_so(headers: dict[str, str]) -> None:
    assert parse("POST", CHAT, headers, b'{"model":"m"}').model == "m"
    with pytest.raises(Refusal):
        parse("POST", CHAT, headers, b'{"model":')


def test_an_unknown_path_is_never_refused() -> None:
    assert ask("/v1/rerank", b"\xff{").kind == Kind.OTHER


def test_a_body_that_was_not_shown_is_never_refused() -> None:
    for path in PATHS:
        request = parse("POST", path, JSON, None)
        assert (request.kind, request.body, request.prompt) == (Kind.OTHER, b"", b"")


def test_nothing_is_lost_on_the_way() -> None:
    headers = {**JSON, "x-session-id": "s"}
    body = b' {"model" : "m"}\n'
    request = parse("POST", CHAT, headers, body, subset=())
    assert (request.headers, request.body, request.subset) == (headers, body, ())


@pytest.mark.parametrize("told", ["a-1", "x" * 128, "~ !"])
def test_a_sane_request_id_is_kept(told: str) -> None:
    assert parse("GET", "/", {"x-request-id": told}, b"").id == told


@pytest.mark.parametrize("told", ["", "x" * 129, "a\nb", "é", "a\x7f", "a\0"])
def test_others_are_replaced(told: str) -> None:
    ids = {parse("GET", "/", {"x-request-id": told}, b"").id for _ in range(2)}
    ids.add(parse("GET", "/", {}, b"").id)
    assert len(ids) == 3
    assert all(len(id) == 32 and int(id, 16) for id in ids)


# --- what is refused


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"model":"m"',
        b'{"model":"m",}',
        b'{"model":"m"} x',
        b'{"model":"m"}{}',
        b"{'model':'m'}",
        b'{"temperature":NaN}',
        b'{"temperature":Infinity}',
        b'{"temperature":-}',
        b'{"temperature":01}',
        b'{"x":tru}',
        b'{"x":"\x00"}',
        b'{"x":"\\q"}',
        b'{"x":"\\ud800"}',
        b'{"x":"\xff"}',
        b'{"\xc3":1}',
        b'{"x":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        b"\x1f\x8b\x08\x00",
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"x":' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_no_json_object(path: str, body: bytes) -> None:
    assert refused(path, body).reason == "invalid_json"


@pytest.mark.parametrize(
    "name", ["messages", "prompt", "input", "tools", "system", "model", "max_tokens", "token_ids"]
)
@pytest.mark.parametrize("path", PATHS)
def test_any_depth_is_survived(path: str, name: str) -> None:
    """Just under and over what the decoder takes, wherever it recurses a second time."""
    for depth in range(100, 1100, 25):
        for opening, closing in ((b"[", b"]"), (b'[{"content":', b"}]")):
            body = b'{"%s":%s1%s}' % (name.encode(), opening * depth, closing * depth)
            try:
                ask(path, body)
            except Refusal as refusal:
                assert refusal.status == 400


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "model", "5"),
        (CHAT, "model", "[]"),
        (CHAT, "model", '"' + "m" * 257 + '"'),
        (CHAT, "cache_salt", "5"),
        (CHAT, "cache_salt", '"' + "s" * 1025 + '"'),
        (CHAT, "messages", '"hi"'),
        (CHAT, "messages", "{}"),
        (CHAT, "messages", '["hi"]'),
        (RESPONSES, "input", '["hi"]'),
    ],
)
def test_wrong_values_of_what_is_acted_on(path: str, name: str, value: str) -> None:
    refusal = refused(path, f'{{"{name}":{value}}}'.encode())
    assert refusal.reason == "invalid_field"
    assert f"`{name}" in refusal.message


@pytest.mark.parametrize(
    "field",
    [
        '"stream":1',
        '"stream":"yes","max_tokens":5.0',
        '"max_tokens":"5"',
        '"max_tokens":9223372036854775808',
        '"temperature":1,"temperature":2',
        '"sampling_params":{"max_tokens":"5"}',
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_fields_of_the_engine_pass_as_they_are(path: str, field: str) -> None:
    body = f'{{"model":"m",{field}}}'.encode()
    assert (ask(path, body).model, ask(path, body).body) == ("m", body)


def test_all_else_is_the_engines_to_judge() -> None:
    body = (
        b'{"temperature":"hot","n":1e999,"seed":' + b"9" * 5000 + b',"max_output_tokens":"x",'
        b'"unknown":{"model":[1,{"a":null}]},"prompt":{"a":[-1]},"model":"m"}'
    )
    request = ask(COMPLETIONS, body)
    assert (request.model, request.body) == ("m", body)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "model"),
        (CHAT, "messages"),
        (CHAT, "tools"),
        (CHAT, "cache_salt"),
        (COMPLETIONS, "prompt"),
        (RESPONSES, "input"),
        (RESPONSES, "instructions"),
        (EMBEDDINGS, "input"),
        (MESSAGES, "system"),
        ("/generate", "token_ids"),
        (CHAT, "max_tokens"),
        (CHAT, "n"),
    ],
)
def test_a_repeated_field_that_is_acted_on(path: str, name: str) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    for other in (name, escaped, name[:-1] + escaped[-6:]):
        for body in (
            f'{{"{name}":null,"{other}":null}}',
            f'{{"{other}":null,"x":[1, 2],"{name}":null}}',
            f' {{ "a" : 1 , "{name}" : null , "b":"{name}" ,"{other}": null }} ',
        ):
            refusal = refused(path, body.encode())
            assert (refusal.reason, name in refusal.message) == ("repeated_field", True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","seed":1,"seed":12,"x":"y"}',
        b'{"seed":1,"seed":1,"model":"m"}',
        b'{"seed":12,"model":"m","seed":1}',
        b'{"seed":"\\u0041","se\\u0065d":"A","model":"m"}',
        b'{"seed":' + b"9" * 5000 + b',"seed":[{"model":"x","model":"y"}],"model":"m"}',
        b'{"model":"m","metadata":{"model":"a","model":"b"},"y":{"stream":1}}',
        b'{"model":"m","user":"\\"model\\":\\"x\\"","stop":["\\"model\\":"],"y":1}',
        b'{"":1,"":2,"model":"m"}',
        b'{"prompt":1,"prompt":2,"model":"m"}',  # of no meaning in a chat
        b'{\t"model"\n:\r"m" , "model2" : 1 }',
        '{"modèle":1,"modèle":2,"model":"m"}'.encode(),
    ],
)
def test_other_repeated_fields_pass(body: bytes) -> None:
    assert ask(CHAT, body).model == "m"


def test_a_large_body_may_repeat_nothing() -> None:
    body = b'{"user":"%s","seed":1,"seed":2}' % (b"x" * 70_000)
    assert refused(CHAT, body).reason == "repeated_field"


@UNHURRIED
@given(
    st.lists(st.tuples(st.sampled_from(["model", "x", "y", "é", '"', "\\"]), st.integers(0, 12))),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]),
    st.booleans(),
)
def test_a_repeated_model_is_always_found(
    pairs: list[tuple[str, int]], separators: tuple[str, str], ascii_only: bool
) -> None:
    comma, colon = separators
    shown = [
        json.dumps(name, ensure_ascii=ascii_only) + colon + (f'"{value}"') for name, value in pairs
    ]
    body = ("{" + comma.join(shown) + "}").encode()
    models = [str(value) for name, value in pairs if name == "model"]
    if len(models) > 1:
        assert refused(CHAT, body).reason == "repeated_field"
    else:
        assert ask(CHAT, body).model == (models[0] if models else None)


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}",
        b'{"model":"m"%s}' % (b" " * 2_000_000),
    ],
    ids=["names", "spaces"],
)
def test_what_takes_long_is_refused_where_no_prompt_has_it(body: bytes) -> None:
    assert "too m" in refused(CHAT, body).message


LONG_LISTS = {
    "messages": (CHAT, b'{"messages":%s}', b'{"role":"user","content":"hi","name":"n"}'),
    "empty messages": (CHAT, b'{"messages":%s}', b"{}"),
    "short messages": (CHAT, b'{"messages":%s}', b'{"role":"user","content":"hi"}'),
    "parts": (CHAT, b'{"messages":[{"content":%s}]}', b'{"type":"text","text":"a","x":1}'),
    "texts in parts": (CHAT, b'{"messages":[{"content":%s}]}', b'{"type":"text","text":"a"}'),
    "parts of a system prompt": (MESSAGES, b'{"system":%s}', b'{"type":"z","z":[1]}'),
    "results": (CHAT, b'{"messages":[{"content":[{"content":%s}]}]}', b'{"a":1}'),
    "media": (CHAT, b'{"messages":[{"content":%s}]}', b'{"type":"image"}'),
    "tools": (CHAT, b'{"tools":%s}', b'{"a": 1}'),
    "numbers": (CHAT, b'{"tools":%s}', b"1"),
    "documents": (CHAT, b'{"documents":%s}', b"[ ]"),
    "items": (RESPONSES, b'{"input":%s}', b'{"type":"f","arguments":"{}"}'),
    "texts": (COMPLETIONS, b'{"prompt":%s}', b'"a"'),
    "lists": (COMPLETIONS, b'{"prompt":%s}', b"[1]"),
    "ids": (COMPLETIONS, b'{"prompt":%s}', b"1"),
}


@pytest.mark.parametrize(("path", "body", "item"), LONG_LISTS.values(), ids=LONG_LISTS)
def test_long_lists_are_looked_at_as_far_as_matters(path: str, body: bytes, item: bytes) -> None:
    """They are counted to their end, and their beginnings can be compared."""

    def of(count: int) -> LLMRequest:
        return ask(path, body % listed(item, count))

    few, many, more = of(1000), of(100_000), of(200_000)
    assert not few.unread
    part = few.prompt_tokens
    assert 60 * part < many.prompt_tokens < 210 * part or item == b'{"type":"image"}'
    assert more.prompt_tokens == pytest.approx(2 * many.prompt_tokens, rel=0.1)
    assert many.prompt[:-10] == more.prompt[: len(many.prompt) - 10]
    assert len(many.prompt) > 1000


@pytest.mark.parametrize(
    ("name", "limit", "path", "body", "item"),
    [
        ("MAX_IDS", 70, COMPLETIONS, b'{"prompt":%s}', b"123"),
        ("MAX_IDS", 70, COMPLETIONS, b'{"prompt":[%s]}', b" 123"),
        ("MAX_IDS", 70, COMPLETIONS, b'{"prompt":%s}', b"[ 1 , 123 ]"),
        ("MAX_TEXTS", 70, COMPLETIONS, b'{"prompt":%s}', b'"a"'),
        ("MAX_FIELDS", 280, CHAT, b'{"messages":%s}', b'{"role":"user","content":"","name":"n"}'),
        ("MAX_FIELDS", 280, CHAT, b'{"messages":[{"content":%s}]}', b'{"type":"t","x":1}'),
        ("MAX_FIELDS", 70, CHAT, b'{"messages":[{"content":%s}]}', b'{"type":"text","text":""}'),
    ],
)
def test_what_is_looked_at_is_the_same_however_much_follows(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int, path: str, body: bytes, item: bytes
) -> None:
    whole = ask(path, body % listed(item, 200))
    monkeypatch.setattr(limits, name, limit)
    for count in range(60, 130, 7):
        cut = ask(path, body % listed(item, count))
        assert whole.prompt.startswith(cut.prompt.rstrip(b"]}\n")[:-2])
        told = [len(ask(path, body % listed(item, n)).prompt) for n in (count, count + 1)]
        assert told[0] <= told[1]
        assert cut.prompt_tokens == pytest.approx(whole.prompt_tokens * count / 200, rel=0.5)
    assert len(cut.prompt) < len(whole.prompt) * 3 / 4
    assert cut.unread


def test_ids_beyond_those_that_are_read_are_counted_exactly() -> None:
    for ids in ([7] * 70_000, [[7] * 40_000, [8] * 40_000], [[1], [2] * 65_535, [3]]):
        flat = [id for part in ids for id in part] if isinstance(ids[0], list) else ids
        assert asked(COMPLETIONS, prompt=ids).prompt_tokens == len(flat)


def test_a_large_document_in_a_message_is_not_taken_for_names() -> None:
    """Text that holds as many colons and braces as objects would."""
    document = json.dumps({f"key {number}": {"value": number} for number in range(20_000)})
    messages = [{"role": "user", "content": document}, HI]
    request = chat(*messages)
    assert request.prompt.endswith(chat(HI).prompt)
    assert not request.unread
    spaced = json.dumps({"messages": messages}, indent=2)
    assert ask(CHAT, spaced.encode()).prompt == request.prompt
    parts = [{"type": "text", "text": document}]
    assert chat({"role": "user", "content": parts}, HI).prompt.endswith(chat(HI).prompt)


@pytest.mark.parametrize("filler", [b" ", b"1,", b" \n\t\r"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"messages":[%s{}]}'),
        (CHAT, b'{"tools":[%s{}]}'),
        (COMPLETIONS, b'{"prompt":[%s1]}'),
        (CHAT, b'{"messages":[{"content":[%s{}]}]}'),
    ],
)
def test_megabytes_of_nothing_stand_as_they_are(path: str, body: bytes, filler: bytes) -> None:
    request = ask(path, body % (filler * (5_000_000 // len(filler))))
    assert request.prompt_tokens == pytest.approx(1_250_000, rel=0.01) or request.prompt_tokens in (
        2_500_001,  # token ids are counted
    )
    assert len(request.prompt) <= 1_100_000


@UNHURRIED
@given(st.sampled_from(PATHS), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(path: str, body: bytes) -> None:
    try:
        ask(path, body)
    except Refusal as refusal:
        assert refusal.status == 400
        json.loads(refusal.body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "image_url", "source"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
NAMES = ["messages", "prompt", "input", "tools", "system", "instructions", "token_ids", "text"]


@UNHURRIED
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_any_json_is_read_or_refused(path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode("utf-8", "replace")
    try:
        request = ask(path, body)
    except Refusal as refusal:
        assert refusal.reason in ("invalid_field", "invalid_json")
    else:
        assert (request.prompt_tokens > 0) == (request.prompt != b"")


# --- fields


def test_model() -> None:
    assert asked(CHAT, stream=True, model="é").model == "é"
    assert asked(CHAT).model is None
    assert asked(CHAT, model=None).model is None
    assert asked(CHAT, model="m" * 256).model == "m" * 256
    assert ask(CHAT, b'{"mod\\u0065l":"\\u006d"}').model == "m"


def test_caches_are_parted_by_model_and_salt() -> None:
    named = [
        {},
        {"model": "S"},
        {"cache_salt": "S"},
        {"model": "S", "cache_salt": "S"},
        {"model": "SS"},
        {"model": ""},
        {"cache_salt": ""},
        {"model": "Sc\1\0\0\0S"},
        {"model": "m\1\0\0\0S"},
    ]
    salts = {chat(HI, **fields).salt for fields in named}
    assert len(salts) == len(named)
    assert len({chat(HI, **fields).prompt for fields in named}) == 1


@UNHURRIED
@given(st.tuples(*[st.none() | st.text("mc\0\1\2é", max_size=6)] * 2))
def test_no_name_passes_for_a_salt(told: tuple[str | None, str | None]) -> None:
    model, cache_salt = told
    expected = b""
    for tag, text in ((b"m", model), (b"c", cache_salt)):
        if text is not None:
            expected += tag + struct.pack("<I", len(text.encode())) + text.encode()
    assert chat(model=model, cache_salt=cache_salt).salt == expected


# --- prompts of text and of token ids


def test_text() -> None:
    request = asked(COMPLETIONS, prompt="The quick brown fox")
    assert b"The quick brown fox" in request.prompt
    assert request.prompt_tokens == len(request.prompt) // 4
    longer = asked(COMPLETIONS, prompt="The quick brown fox jumps")
    assert longer.prompt.startswith(request.prompt)
    assert asked(COMPLETIONS, prompt=["The quick brown fox"]).prompt == request.prompt
    assert asked(COMPLETIONS, prompt="a").prompt_tokens == 1


@pytest.mark.parametrize("prompt", [None, "", [], [[]]])
def test_no_prompt(prompt: object) -> None:
    for request in (asked(COMPLETIONS, prompt=prompt), asked(COMPLETIONS)):
        assert (request.prompt, request.prompt_tokens) == (b"", 0)


def test_token_ids_are_counted() -> None:
    request = asked(COMPLETIONS, prompt=[1, 128_000, 2**31 - 1])
    assert request.prompt.endswith(struct.pack("<3I", 1, 128_000, 2**31 - 1))
    assert request.prompt_tokens == 3
    assert asked(COMPLETIONS, prompt=[1, 128_000, 2**31 - 1, 7]).prompt.startswith(request.prompt)
    assert asked(COMPLETIONS, prompt=[[1, 128_000], [2**31 - 1]]).prompt_tokens == 3
    assert asked(COMPLETIONS, prompt=[[1, 128_000, 2**31 - 1]]).prompt == request.prompt


def test_forms_of_prompts_are_never_taken_for_each_other() -> None:
    prompts: list[object] = [
        ["ab", "c"],
        ["a", "bc"],
        ["abc"],
        ["", "abc"],
        ["abc", ""],
        'a","b',
        ["a", "b"],
        "\x02a",
        [1, 2, 3],
        [[1, 2], [3]],
        [[1], [2, 3]],
        [[1, 2, 3], []],
        "1,2,3",
        ["1", "2", "3"],
        struct.pack("<I", 0x22222222).decode(),
        [0x22222222],
        {"a": 1},
        [1, "a"],
        ["a", 1],
        [-1],
        [2**31],
        [2**70],
        [1.5],
        [True],
        [{"prompt": "a"}],
        5,
    ]
    seen = [asked(COMPLETIONS, prompt=prompt).prompt for prompt in prompts]
    assert len(set(seen)) == len(prompts)
    assert all(seen)


def test_embeddings_take_the_same_forms() -> None:
    for value in ("text", ["a", "b"], [1, 2], [[1], [2]]):
        assert asked(EMBEDDINGS, input=value).prompt == asked(COMPLETIONS, prompt=value).prompt
    assert asked(EMBEDDINGS, input=[[1], [2]]).prompt_tokens == 2
    assert asked(EMBEDDINGS, messages=[HI]).prompt == chat(HI).prompt


def test_tokenize_and_generate() -> None:
    text = asked(COMPLETIONS, prompt="text").prompt
    ids = asked(COMPLETIONS, prompt=[1, 2]).prompt
    assert asked("/tokenize", prompt="text").prompt == text
    assert asked("/tokenize", messages=[HI], tools=[{}]).prompt == chat(HI, tools=[{}]).prompt
    assert asked("/inference/v1/generate", token_ids=[1, 2]).prompt == ids
    assert asked("/generate", prompt="text").prompt == text
    assert asked("/generate", text="text", input_ids=None).prompt == text
    assert asked("/generate", input_ids=[1, 2]).prompt_tokens == 2
    assert asked("/generate", text_input="text").prompt == text
    assert asked("/generate").prompt == b""


# --- conversations

LETTERS = st.text(st.sampled_from('ab"\\{}[],:\n\0é😀 '), max_size=8)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text"]), "text": LETTERS}),
    min_size=1,
    max_size=3,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", 'u","content":"']) | LETTERS},
    optional={
        "content": LETTERS | PARTS,
        "name": LETTERS,
        "tool_call_id": LETTERS,
        "tool_calls": st.lists(st.fixed_dictionaries({"id": LETTERS}), min_size=1, max_size=2),
        'odd "name': LETTERS,
    },
)
CONVERSATION = st.lists(MESSAGE, max_size=4)


def shuffled(value: Any) -> Any:
    """The same content with its fields in another order, three levels deep."""
    messages = []
    for message in value:
        content = message.get("content")
        if isinstance(content, list):
            parts = [dict(reversed(part.items())) for part in content]
            message = {**message, "content": parts}
        messages.append(dict(reversed(message.items())))
    return messages


@UNHURRIED
@given(CONVERSATION, st.sampled_from([None, 0, 3]), st.sampled_from([(",", ":"), (" , ", " : ")]))
def test_spaces_and_order_of_fields_do_not_matter(
    messages: list[dict[str, Any]], indent: int | None, separators: tuple[str, str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    plain = chat(*messages, tools=tools, model="m").prompt
    fields = {"messages": shuffled(messages), "model": "m", "user": "x", "tools": tools}
    other = json.dumps(fields, indent=indent, separators=separators)
    assert ask(CHAT, other.encode()).prompt == plain


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/tokenize"])
@UNHURRIED
@given(conversation=CONVERSATION, message=MESSAGE)
def test_a_message_more_only_appends(
    path: str, conversation: list[dict[str, Any]], message: dict[str, Any]
) -> None:
    name = "input" if path == RESPONSES else "messages"
    beside = {"tools": [{"name": "f"}], "system": "s", "instructions": "i"}
    before = asked(path, **{name: conversation}, **beside)
    after = asked(path, **{name: [*conversation, message]}, **beside)
    assert after.prompt.startswith(before.prompt)
    assert len(after.prompt) > len(before.prompt)
    assert after.prompt_tokens >= before.prompt_tokens > 0


@UNHURRIED
@given(CONVERSATION, CONVERSATION)
def test_different_conversations_differ(
    one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> None:
    assume(one != other)
    assert chat(*one).prompt != chat(*other).prompt


def test_a_conversation_is_cut_where_its_messages_are() -> None:
    told = [
        [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}],
        [{"role": "user", "content": "abc"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}],
        [{"role": "user", "content": 'a"}\n{"role":"user","content":"bc'}],
        [{"role": "user", "content": ["abc"]}],
        [{"role": "user", "content": [{"type": "text", "text": "abc"}]}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("ab", "c")]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ""}],
        [{"content": "abc"}],
        [{}],
        [{}, {}],
    ]
    assert len({chat(*messages).prompt for messages in told}) == len(told)


def test_what_says_nothing_is_left_out() -> None:
    """An assistant's message comes back as the engine sent it, or as the client made it."""
    answer = {"role": "assistant", "content": "yes"}
    echoed = {**answer, "refusal": None, "tool_calls": [], "function_call": None, "audio": None}
    assert chat(HI, echoed).prompt == chat(HI, answer).prompt
    assert chat(HI, tools=None, documents=[]).prompt == chat(HI).prompt
    assert asked(CHAT, messages=None).prompt == b""


def test_marks_of_what_to_cache_are_no_prompt() -> None:
    """Clients of Anthropic's API move them to the last message with each turn."""
    text = {"type": "text", "text": "long"}
    marked = {**text, "cache_control": {"type": "ephemeral"}}
    for path in (MESSAGES, CHAT):
        plain, cached = (
            asked(path, messages=[{"role": "user", "content": [part]}]) for part in (text, marked)
        )
        assert plain.prompt == cached.prompt


def test_everything_a_template_sees_counts() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    base = {"role": "assistant", "content": "x"}
    told = [
        chat(base),
        chat({**base, "name": "n"}),
        chat({**base, "tool_calls": [call]}),
        chat({**base, "tool_calls": [call, call]}),
        chat({**base, "reasoning_content": "n"}),
        chat(base, tools=[{"a": 1}]),
        chat(base, functions=[{"a": 1}]),
        chat(base, documents=[{"a": 1}]),
        chat(base, chat_template_kwargs={"enable_thinking": False}),
        chat(base, chat_template="{{ messages }}"),
        chat(base, reasoning_effort="high"),
    ]
    assert len({request.prompt for request in told}) == len(told)
    with_tools = chat(base, tools=[{"a": 1}]).prompt
    assert with_tools.endswith(chat(base).prompt)  # tools come first


def test_the_order_of_parts_and_tools_counts() -> None:
    parts = [{"type": "text", "text": text} for text in "ab"]
    tools = [{"a": 1}, {"b": 1}]
    told = [
        chat({"role": "user", "content": content}, tools=offered).prompt
        for content in (parts, parts[::-1])
        for offered in (tools, tools[::-1])
    ]
    assert len(set(told)) == 4


def test_escapes_do_not_cost_the_content() -> None:
    body = '{"messages":[{"role":"user","content":"é\\n\\u00e9"}]}'
    assert "é\\n\\u00e9".encode() in ask(CHAT, body.encode()).prompt


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,DATA"}},
        {"type": "input_audio", "input_audio": {"data": "DATA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,DATA"}},
        {"type": "file", "file": {"file_data": "DATA"}},
        {"type": "input_image", "image_url": "data:image/png;base64,DATA"},
        {"image_url": "data:image/png;base64,DATA"},
        {"type": "image", "source": {"type": "base64", "data": "DATA"}},
        {"type": "document", "source": {"data": "DATA", "type": "base64"}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"data": "DATA"}}]},
    ],
)
def test_media_count_as_media_and_not_by_their_bytes(part: dict[str, Any]) -> None:
    def with_data(data: bytes) -> LLMRequest:
        filled = json.dumps(part).replace("DATA", base64.b64encode(data).decode())
        return chat({"role": "user", "content": [json.loads(filled)]})

    large = with_data(b"x" * 1_000_000)
    assert MEDIA_TOKENS <= large.prompt_tokens < MEDIA_TOKENS + 40
    assert abs(with_data(b"x").prompt_tokens - large.prompt_tokens) <= 1
    assert with_data(b"x" * 1_000_000).prompt == large.prompt
    assert with_data(b"x" * 999_999 + b"y").prompt != large.prompt


def test_a_document_of_text_counts_by_its_bytes() -> None:
    source = {"data": "word " * 4000, "type": "text", "media_type": "text/plain"}
    content = [{"type": "document", "source": source}]
    assert asked(MESSAGES, messages=[{"role": "user", "content": content}]).prompt_tokens > 5000


def test_responses() -> None:
    text = asked(RESPONSES, input="hi")
    items = asked(RESPONSES, input=[{"type": "message", **HI}])
    assert text.prompt == items.prompt == asked(RESPONSES, input=[HI]).prompt == chat(HI).prompt
    full = asked(RESPONSES, input="hi", instructions="be kind", tools=[{"name": "f"}])
    assert full.prompt.endswith(text.prompt)
    assert full.prompt.index(b'"f"') < full.prompt.index(b"be kind")
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    assert asked(RESPONSES, input=[HI, call]).prompt.startswith(text.prompt)
    after = asked(RESPONSES, input="hi", previous_response_id="r")
    assert after.prompt != text.prompt
    assert asked(RESPONSES, input=None).prompt == b""


def test_anthropics_messages() -> None:
    plain = asked(MESSAGES, messages=[HI])
    assert plain.prompt == chat(HI).prompt
    full = asked(MESSAGES, messages=[HI], system="be kind", tools=[{"name": "f"}])
    assert (
        full.prompt
        == chat({"role": "system", "content": "be kind"}, HI, tools=[{"name": "f"}]).prompt
    )
    parts = [{"type": "text", "text": "be kind"}]
    listed = asked(MESSAGES, messages=[HI], system=parts)
    assert b"be kind" in listed.prompt
    assert listed.prompt.endswith(plain.prompt)
    assert asked(MESSAGES, messages=[HI], system=None).prompt == plain.prompt


def test_recorded_requests() -> None:
    recorded = json.loads((DATA / "vllm_responses.json").read_text())
    for case in recorded.values():
        path, body = case["request"]["path"], case["request"]["body"]
        request = asked(path, **body)
        assert request.kind != Kind.OTHER
        assert request.model == body["model"]
        if isinstance(body.get("prompt"), list):
            assert request.prompt_tokens == case["response"]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/%63ompletions",
        "/v1%2Fcompletions",
        "/v1/completions/",
        "//v1//completions",
        "/v1/x/../completions",
        "/tenant/v1/completions?a=/v1/models",
    ],
)
def test_no_spelling_of_a_path_hides_what_is_asked(path: str) -> None:
    request = asked(path, model="llama", prompt="a prompt of some length", max_tokens=7)
    assert (request.kind, request.model) == (Kind.COMPLETION, "llama")
    assert (request.prompt_tokens, request.most_output) == (6, 7)


@pytest.mark.parametrize(
    "path", [EMBEDDINGS, "/tokenize", "/v1/messages/count_tokens", f"{CHAT}/render"]
)
def test_an_api_that_makes_no_tokens_is_known_to_make_none(path: str) -> None:
    assert asked(path, model="m", input="x", prompt="x", messages=[HI]).most_output == 0
    assert parse("GET", path, {}, None).most_output == 0


def test_what_is_not_understood_may_make_any_number_of_tokens() -> None:
    assert parse("POST", "/v1/audio/speech", JSON, b"{}").most_output is None
    assert parse("POST", COMPLETIONS, JSON, None).most_output is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", 1),
        (["one, two"], 1),
        (["a", "b", "c"], 3),
        ([1, 2, 3], 1),
        ([[1, 2], [3], [4]], 3),
        (["a"] * (limits.MAX_TEXTS + 5), limits.MAX_TEXTS + 5),
    ],
)
def test_each_prompt_of_a_batch_has_an_answer(prompt: object, prompts: int) -> None:
    assert asked(COMPLETIONS, prompt=prompt, max_tokens=10).most_output == 10 * prompts


@pytest.mark.parametrize("prompt", [["a", [1, 2]], [[1]] * 5000, ["a"] * 200_000])
def test_a_batch_in_a_strange_form_has_no_fewer_answers_than_prompts(prompt: list[Any]) -> None:
    most = asked(COMPLETIONS, prompt=prompt, max_tokens=10).most_output
    assert most is not None and most >= 10 * len(prompt)
