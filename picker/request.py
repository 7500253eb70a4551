"""LLMRequest: what was asked, parsed once from the original bytes.

Only what the picker acts on is checked. All else is the engine's to judge, and passes.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import msgspec

from picker import prompt as prompts
from picker.json_body import INT64, Fields, boolean, fields, integer, string, wrong
from picker.refusal import Refusal

MAX_MODEL = 256  # characters
MAX_CACHE_SALT = 1024  # characters; vLLM takes as many
MAX_ID = 128  # characters


class Kind(StrEnum):
    """Which API a request speaks."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSES = "responses"
    EMBEDDING = "embedding"
    MESSAGES = "messages"  # Anthropic's
    TOKENIZE = "tokenize"
    GENERATE = "generate"  # token ids in, token ids out
    OTHER = "other"  # routed by load alone


@dataclass(slots=True)
class LLMRequest:
    """One request, as it came and as it is understood."""

    id: str  # the client's `x-request-id` where it is fit for logs, else a new one
    method: str
    path: str  # with its query
    headers: Mapping[str, str]  # lower-case names
    body: bytes
    kind: Kind
    model: str | None = None
    prompt: bytes = b""  # what the model will see, in its order; see picker.prompt
    prompt_tokens: int = 0  # counted for token ids, else a quarter of the prompt's bytes
    salt: bytes = b""  # what parts caches without being prompt: model (or adapter), cache salt
    max_output_tokens: int | None = None
    stream: bool = False
    subset: tuple[str, ...] | None = None  # endpoints that the gateway allows; None: all


