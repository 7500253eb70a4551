"""How the fields of a request become a template's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from picker.prefix.asks import ChatBody
from text.asked import AskedError, adds_special_tokens, of_chat, of_tokenize
from text.byte_tokenizer import ByteTokenizer
from worker.api.protocol import ChatRequest, TokenizeRequest


@dataclass
class Asked:
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


def test_a_chat_that_asks_for_nothing_gets_a_generation_prompt_and_no_special_tokens():
    template = of_chat(Asked())
    assert template.is_plain
    assert template.add_generation_prompt
    assert not template.continue_final_message
    assert not template.add_special_tokens
    assert template.tools is None
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(ByteTokenizer(), messages) == ByteTokenizer().render_chat(messages)


def test_fields_of_their_own_reach_the_template_as_its_variables():
    asked = Asked(documents=[{"text": "d"}], reasoning_effort="low")
    assert of_chat(asked).kwargs == {"documents": [{"text": "d"}], "reasoning_effort": "low"}
    assert not of_chat(asked).is_plain
    assert of_tokenize(asked).kwargs == {}  # /tokenize does not know them
    asked.chat_template_kwargs = {"reasoning_effort": "high", "enable_thinking": False}
    assert of_chat(asked).kwargs["reasoning_effort"] == "high"  # what is said twice
    assert of_tokenize(asked).kwargs == {"reasoning_effort": "high", "enable_thinking": False}


def test_tools_are_written_as_vllm_declares_them():
    tool = {"function": {"parameters": {"type": "object"}, "name": "f", "strict": True}}
    (declared,) = of_chat(Asked(tools=[tool])).tools or []
    function = declared["function"]
    assert list(declared) == ["type", "function"]
    assert declared["type"] == "function"
    assert list(function) == ["name", "description", "parameters", "strict"]
    assert function["description"] is None
    assert of_chat(Asked(tools=[])).tools is None
    odd = {"type": "custom", "custom": {}}  # which an engine refuses or passes on
    assert of_chat(Asked(tools=[odd])).tools == [odd]


def test_a_message_cannot_be_continued_and_answered():
    with pytest.raises(AskedError) as caught:
        of_chat(Asked(add_generation_prompt=True, continue_final_message=True))
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("name", ["messages", "self", "tools", "_private", "no name", "x" * 100])
def test_variables_cannot_take_the_place_of_others(name):
    asked = Asked(chat_template_kwargs={name: 1})
    if name == "x" * 100:
        assert of_chat(asked).kwargs == {name: 1}
        return
    with pytest.raises(AskedError, match="chat_template_kwargs cannot set"):
        of_chat(asked)


def test_a_text_gets_its_special_tokens_unless_refused():
    assert [adds_special_tokens(value) for value in (None, True, False)] == [True, True, False]


def types(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def test_the_picker_reads_the_fields_with_the_workers_types():
    picker, chat, tokenize = types(ChatBody), types(ChatRequest), types(TokenizeRequest)
    assert picker == {name: chat[name] for name in picker}
    assert all(
        picker[name] == tokenize[name] for name in picker.keys() & tokenize.keys() - {"messages"}
    )
