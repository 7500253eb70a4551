"""Checks of what clients send as a prompt and as messages, before it is tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.api.errors import ApiError, require, show
from worker.api.protocol import MAX_CHOICES

MAX_PARTS = 4096  # of one message


def prompt_forms(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """The four forms of a prompt as a list of texts and token lists, none of them empty.

    Raises:
        ApiError: there are none, too many, or mixed ones.
    """
    if isinstance(prompt, str):
        return [_filled(prompt)]
    if not prompt:
        raise ApiError("The prompt must not be empty.", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]  # just seen to be all integers
    if int in kinds:
        raise ApiError("prompt cannot mix token ids with texts or lists", param="prompt")
    count = len(prompt)
    require(count <= MAX_CHOICES, "prompt", f"for at most {MAX_CHOICES} choices", count)
    return [_filled(part) for part in prompt]  # type: ignore[arg-type]  # no integers left


def _filled(part: str | list[int]) -> str | list[int]:
    if not part:
        raise ApiError("The prompt must not be empty.", param="prompt")
    return part


def checked_text(message: Mapping[str, Any], where: str) -> str:
    """A message's text, or a 400 for anything that is not text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(f"{where}.content: expected a text or a list of parts", param="messages")
    count = len(content)
    require(count <= MAX_PARTS, "messages", f"of at most {MAX_PARTS} parts each", count)
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text"):
            raise ApiError(
                f"{where}.content[{index}]: only text is supported, got {show(kind)}",
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise ApiError(
                f"{where}.content[{index}].text: this field is required", param="messages"
            )
    return text_of(message)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message that `checked_text` has let pass."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
