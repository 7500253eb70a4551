"""What the model is to read, of each API's requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picker.prefix.asks import ChatAsk, Missed, MissedError, TextAsk, ask_of, key_of
from picker.request import LLMRequest, parse

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def request(path: str, **body: Any) -> LLMRequest:
    headers = {"content-type": "application/json"}
    return parse("POST", path, headers, json.dumps(body).encode())


def chat(path: str, **body: Any) -> ChatAsk:
    ask = ask_of(request(path, **body))
    assert isinstance(ask, ChatAsk)
    return ask


@pytest.mark.parametrize(
    ("path", "body", "ask"),
    [
        ("/v1/completions", {"prompt": 'a"\n'}, TextAsk('a"\n', True)),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False}, TextAsk("a", False)),
        ("/v1/completions", {"prompt": ["a", "b"]}, TextAsk("a", True)),
        ("/v1/embeddings", {"input": "a"}, TextAsk("a", True)),
        ("/v1/embeddings", {"input": ["a"]}, TextAsk("a", True)),
        ("/tokenize", {"prompt": "a"}, TextAsk("a", True)),
        ("/generate", {"text": "a"}, TextAsk("a", True)),
        ("/generate", {"text_input": "a"}, TextAsk("a", True)),
    ],
)
def test_texts(path, body, ask):
    assert ask_of(request(path, **body)) == ask


def test_a_chat_with_all_its_fields():
    ask = chat(
        "/v1/chat/completions",
        messages=HI,
        tools=[TOOL],
        documents=[{"text": "d"}],
        chat_template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=7,
    )
    assert ask.messages == HI
    assert ask.template.tools is not None
    assert ask.template.tools[0]["function"]["name"] == "f"
    assert ask.template.kwargs == {"enable_thinking": False, "documents": [{"text": "d"}]}
    assert ask.template.continue_final_message


def test_chats_of_other_apis_by_their_own_defaults():
    assert chat("/v1/chat/completions", messages=HI).template.add_generation_prompt
    assert not chat("/v1/embeddings", messages=HI).template.add_generation_prompt
    assert chat("/tokenize", messages=HI, documents=[{}]).template.kwargs == {}
    assert chat("/v1/responses", input="Hi").template.add_special_tokens
    assert not chat("/v1/messages", messages=HI).template.add_special_tokens


def test_responses_are_chats():
    assert chat("/v1/responses", instructions="Be brief", input="Hi").messages == [
        {"role": "system", "content": "Be brief"},
        *HI,
    ]
    parts = [{"type": "input_text", "text": "Hi"}]
    items = [{"type": "message", "role": "user", "content": parts}, *HI]
    assert chat("/v1/responses", input=items, tools=[]).messages == [
        {"role": "user", "content": parts},
        *HI,
    ]


def test_anthropics_messages_are_chats():
    blocks = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = chat(
        "/v1/messages",
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief"},
        ],
        messages=[
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": two},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "!"},
        ],
        max_tokens=5,
    )
    assert ask.messages == [
        {"role": "system", "content": "Be brief!"},
        *HI,
        {"role": "assistant", "content": two},
        *HI,
    ]
    counted = chat("/v1/messages/count_tokens", system="Be", messages=HI)
    assert counted.messages == [{"role": "system", "content": "Be"}, *HI]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", {"messages": HI, "chat_template": "x"}, Missed.TEMPLATE),
        ("/v1/chat/completions", {"messages": HI, "truncate_prompt_tokens": 5}, Missed.FORM),
        ("/v1/chat/completions", {"messages": HI, "tools": "f"}, Missed.FORM),
        ("/v1/chat/completions", {"messages": HI, "tools": 1}, Missed.FORM),
        (
            "/v1/chat/completions",
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            Missed.FORM,
        ),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 5}, Missed.FORM),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "x"}, Missed.MEDIA),
        ("/v1/completions", {"prompt": {"a": 1}}, Missed.FORM),
        ("/v1/completions", {"prompt": [["a"]]}, Missed.FORM),
        ("/v1/responses", {"input": "Hi", "tools": [TOOL]}, Missed.FORM),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "r"}, Missed.FORM),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}, Missed.FORM),
        ("/v1/responses", {"input": [{"type": "function_call_output"}]}, Missed.FORM),
        ("/v1/responses", {"input": [{"status": "incomplete", **HI[0]}]}, Missed.FORM),
        ("/v1/messages", {"messages": HI, "tools": [TOOL]}, Missed.FORM),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            Missed.FORM,
        ),
    ],
)
def test_what_is_not_plain_is_told_by_its_reason(path, body, reason):
    with pytest.raises(MissedError) as caught:
        ask_of(request(path, **body))
    assert caught.value.reason is reason


def test_what_is_nested_without_end_is_no_traceback():
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b'{"messages":[],"prompt":"a","chat_template_kwargs":{"a":%b}}' % deep
    asked = request("/v1/chat/completions", messages=HI)
    asked.body = body
    with pytest.raises(MissedError):
        ask_of(asked)


def test_equal_asks_have_equal_names_whatever_stands_beside_them():
    def key(**more: Any) -> bytes:
        return key_of(request("/v1/chat/completions", messages=HI, **more))

    assert key() == key(max_tokens=5, stream=True, user="u", cache_salt="s", model="m")
    names = [
        key(),
        key(tools=[TOOL]),
        key(add_generation_prompt=True),
        key(continue_final_message=True),
        key(chat_template_kwargs={"a": 1}),
        key(documents=[]),
        key_of(request("/v1/chat/completions", messages=[{"role": "user", "content": "Hi "}])),
        key_of(request("/tokenize", messages=HI)),
        key_of(request("/v1/completions", prompt="ab")),
        key_of(request("/v1/completions", prompt="ab", add_special_tokens=False)),
    ]
    assert len(set(names)) == len(names)
