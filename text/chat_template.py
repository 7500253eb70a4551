"""Renders chats with the Jinja templates that models come with, as Hugging Face does.

A template is code from a stranger: it runs in Jinja's sandbox, and its steps, its time and the
sizes of what it makes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from text.chat_messages import ChatTemplateError, Message, is_text, prepare
from text.checked import one_line

MAX_STEPS = 500_000  # rounds of loops, and calls, in one rendering
MAX_SECONDS = 2.0
MAX_LENGTH = 16 << 20  # characters written in all, or items of one value


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
        in_parts = any(isinstance(message.get("content"), list) for message in messages)
        prepared = prepare(messages, keep_parts=in_parts and self._takes_parts)
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
        except Exception as error:  # the compiler fails in many ways on what is no template
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
        if isinstance(text, list) and text and is_text(text[-1]):
            text = text[-1]["text"]
        if not isinstance(text, str):
            raise ChatTemplateError("there is no final message with a text to continue")
        marked = [*messages[:-1], _marked(messages[-1])]
        before, found, after = self._run(variables | {"messages": marked}).rpartition(_MARK.strip())
        if not found:
            raise ChatTemplateError("the chat template does not write the final message's text")
        # Where the template trimmed the mark's space, it would have trimmed the text's too.
        return before if after.startswith(" ") else before.rstrip()

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


_MARK = "\ue000continued\ue000 "


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + _MARK}
    last = content[-1]
    return message | {"content": [*content[:-1], last | {"text": last["text"] + _MARK}]}


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


class _Meter(NodeTransformer):
    """Makes a template's loops count their rounds, and its `~` check what it joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_metered_loop", node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, "_metered_concat", node.lineno)


def _filtered(expression: nodes.Node, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(expression, name, [], [], None, None, lineno=lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop and call counted, and what operators make bounded."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        return super()._generate(_Meter().visit(source), name, filename, defer_init)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context["_budget"].step()
        _refuse_large_numbers(args, kwargs)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "*" and _repeated(left, right) > MAX_LENGTH):
            raise _TooMuch(f"it used {operator} on values that are too large")
        return _bounded(super().call_binop(context, operator, left, right))


def _repeated(left: Any, right: Any) -> int:
    """The length of `left * right` where one of them is a sequence."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * times
    return 0


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_LENGTH:
        raise _TooMuch("it made a value that is too large")
    return value


def _refuse_large_numbers(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """A number may be a width or a count: `"a" | center(10000000000)`."""
    if any(type(value) is int and value > MAX_LENGTH for value in (*args, *kwargs.values())):
        raise _TooMuch("it used a number that is too large")


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_large_numbers(args, kwargs)
        return function(*args, **kwargs)

    return checked


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


def _metered_concat(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_LENGTH:
        raise _TooMuch("it made a value that is too large")
    return "".join(texts)


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
    for name in ("center", "indent", "batch", "slice"):
        environment.filters[name] = _with_small_numbers(environment.filters[name])
    environment.filters["tojson"] = _with_small_numbers(_to_json)
    environment.filters["_metered_loop"] = _metered_loop
    environment.filters["_metered_concat"] = _metered_concat
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()
