"""From what a request asks for to how the engine samples: every number is checked here.

Rules and wording are vLLM's (sampling_params.py) where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from worker.api.errors import ApiError, require
from worker.api.protocol import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_supported,
)
from worker.sequence import SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of all stop strings; building their automaton takes time
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
MAX_SALT_LENGTH = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat may fill the context
MIN_TEMPERATURE = 0.01  # unless it is 0
INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows."""

    max_model_len: int  # tokens, prompt and answer
    vocab_size: int
    eos_ids: frozenset[int]


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """Raise a 400 for the first field whose value cannot be served, prompt aside."""
    check_supported(request)
    _check_amounts(request, limits)
    _check_sampling(request)
    _check_stops(request)
    _check_logit_bias(request.logit_bias, limits.vocab_size)
    _check_logprobs(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    if request.cache_salt is not None:
        length = len(request.cache_salt)
        require(1 <= length <= MAX_SALT_LENGTH, "cache_salt", "1 to 1024 characters long", length)


def sampling_params(
    request: GenerationRequest, prompt_length: int, limits: ModelLimits
) -> SamplingParams:
    """How to sample an answer to a prompt of `prompt_length` tokens.

    Raises:
        ApiError: prompt and answer do not fit into the model's context.
    """
    max_tokens = _max_tokens(request, prompt_length, limits.max_model_len)
    stop_token_ids = frozenset(request.stop_token_ids or ())
    wanted = request.logprobs if isinstance(request, CompletionRequest) else _chat_logprobs(request)
    of_prompt = request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo and wanted is not None:
        of_prompt = max(wanted, of_prompt or 0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=_temperature(_default(request.temperature, 1.0)),
        top_p=_default(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        logit_bias=request.logit_bias or None,
        logprobs=wanted,
        prompt_logprobs=of_prompt,
        stop_token_ids=stop_token_ids if request.ignore_eos else stop_token_ids | limits.eos_ids,
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The same for the `index`-th answer to a prompt: seeded answers must differ."""
    if params.seed is None or index == 0:
        return params
    wrapped = (params.seed + index + 2**63) % 2**64 - 2**63  # it stays a 64-bit integer
    return replace(params, seed=wrapped)


def check_prompt_length(length: int, max_model_len: int) -> None:
    """Raise a 400 unless at least one token fits behind a prompt of `length` tokens."""
    if length >= max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {length} input tokens, and at least one is needed for the answer. Please "
            f"reduce the length of the input prompt. (parameter=input_tokens, value={length})",
            param="input_tokens",
        )


def asked_max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that limits the answer, and its value."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _max_tokens(request: GenerationRequest, prompt_length: int, max_model_len: int) -> int:
    check_prompt_length(prompt_length, max_model_len)
    room = max_model_len - prompt_length
    name, asked = asked_max_tokens(request)
    if asked is None:
        return room if isinstance(request, ChatRequest) else min(DEFAULT_COMPLETION_TOKENS, room)
    if asked > room:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {asked} output tokens and your prompt contains {prompt_length} input "
            f"tokens, for a total of {asked + prompt_length} tokens. Please reduce the length of "
            f"the input prompt or the number of requested output tokens. "
            f"(parameter={name}, value={asked})",
            param=name,
        )
    return max(asked, 1)  # scoring a prompt samples one token, which is not shown


def _check_amounts(request: GenerationRequest, limits: ModelLimits) -> None:
    name, asked = asked_max_tokens(request)
    if asked is not None:
        scores_prompt = isinstance(request, CompletionRequest) and request.wants_prompt_only
        require(asked >= 1 or scores_prompt, name, "at least 1", asked)
        if asked > limits.max_model_len:
            raise ApiError(
                f"{name}={asked} cannot be greater than max_model_len={limits.max_model_len}. "
                f"Please request fewer output tokens. (parameter={name}, value={asked})",
                param=name,
            )
    least = request.min_tokens or 0
    most = asked
    if most is None:
        is_chat = isinstance(request, ChatRequest)
        most = limits.max_model_len if is_chat else DEFAULT_COMPLETION_TOKENS
    require(least >= 0, "min_tokens", "at least 0", least)
    require(least <= most, "min_tokens", f"at most {name}={most}", least)
    n = request.num_choices
    require(1 <= n <= MAX_CHOICES, "n", f"at least 1 and at most {MAX_CHOICES}", n)
    require((request.seed or 0) in INT64, "seed", "a 64-bit integer", request.seed)
    require((request.priority or 0) in INT64, "priority", "a 64-bit integer", request.priority)


def _check_sampling(request: GenerationRequest) -> None:
    temperature = _default(request.temperature, 1.0)
    require(isfinite(temperature) and temperature >= 0, "temperature", "non-negative", temperature)
    top_p = _default(request.top_p, 1.0)
    require(0 < top_p <= 1, "top_p", "in (0, 1]", top_p)
    top_k = request.top_k or 0
    require(-1 <= top_k < 2**31, "top_k", "0 or -1 (off), or at least 1", top_k)
    min_p = request.min_p or 0.0
    require(0 <= min_p <= 1, "min_p", "in [0, 1]", min_p)
    repetition = _default(request.repetition_penalty, 1.0)
    # Beyond these, float32 logits overflow and take the whole step's other sequences along.
    require(0.01 <= repetition <= 100, "repetition_penalty", "in [0.01, 100]", repetition)
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(request, name) or 0.0
        require(-2 <= penalty <= 2, name, "in [-2, 2]", penalty)


def _check_stops(request: GenerationRequest) -> None:
    stops = request.stop_strings
    require(
        len(stops) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(stops)
    )
    if not all(stops):
        raise ApiError("stop cannot contain an empty string.", param="stop")
    length = sum(map(len, stops))
    rule = f"at most {MAX_STOP_LENGTH} characters long in all"
    require(length <= MAX_STOP_LENGTH, "stop", rule, length)
    count = len(request.stop_token_ids or ())
    require(count <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} ids", count)


def _check_logit_bias(biases: dict[int, float] | None, vocab_size: int) -> None:
    if not biases:
        return
    count = len(biases)
    require(
        count <= MAX_BIASED_TOKENS, "logit_bias", f"for at most {MAX_BIASED_TOKENS} tokens", count
    )
    for token_id, bias in biases.items():
        require(0 <= token_id < vocab_size, "logit_bias", f"for ids below {vocab_size}", token_id)
        require(-100 <= bias <= 100, "logit_bias", "in [-100, 100]", bias)


def _check_logprobs(request: GenerationRequest) -> None:
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise ApiError(
                "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
            )
        _check_count("top_logprobs", request.top_logprobs)
    elif isinstance(request, CompletionRequest):
        _check_count("logprobs", request.logprobs)
    _check_count("prompt_logprobs", request.prompt_logprobs)
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs"
        )


def _check_count(name: str, count: int | None) -> None:
    rule = f"at least 0 and at most {MAX_LOGPROBS}"
    require(count is None or 0 <= count <= MAX_LOGPROBS, name, rule, count)


def _chat_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest) and request.logprobs:
        return request.top_logprobs or 0
    return None


def _temperature(asked: float) -> float:
    """Almost 0 would overflow float32 logits; vLLM raises it to the same."""
    return max(asked, MIN_TEMPERATURE) if asked else 0.0


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
