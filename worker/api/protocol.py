"""The requests of the OpenAI API with vLLM's extensions: their fields, types and parsing.

Fields that are not listed are accepted and ignored, as in vLLM. Fields of type Any would
change the answer in a way this worker cannot: they are listed so that asking for them is an
error and not a surprise. A null means the default everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec

from worker.api.errors import ApiError

T = TypeVar("T")

MAX_CHOICES = 128  # in one request, over all its prompts


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    echo: bool | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None

    @property
    def num_choices(self) -> int:
        """Answers wanted for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def hides_specials(self) -> bool:
        """Whether special tokens leave no text."""
        return self.skip_special_tokens is not False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage so far."""
        options = self.stream_options
        return self.includes_usage and bool(options and options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: Any = None

    @property
    def wants_prompt_only(self) -> bool:
        """Echo without an answer, which is how prompts are scored."""
        return bool(self.echo) and self.max_tokens == 0


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None

    @property
    def response_role(self) -> str:
        """Who speaks in the answer: the assistant, or whoever is to go on speaking."""
        if self.continue_final_message or self.add_generation_prompt is False:
            return str(self.messages[-1]["role"])
        return "assistant"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, with a prompt or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def parser(kind: type[T]) -> Callable[[bytes], T]:
    """A function from a request body to `kind`; it raises ApiError (400) and nothing else.

    Numbers in strings and whole floats for integers pass, as they do in vLLM.
    """
    decoder = msgspec.json.Decoder(kind, strict=False)

    def parse(body: bytes) -> T:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _field_error(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"The request body is not valid JSON: {error}") from None
        except RecursionError:
            raise ApiError("The request body is nested too deeply") from None

    return parse


_PATH = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`$")


def _field_error(message: str) -> ApiError:
    """msgspec's message, such as "Expected `int`, got `str` - at `$.n`", as ours."""
    missing = _MISSING.match(message)
    if missing:
        name = missing[1]
        return ApiError(f"{name}: this field is required", param=name)
    path = _PATH.search(message)
    if not path:
        return ApiError(f"The request body is not what was expected: {message}")
    name = path[1].lstrip(".")
    return ApiError(f"{name}: {message[: path.start()]}", param=name.partition("[")[0])


def _is_text_format(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "response_format": _is_text_format,
    "tool_choice": lambda value: value in ("auto", "none"),
    "function_call": lambda value: value == "none",
    "modalities": lambda value: value == ["text"],
}


@cache
def _unsupported(kind: type[GenerationRequest]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.type is Any]


def check_supported(request: GenerationRequest) -> None:
    """Raise a 400 that names the first field which asks for what this worker cannot do."""
    for name in _unsupported(type(request)):
        value = getattr(request, name)
        if value is None or value is False or value in ("", [], {}):
            continue
        harmless = _HARMLESS.get(name)
        if name == "best_of" and value == request.num_choices:
            continue
        if not (harmless and harmless(value)):
            raise ApiError(f"{name} is not supported by this worker", param=name)
