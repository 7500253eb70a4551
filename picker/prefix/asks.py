"""What a request gives its model to read: a text, or a chat and how it is rendered.

The requests of every API end up as one of these, by the rules of vLLM's own conversions. Where
those are not plain (tool calls of Anthropic's and of the Responses API, media, a template that the
client brought, what only the server has stored) there is no ask, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import xxhash

from picker.request import Kind, LLMRequest
from text.asked import AskedError, Template, adds_special_tokens, of_chat, of_tokenize


class Missed(StrEnum):
    """Why a prompt's tokens are not known."""

    FORM = "form"  # a request whose way to tokens is not known, or that is malformed
    MEDIA = "media"  # images and the like are tokens that only the engine makes
    TEMPLATE = "template"  # the chat template refuses, is missing, or is the client's own
    LONG = "long"  # more than is tokenised for a routing decision
    BUSY = "busy"  # too many prompts are waiting for their tokens
    SLOW = "slow"  # it took longer than a request should wait
    FAILED = "failed"  # the tokenizer, or the pod that was asked, failed


class MissedError(Exception):
    """A prompt whose tokens cannot be had."""

    def __init__(self, reason: Missed) -> None:
        super().__init__(reason.value)
        self.reason = reason


class TextAsk(NamedTuple):
    """A text as it is."""

    text: str
    add_special_tokens: bool


class ChatAsk(NamedTuple):
    """A chat to be rendered."""

    messages: list[dict[str, Any]]
    template: Template


Raw = msgspec.Raw
_UNSET = Raw()


class _Text(msgspec.Struct):
    prompt: Raw = _UNSET
    input: Raw = _UNSET
    text: Raw = _UNSET
    text_input: Raw = _UNSET
    add_special_tokens: bool | None = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None