def parse(
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    subset: tuple[str, ...] | None = None,
) -> LLMRequest:
    """A request from its parts; `headers` have lower-case names.

    A body of None was not shown to us, or not all of it: such a request is routed by load alone.

    Raises:
        Refusal: 400: a JSON request of a known API whose body is no JSON object, repeats a field
            that is acted on, or holds a wrong value in one.
    """
    kind = Kind.OTHER if body is None else _kind(method, path, headers, body)
    request = LLMRequest(_id(headers), method, path, headers, body or b"", kind, subset=subset)
    dialect = _DIALECTS.get(kind)
    if dialect is not None:
        try:
            _read(request, dialect)
        except RecursionError:
            raise Refusal(400, "invalid_json", "the request body is nested too deeply") from None
    return request


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Where an API puts what the picker acts on."""

    prompt: Callable[[Fields], prompts.Flat]
    prompt_fields: tuple[str, ...]
    limits: tuple[str, ...] = ()  # of output tokens; the first that is set counts
    sampling_params: bool = False  # whether they may hold such a limit too

    def acted_on(self) -> frozenset[str]:
        names = ["model", "stream", "cache_salt", *self.limits, *self.prompt_fields]
        return frozenset((*names, "sampling_params") if self.sampling_params else names)


def _read(request: LLMRequest, dialect: _Dialect) -> None:
    found = fields(request.body, _ACTED_ON[request.kind])
    request.model = string(found, "model", MAX_MODEL)
    request.stream = boolean(found, "stream")
    cache_salt = string(found, "cache_salt", MAX_CACHE_SALT)
    request.salt = _salt(request.model, cache_salt)
    request.max_output_tokens = _limit(found, dialect)
    request.prompt, tokens = dialect.prompt(found)
    if tokens is not None:
        request.prompt_tokens = tokens
    elif request.prompt:
        request.prompt_tokens = max(1, len(request.prompt) // prompts.BYTES_PER_TOKEN)


@lru_cache(maxsize=256)
def _salt(model: str | None, cache_salt: str | None) -> bytes:
    """Each part with its letter and its length, so that no name can pass for a salt."""
    salt = b""
    for tag, text in ((b"m", model), (b"c", cache_salt)):
        if text is not None:
            value = text.encode()
            salt += tag + struct.pack("<I", len(value)) + value
    return salt


class _SamplingParams(msgspec.Struct):
    max_tokens: INT64 | None = None  # vLLM
    max_new_tokens: INT64 | None = None  # SGLang


_SAMPLING_PARAMS = msgspec.json.Decoder(_SamplingParams)


def _limit(found: Fields, dialect: _Dialect) -> int | None:
    limit = None
    for name in dialect.limits:
        if name in found:
            value = integer(found, name)
            limit = value if limit is None else limit
    if dialect.sampling_params and limit is None:
        limit = _sampling_limit(found)
    return None if limit is None or limit < 0 else limit


def _sampling_limit(found: Fields) -> int | None:
    raw = found.get("sampling_params")
    if raw is None or not bytes(raw).startswith(b"{"):
        return None
    try:
        params = _SAMPLING_PARAMS.decode(raw)
    except msgspec.ValidationError:
        raise wrong("sampling_params.max_tokens", "an integer of 64 bits") from None
    return params.max_new_tokens if params.max_tokens is None else params.max_tokens


def _completion(found: Fields) -> prompts.Flat:
    return prompts.flat(found.get("prompt"), "prompt")


# What chat templates are given beside the messages; most put it before them.
_BESIDE_MESSAGES = (
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "tools",
    "functions",
)
_BESIDE_INPUT = ("previous_response_id", "conversation", "prompt", "reasoning", "tools")


def _chat(found: Fields) -> prompts.Flat:
    conversation = prompts.messages(found.get("messages"), "messages")
    return prompts.fields(found, _BESIDE_MESSAGES) + conversation, None


def _responses(found: Fields) -> prompts.Flat:
    given = found.get("input")
    if given is not None and bytes(given).startswith(b"["):
        conversation = prompts.messages(given, "input")
    else:
        conversation = prompts.message("user", given, "input")
    instructions = prompts.message("system", found.get("instructions"), "instructions")
    return prompts.fields(found, _BESIDE_INPUT) + instructions + conversation, None


def _embedding(found: Fields) -> prompts.Flat:
    return _chat(found) if "messages" in found else prompts.flat(found.get("input"), "input")


def _anthropic(found: Fields) -> prompts.Flat:
    system = prompts.message("system", found.get("system"), "system")
    conversation = prompts.messages(found.get("messages"), "messages")
    return prompts.fields(found, ("tools",)) + system + conversation, None


def _tokenize(found: Fields) -> prompts.Flat:
    return _chat(found) if "messages" in found else _completion(found)


_GENERATE = ("token_ids", "input_ids", "prompt", "text", "text_input")  # vLLM's, SGLang's, Triton's


def _generate(found: Fields) -> prompts.Flat:
    for name in _GENERATE:
        if name in found and bytes(found[name]) != b"null":
            return prompts.flat(found[name], name)
    return b"", None


_CHAT_FIELDS = ("messages", *_BESIDE_MESSAGES)
_DIALECTS = {
    Kind.COMPLETION: _Dialect(_completion, ("prompt",), ("max_tokens",)),
    Kind.CHAT: _Dialect(_chat, _CHAT_FIELDS, ("max_completion_tokens", "max_tokens")),
    Kind.RESPONSES: _Dialect(
        _responses,
        (*_BESIDE_INPUT, "instructions", "input"),
        ("max_output_tokens",),
    ),
    Kind.EMBEDDING: _Dialect(_embedding, ("input", *_CHAT_FIELDS)),
    Kind.MESSAGES: _Dialect(_anthropic, ("tools", "system", "messages"), ("max_tokens",)),
    Kind.TOKENIZE: _Dialect(_tokenize, ("prompt", *_CHAT_FIELDS)),
    Kind.GENERATE: _Dialect(_generate, _GENERATE, ("max_tokens",), sampling_params=True),
}
_ACTED_ON = {kind: dialect.acted_on() for kind, dialect in _DIALECTS.items()}

_V1 = {
    "completions": Kind.COMPLETION,
    "chat/completions": Kind.CHAT,
    "responses": Kind.RESPONSES,
    "embeddings": Kind.EMBEDDING,
    "messages": Kind.MESSAGES,
    "messages/count_tokens": Kind.MESSAGES,
    "generate": Kind.GENERATE,
}
_UNVERSIONED = {"tokenize": Kind.TOKENIZE, "generate": Kind.GENERATE}


def _kind(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Kind:
    if method != "POST":
        return Kind.OTHER
    kind = _kind_of_path(path)
    return kind if kind is not Kind.OTHER and _is_json(headers, body) else Kind.OTHER


@lru_cache(maxsize=256)
def _kind_of_path(path: str) -> Kind:
    """By the API's name; a prefix before it, a query and a `/render` behind it do not matter."""
    path = path.partition("?")[0].removesuffix("/").removesuffix("/render")
    _, version, name = path.rpartition("/v1/")
    if version:
        return _V1.get(name, Kind.OTHER)
    return _UNVERSIONED.get(path.rpartition("/")[2], Kind.OTHER)


def _is_json(headers: Mapping[str, str], body: bytes) -> bool:
    """Whether a body says that it is JSON. One of no type is taken for it, unless it is empty."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        return False
    content_type = headers.get("content-type")
    if content_type is None:
        return bool(body)
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def _id(headers: Mapping[str, str]) -> str:
    """The client's id where it can go into headers and logs."""
    told = headers.get("x-request-id", "")
    if 0 < len(told) <= MAX_ID and told.isascii() and told.isprintable():
        return told
    return uuid.uuid4().hex
