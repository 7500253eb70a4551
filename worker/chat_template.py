"""Renders chats with the Jinja templates that models come with, as Hugging Face does.

A template is code from a stranger: it runs in Jinja's sandbox, and its steps, its time and the
sizes of what it makes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.checked import one_line

Message = Mapping[str, Any]

MAX_STEPS = 2_000_000  # rounds of loops, and calls, in one rendering
MAX_SECONDS = 5.0
MAX_LENGTH = 16 << 20  # characters written in all, or items of one value
_TEXT_PARTS = ("text", "input_text", "output_text")


class ChatTemplateError(ValueError):
    """The template refused these messages, or is broken; the message is one line."""


class ChatTemplate:
    """One model's template, with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The chat as one text. The rest of the arguments are the template's own variables.

        Continuing the final message leaves its text open at the end, for the model to go on
        with; no generation prompt is added then.
        """
        prepared = [self._prepared(message) for message in messages]
        variables: dict[str, Any] = {
            **self.special_tokens,
            "tools": list(tools) if tools else None,
            "documents": None,
            **template_kwargs,
            "messages": prepared,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if not continue_final_message:
            return self._run(variables)
        return self._run_open_ended(prepared, variables)

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _ENVIRONMENT.from_string(self.source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template is broken: {one_line(error)}") from error

    def _run(self, variables: Mapping[str, Any]) -> str:
        template = self._template
        try:
            return template.render(variables, _budget=_Budget())
        except RecursionError:
            raise ChatTemplateError("the chat template recurses without end") from None
        # Whatever a template's code may raise: it is data here, not part of this program.
        except Exception as error:
            text = one_line(error) or type(error).__name__
            raise ChatTemplateError(f"the chat template refused the messages: {text}") from error

    def _run_open_ended(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        text = messages[-1].get("content") if messages else None
        if isinstance(text, list) and text and _is_text(text[-1]):
            text = text[-1]["text"]
        if not isinstance(text, str):
            raise ChatTemplateError("there is no final message with a text to continue")
        mark = "\ue000continued\ue000"
        rendered = self._run(
            variables | {"messages": [*messages[:-1], _marked(messages[-1], mark)]}
        )
        before, found, _ = rendered.rpartition(mark)
        if not found:
            raise ChatTemplateError("the chat template does not write the final message's text")
        # A template that trims the text would have trimmed its end too.
        if before.endswith(text):
            return before
        return before.rstrip() if before.rstrip().endswith(text.strip()) else before

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template itself handles content that is a list of parts: tried out."""
        probe = "\ue001probe\ue001"
        message = {"role": "user", "content": [{"type": "text", "text": probe}]}
        try:
            rendered = self._run(
                {
                    **self.special_tokens,
                    "tools": None,
                    "documents": None,
                    "messages": [message],
                    "add_generation_prompt": False,
                }
            )
        except ChatTemplateError:
            return False
        return probe in rendered and repr(message["content"]) not in rendered

    def _prepared(self, message: Message) -> dict[str, Any]:
        """A copy with the text parts joined, and arguments of tool calls as objects."""
        prepared = dict(message)
        content = prepared.get("content")
        if isinstance(content, list):
            for part in content:
                if not _is_text(part):
                    kind = part.get("type") if isinstance(part, Mapping) else part
                    raise ChatTemplateError(f"only text parts are supported, got {kind!r:.80}")
            prepared["content"] = (
                [{"type": "text", "text": part["text"]} for part in content]
                if self._takes_parts
                else "\n".join(part["text"] for part in content)
            )
        elif content is None:
            prepared["content"] = ""
        if isinstance(prepared.get("tool_calls"), list):
            prepared["tool_calls"] = [
                _with_parsed_arguments(call) for call in message["tool_calls"]
            ]
        return prepared


def choose_template(value: object) -> str | None:
    """The template out of tokenizer_config.json: a string, or the default of several."""
    if isinstance(value, str):
        return value
    named = {
        entry["name"]: entry["template"]
        for entry in (value if isinstance(value, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    return named.get("default")


def _is_text(part: object) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type", "text") in _TEXT_PARTS
        and isinstance(part.get("text"), str)
    )


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + mark}
    last = content[-1]
    return message | {"content": [*content[:-1], last | {"text": last["text"] + mark}]}


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


class _TooMuch(Exception):
    """The template asked for more than its bounds allow."""


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.length = MAX_LENGTH
        self.deadline = monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0 or monotonic() > self.deadline:
            raise _TooMuch("it ran for too long")

    def write(self, length: int) -> None:
        self.length -= length
        if self.length < 0:
            raise _TooMuch(f"it wrote more than {MAX_LENGTH} characters")

    def over(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop and call counted, and the results of operators bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = _metered(loop.iter, "_metered_loop", loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context["_budget"].step()
        if any(type(value) is int and value > MAX_LENGTH for value in (*args, *kwargs.values())):
            raise _TooMuch("it used a number that is too large")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "*" and _repeated(left, right) > MAX_LENGTH):
            raise _TooMuch(f"it used {operator} on values that are too large")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple) and len(result) > MAX_LENGTH:
            raise _TooMuch("it made a value that is too large")
        return result


def _repeated(left: Any, right: Any) -> int:
    """The length of `left * right` where one of them is a sequence."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * times
    return 0


def _metered(expression: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(expression, name, [], [], None, None, lineno=lineno)


@jinja2.pass_context
def _metered_output(context: Context, value: Any) -> Any:
    """Runs for each {{ ... }}, also within macros and blocks that are captured."""
    if isinstance(value, str):
        budget: _Budget = context["_budget"]
        budget.write(len(value))
    return value


@jinja2.pass_context
def _metered_loop(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    budget: _Budget = context["_budget"]
    return budget.over(items)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_metered_output,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.filters["_metered_loop"] = _metered_loop
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()