class ChatBody(msgspec.Struct, kw_only=True):
    """The fields that text.asked reads, with the types that the worker gives them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    truncate_prompt_tokens: Any = None


class _Messages(msgspec.Struct):
    messages: Raw = _UNSET


class _Responses(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    # What makes a prompt of more than its texts.
    conversation: Any = None
    previous_input_messages: Any = None
    previous_response: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    reasoning: Any = None
    tools: Any = None


class _Block(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Anthropic(msgspec.Struct, kw_only=True):
    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: Any = None
    output_config: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


# Lenient as the worker's.
_TEXT = msgspec.json.Decoder(_Text, strict=False)
_CHAT = msgspec.json.Decoder(ChatBody, strict=False)
_RESPONSES = msgspec.json.Decoder(_Responses, strict=False)
_ANTHROPIC = msgspec.json.Decoder(_Anthropic, strict=False)
_ONLY_MESSAGES = msgspec.json.Decoder(_Messages)
_STRING = msgspec.json.Decoder(str)
_LIST = msgspec.json.Decoder(list[Raw])


def ask_of(request: LLMRequest) -> TextAsk | ChatAsk:
    """What a request's model is to read; of several prompts the first.

    Raises:
        MissedError: that is not known.
    """
    try:
        return _READERS[request.kind](request.body)
    except (AskedError, msgspec.DecodeError, RecursionError):  # the engine will refuse it
        raise MissedError(Missed.FORM) from None


def key_of(request: LLMRequest) -> bytes:
    """A name for what a request's model is to read: equal for equal asks.

    The body is hashed as it came but for what has no part in the prompt.
    """
    digest = xxhash.xxh3_128(request.kind.encode())
    read = _ALL.decode(request.body)
    for place, raw in enumerate(msgspec.structs.astuple(read)):
        if raw:
            digest.update(b"%d,%d:" % (place, len(raw)))
            digest.update(raw)
    return digest.digest()


def _completion(body: bytes) -> TextAsk:
    found = _TEXT.decode(body)
    return _text(found, found.prompt)


def _generate(body: bytes) -> TextAsk:
    found = _TEXT.decode(body)
    return _text(found, found.prompt or found.text or found.text_input)


def _text(found: _Text, raw: Raw) -> TextAsk:
    _refuse(found.prompt_embeds, Missed.MEDIA)
    _refuse(found.truncate_prompt_tokens)
    if bytes(raw).startswith(b"["):
        texts = _LIST.decode(raw)
        raw = texts[0] if texts else raw
    return TextAsk(_STRING.decode(raw), adds_special_tokens(found.add_special_tokens))


def _chat(body: bytes) -> ChatAsk:
    return _rendered(_CHAT.decode(body))


def _rendered(found: ChatBody) -> ChatAsk:
    _refuse(found.chat_template, Missed.TEMPLATE)
    _refuse(found.truncate_prompt_tokens)
    return ChatAsk(found.messages, of_chat(found))


def _tokenize(body: bytes) -> TextAsk | ChatAsk:
    if not _has_messages(body):
        return _completion(body)
    found = _CHAT.decode(body)
    _refuse(found.chat_template, Missed.TEMPLATE)
    return ChatAsk(found.messages, of_tokenize(found))


def _embedding(body: bytes) -> TextAsk | ChatAsk:
    if not _has_messages(body):
        found = _TEXT.decode(body)
        return _text(found, found.input)
    chat = _CHAT.decode(body)
    if chat.add_generation_prompt is None:  # nothing is to be generated
        chat.add_generation_prompt = False
    return _rendered(chat)


def _responses(body: bytes) -> ChatAsk:
    found = _RESPONSES.decode(body)
    for value in msgspec.structs.astuple(found)[2:]:
        _refuse(value)
    messages = [{"role": "system", "content": found.instructions}] if found.instructions else []
    if isinstance(found.input, str):
        messages.append({"role": "user", "content": found.input})
    else:
        for item in found.input:
            if item.keys() - {"type", "role", "content"} or item.get("type") not in _PLAIN_ITEMS:
                raise MissedError(Missed.FORM)
            messages.append({name: item[name] for name in item if name != "type"})
    # vLLM adds the special tokens of plain texts to these chats.
    return ChatAsk(messages, of_chat(ChatBody(messages=messages, add_special_tokens=True)))


def _anthropic(body: bytes) -> ChatAsk:
    found = _ANTHROPIC.decode(body)
    _refuse(found.tools)
    _refuse(found.output_config)
    system: list[str] = []
    messages: list[dict[str, Any]] = []
    if found.system is not None:
        system += _told(found.system)
    for message in found.messages:
        if message.role == "system":
            system += _told(message.content)
        elif isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif texts := _texts(message.content):
            parts = [{"type": "text", "text": text} for text in texts]
            content = texts[0] if len(texts) == 1 else parts
            messages.append({"role": message.role, "content": content})
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    chat = ChatBody(messages=messages, chat_template_kwargs=found.chat_template_kwargs)
    return ChatAsk(messages, of_chat(chat))


def _told(content: str | list[_Block]) -> list[str]:
    """The texts of instructions, but for what Claude Code notes there and vLLM takes out."""
    if isinstance(content, str):
        return [content] if content else []
    return [text for text in _texts(content) if not text.startswith("x-anthropic-billing-header")]


def _texts(blocks: list[_Block]) -> list[str]:
    if any(block.type != "text" for block in blocks):
        raise MissedError(Missed.FORM)
    return [block.text for block in blocks if block.text]


def _refuse(value: object, reason: Missed = Missed.FORM) -> None:
    """No ask where a field says something."""
    if value is not None and value != []:
        raise MissedError(reason)


def _has_messages(body: bytes) -> bool:
    return bool(_ONLY_MESSAGES.decode(body).messages)


_PLAIN_ITEMS = (None, "message")
_READERS: dict[Kind, Callable[[bytes], TextAsk | ChatAsk]] = {
    Kind.COMPLETION: _completion,
    Kind.CHAT: _chat,
    Kind.RESPONSES: _responses,
    Kind.EMBEDDING: _embedding,
    Kind.MESSAGES: _anthropic,
    Kind.TOKENIZE: _tokenize,
    Kind.GENERATE: _generate,
}
_NAMES = {
    field.name
    for kind in (_Text, ChatBody, _Responses, _Anthropic)
    for field in msgspec.structs.fields(kind)
}
_ALL = msgspec.json.Decoder(
    msgspec.defstruct("All", [(name, Raw, _UNSET) for name in sorted(_NAMES)])
)
