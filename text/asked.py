"""What a request asks to be rendered and tokenised: from its fields to a template's arguments.

The worker and the picker both read requests by this module, so that they cannot differ: a picker
that counts one token more or less finds none of the blocks that the worker has cached. The rules
are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

RESERVED_KWARGS = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}
)
_MAX_SHOWN = 40  # characters of a client's value repeated to it


class AskedError(ValueError):
    """A request that asks for what cannot be; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TemplateFields(Protocol):
    """What /tokenize and chats have in common; None stands for null and for a missing field."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    chat_template_kwargs: dict[str, Any] | None


class ChatFields(TemplateFields, Protocol):
    """What a chat has besides."""

    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None


class Renderer(Protocol):
    """A tokenizer with a chat format."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str: ...


class Template(NamedTuple):
    """How messages are to be rendered, and the text that it gives to be tokenised."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    kwargs: dict[str, Any]

    @property
    def is_plain(self) -> bool:
        """Whether the messages alone say how long a rendering takes."""
        return not self.tools and not self.kwargs

    def render(self, renderer: Renderer, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a chat.

        Raises:
            ChatTemplateError: the template refuses it.
            RecursionError: the tools or the variables are nested too deeply.
        """
        return renderer.render_chat(
            messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            **self.kwargs,
        )


def of_chat(asked: ChatFields) -> Template:
    """For POST /v1/chat/completions.

    Raises:
        AskedError: the fields contradict each other, or set what is not theirs.
    """
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.documents is not None:
        kwargs["documents"] = asked.documents
    if asked.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", asked.reasoning_effort)
    return _template(asked, kwargs)


def of_tokenize(asked: TemplateFields) -> Template:
    """For POST /tokenize with messages. Raises as `of_chat`."""
    return _template(asked, dict(asked.chat_template_kwargs or {}))


def adds_special_tokens(add_special_tokens: bool | None) -> bool:
    """Whether a prompt that is a text gets the tokens that a text begins with, by this field."""
    return add_special_tokens is not False


def _template(asked: TemplateFields, kwargs: dict[str, Any]) -> Template:
    if asked.add_generation_prompt and asked.continue_final_message:
        raise AskedError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        )
    for name in kwargs:
        if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            shown = name if len(name) <= _MAX_SHOWN else name[: _MAX_SHOWN - 3] + "..."
            raise AskedError(f"chat_template_kwargs cannot set {shown!r}", "chat_template_kwargs")
    return Template(
        tools=[_as_declared(tool) for tool in asked.tools] if asked.tools else None,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        # A chat that was rendered has its special tokens already.
        add_special_tokens=bool(asked.add_special_tokens),
        kwargs=kwargs,
    )


# Fields of a tool in the order in which vLLM declares them; what is missing is null there, but
# for the type.
_TOOL: dict[str, object] = {"type": "function", "function": None}
_FUNCTION: dict[str, object] = {"name": None, "description": None, "parameters": None}


def _as_declared(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM hands it to templates, which write it out field by field."""
    if not isinstance(tool.get("function"), dict):
        return tool
    function = {**_FUNCTION, **tool["function"]}
    return {**_TOOL, **tool, "function": function}
