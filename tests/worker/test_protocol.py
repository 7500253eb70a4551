"""Requests are understood, or refused by a 400 that says why; nothing else comes of them."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.api.errors import ApiError
from worker.api.params import INT64, ModelLimits, check_request, for_choice, sampling_params
from worker.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parser,
)
from worker.sequence import SamplingParams

LIMITS = ModelLimits(max_model_len=100, vocab_size=50, eos_ids=frozenset({7}))
MESSAGES = [{"role": "user", "content": "hi"}]
PARSERS = {
    kind: parser(kind)
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
}


def completion(**fields: object) -> CompletionRequest:
    return PARSERS[CompletionRequest](json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: object) -> ChatRequest:
    return PARSERS[ChatRequest](json.dumps({"messages": MESSAGES, **fields}).encode())


def params(request: GenerationRequest, prompt_length: int = 10) -> SamplingParams:
    check_request(request, LIMITS)
    return sampling_params(request, prompt_length, LIMITS)


def refusal(request: GenerationRequest, prompt_length: int = 10) -> ApiError:
    with pytest.raises(ApiError) as caught:
        params(request, prompt_length)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_vllms() -> None:
    assert params(completion()) == SamplingParams(max_tokens=16, stop_token_ids=frozenset({7}))
    assert params(chat()) == SamplingParams(max_tokens=90, stop_token_ids=frozenset({7}))
    nulls = {
        field.name: None
        for field in msgspec.structs.fields(CompletionRequest)
        if field.name != "prompt"
    }
    assert params(completion(**nulls)) == params(completion())


def test_everything_reaches_the_engine() -> None:
    asked = params(
        completion(
            max_tokens=5,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            seed=-1,
            logit_bias={"3": -100, "49": 1.5},
            logprobs=4,
            prompt_logprobs=1,
            stop_token_ids=[1, 2],
        )
    )
    assert asked == SamplingParams(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        seed=-1,
        logit_bias={3: -100.0, 49: 1.5},
        logprobs=4,
        prompt_logprobs=1,
        stop_token_ids=frozenset({1, 2, 7}),
    )
    assert params(completion(ignore_eos=True)).stop_token_ids == frozenset()
    assert params(completion(top_k=-1)).top_k == 0
    assert params(completion(temperature=0)).greedy
    assert params(completion(temperature=1e-300)).temperature == 0.01
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=5)).logprobs == 5
    assert params(chat(logprobs=False)).logprobs is None
    assert params(completion(echo=True, logprobs=2)).prompt_logprobs == 2
    assert params(completion(echo=True)).prompt_logprobs is None


def test_lenient_numbers_as_in_vllm() -> None:
    assert params(completion(max_tokens=16.0, temperature="0.5")).max_tokens == 16
    assert completion(whatever={"unknown": [1]}).prompt == "x"


def test_the_answers_length() -> None:
    assert params(completion(max_tokens=90), 10).max_tokens == 90
    assert params(completion(), 95).max_tokens == 5  # the default gives way
    assert params(chat(), 99).max_tokens == 1
    assert params(chat(max_tokens=5, max_completion_tokens=3)).max_tokens == 3
    assert params(completion(max_tokens=0, echo=True)).max_tokens == 1
    too_much = refusal(completion(max_tokens=91), 10)
    assert "100 tokens" in too_much.message
    assert "requested 91 output tokens" in too_much.message
    assert "10 input tokens" in too_much.message
    full = refusal(completion(), 100)
    assert "100 tokens" in full.message
    assert "contains 100 input tokens" in full.message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1, got -1."),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"max_tokens": 101}, "max_tokens", "cannot be greater than max_model_len=100"),
        ({"max_tokens": 10**30}, "max_tokens", "cannot be greater"),
        ({"min_tokens": -1}, "min_tokens", "at least 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most max_tokens=5"),
        ({"min_tokens": 17}, "min_tokens", "at most max_tokens=16"),
        ({"temperature": -3}, "temperature", "temperature must be non-negative, got -3.0."),
        ({"temperature": "nan"}, "temperature", "non-negative"),
        ({"temperature": "inf"}, "temperature", "non-negative"),
        ({"top_p": 0}, "top_p", "in (0, 1]"),
        ({"top_p": "nan"}, "top_p", "in (0, 1]"),
        ({"top_k": -2}, "top_k", "at least 1"),
        ({"top_k": 2**31}, "top_k", "at least 1"),
        ({"min_p": 1.1}, "min_p", "in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "in [0.01, 100]"),
        ({"presence_penalty": 2.1}, "presence_penalty", "in [-2, 2]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "in [-2, 2]"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"seed": 2**63}, "seed", "64-bit"),
        ({"priority": -(2**64)}, "priority", "64-bit"),
        ({"stop": ["a", ""]}, "stop", "cannot contain an empty string"),
        ({"stop": ["a"] * 65}, "stop", "at most 64 strings"),
        ({"stop": "a" * 1025}, "stop", "at most 1024 characters"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
        ({"logit_bias": {"50": 1}}, "logit_bias", "below 50"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "below 50"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "in [-100, 100]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": -1}, "logprobs", "at least 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=True"),
        ({"stream_options": {}}, "stream_options", "stream=True"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "1 to 1024"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported"),
        ({"guided_json": {"a": 1}}, "guided_json", "not supported"),
        ({"logits_processors": ["x"]}, "logits_processors", "not supported"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal(completion(**fields))
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_refusals_of_chats(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat(**fields)).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 2},
        {"response_format": {"type": "text"}},
        {"suffix": ""},
        {"bad_words": []},
        {"use_beam_search": False},
        {"user": "me", "kv_transfer_params": {"x": 1}},
    ],
)
def test_fields_that_ask_for_nothing_are_fine(fields: dict[str, Any]) -> None:
    params(completion(**fields))


def test_chat_fields_that_ask_for_nothing_are_fine() -> None:
    params(chat(tool_choice="auto", tools=[{"type": "function"}], modalities=["text"]))
    params(chat(tool_choice="none", function_call="none", top_logprobs=0))


@given(seed=st.integers(INT64.start, INT64.stop - 1), index=st.integers(0, 127))
def test_seeds_of_choices_differ_and_stay_in_range(seed: int, index: int) -> None:
    base = params(completion(seed=seed))
    seeds = {for_choice(base, i).seed for i in range(index + 1)}
    assert len(seeds) == index + 1
    assert all(each in INT64 for each in seeds if each is not None)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "not valid JSON"),
        (b'{"prompt": ', None, "not valid JSON"),
        (b"null", None, "Expected `object`"),
        (b"[]", None, "Expected `object`"),
        (b'{"n": "x"}', "n", "n: Expected `int"),
        (b'{"n": 1.5}', "n", "Expected `int"),
        (b'{"n": NaN}', None, "not valid JSON"),
        (b'{"temperature": 1e999}', "temperature", "out of range"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "max_tokens", "out of range"),
        (b'{"prompt": "\xff"}', None, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', None, "not valid JSON"),
        (b'{"prompt": [1, {}]}', "prompt", "prompt[1]"),
        (b'{"logit_bias": {"x": 1}}', "logit_bias", "logit_bias"),
        (b'{"stop": [1]}', "stop", "stop[0]"),
        (b'{"stream_options": {"include_usage": 3}}', "stream_options.include_usage", "bool"),
        (b'{"x": ' + b"[" * 100_000, None, "nested too deeply"),
        (b'{"x": ' + b'{"a":' * 100_000, None, "nested too deeply"),
    ],
)
def test_malformed_bodies(body: bytes, param: str | None, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        PARSERS[CompletionRequest](body)
    assert caught.value.param == param
    assert message in caught.value.message
    assert len(caught.value.body()) < 1000


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        PARSERS[ChatRequest](b"{}")
    assert caught.value.param == "messages"


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["nan", "inf", "-1", "1e400", "auto", "required"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def bodies(draw: st.DrawFn, kind: type[Any]) -> bytes:
    """A JSON object with some of a request's fields, of any type."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    fields = draw(st.dictionaries(st.sampled_from(names) | st.text(), _JSON, max_size=5))
    sane = {"prompt": "x", "messages": MESSAGES, "tokens": [1]}
    return json.dumps({**sane, **fields} if draw(st.booleans()) else fields).encode()


@pytest.mark.parametrize("kind", PARSERS, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_json_gives_a_request_or_a_400(kind: type[Any], data: st.DataObject) -> None:
    try:
        request = PARSERS[kind](data.draw(bodies(kind)))
        if isinstance(request, GenerationRequest):
            asked = params(request)
            assert 1 <= asked.max_tokens <= 90
            assert math.isfinite(asked.temperature)
            assert 0 < asked.top_p <= 1
    except ApiError as error:
        assert error.status == 400
        assert len(error.body()) < 2000
        json.loads(error.body())


@pytest.mark.parametrize("kind", PARSERS, ids=lambda kind: kind.__name__)
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_give_a_request_or_a_400(kind: type[Any], body: bytes) -> None:
    try:
        PARSERS[kind](body)
    except ApiError as error:
        assert error.status == 400
        json.loads(error.body())
