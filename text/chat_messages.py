"""Chat messages as OpenAI's clients send them, made ready for a chat format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text")


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; the message is one line."""


def prepare(messages: Sequence[Message], *, keep_parts: bool) -> list[dict[str, Any]]:
    """Copies with a content that is never null, and tool calls' arguments as objects.

    Content in parts becomes one text, a line for each part, unless `keep_parts`. Parts that are
    not text are a ChatTemplateError.
    """
    return [_prepared(message, keep_parts) for message in messages]


def is_text(part: object) -> bool:
    """Whether a part of a message's content is text."""
    return (
        isinstance(part, Mapping)
        and part.get("type", "text") in _TEXT_PARTS
        and isinstance(part.get("text"), str)
    )


def _prepared(message: Message, keep_parts: bool) -> dict[str, Any]:
    prepared = dict(message)
    content = prepared.get("content")
    if content is None:
        prepared["content"] = ""
    elif isinstance(content, list):
        prepared["content"] = _prepared_parts(content, keep_parts)
    calls = prepared.get("tool_calls")
    if isinstance(calls, list):
        prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return prepared


def _prepared_parts(content: list[Any], keep_parts: bool) -> str | list[dict[str, str]]:
    for part in content:
        if not is_text(part):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatTemplateError(f"only text parts are supported in a message, got {kind!r:.80}")
    if keep_parts:
        return [{"type": "text", "text": part["text"]} for part in content]
    return "\n".join(part["text"] for part in content)


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI's clients send a call's arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
