"""LLMRequest: what was asked, parsed once from the original bytes.

Only what the picker acts on is checked. All else is the engine's to judge, and passes.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from posixpath import normpath
from urllib.parse import unquote

import msgspec
import numpy as np
from numpy.typing import NDArray

from picker.json_body import Fields, fields, num_names, string
from picker.prompt import BYTES_PER_TOKEN, Conversation, Flat, flat
from picker.refusal import Refusal
from picker.splice import flag

MAX_MODEL = 256  # characters
MAX_CACHE_SALT = 1024  # characters; vLLM takes as many
MAX_DIGITS = 9  # of a number of tokens
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
    model: str | None = None  # that the pod shall answer with
    asked_model: str | None = None  # by the client, where that was another
    model_value: msgspec.Raw | None = field(default=None, compare=False)  # a piece of its body
    prompt: bytes = b""  # what the model will see, in its order; see picker.prompt
    unread: int = 0  # bytes that the prompt has after those, about
    prompt_tokens: int = 0  # of it all: counted for token ids, else a quarter of its bytes
    salt: bytes = b""  # what parts caches without being prompt: model (or adapter), cache salt
    cache_salt: str | None = None  # that of the body, which keeps its blocks to itself
    subset: tuple[str, ...] | None = None  # endpoints that the gateway allows; None: all
    stream: bool = False  # a completion or chat that is answered event by event
    stream_options: msgspec.Raw | None = field(default=None, compare=False)  # a piece of its body
    most_output: int | None = None  # tokens that its answers may have together; None: not said
    claim: str | None = None  # of a token that the gateway has verified: who asks
    # The prompt's tokens, of several prompts the first one's: where picker.prefix.tokens made them.
    token_ids: NDArray[np.uint32] | None = field(default=None, compare=False)

    def send_as(self, model: str) -> None:
        """Ask for another model than the client did."""
        self.asked_model, self.model = self.model, model
        self.salt = _salt(model, self.cache_salt)


def parse(
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    subset: tuple[str, ...] | None = None,
    claim: str | None = None,
) -> LLMRequest:
    """A request from its parts; `headers` have lower-case names.

    A body of None was not shown to us, or not all of it: such a request is routed by load alone.

    Raises:
        Refusal: 400: a JSON request of a known API whose body is no JSON object, repeats a field
            that is acted on, or holds a wrong value in one.
    """
    kind, answers = _api(path) if method == "POST" else (Kind.OTHER, False)
    if body is None or not (kind is Kind.OTHER or _is_json(headers, body)):
        kind = Kind.OTHER
    request = LLMRequest(_id(headers), method, path, headers, body or b"", kind, subset=subset)
    request.claim = claim
    dialect = _DIALECTS.get(kind)
    if dialect is not None:
        try:
            _read(request, dialect)
        except RecursionError:
            raise Refusal(400, "invalid_json", "the request body is nested too deeply") from None
    if not answers:
        request.most_output = 0
    return request


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Where an API puts what the picker acts on."""

    prompt: Callable[[Fields, int], Flat]  # with the number of names in the body
    prompt_fields: tuple[str, ...]
    streams: bool = False  # with usage only where `stream_options` ask for it


def _read(request: LLMRequest, dialect: _Dialect) -> None:
    names = num_names(request.body)
    found = fields(request.body, _ACTED_ON[request.kind], names)
    request.model = string(found, "model", MAX_MODEL)
    request.model_value = found.get("model")
    request.cache_salt = string(found, "cache_salt", MAX_CACHE_SALT)
    request.salt = _salt(request.model, request.cache_salt)
    if dialect.streams:
        request.stream = flag(found, "stream") is True
        request.stream_options = found.get("stream_options")
    request.prompt, request.unread, tokens, prompts = dialect.prompt(found, names)
    request.most_output = _most_output(found, prompts)
    if tokens is not None:
        request.prompt_tokens = tokens
    elif num_bytes := len(request.prompt) + request.unread:
        request.prompt_tokens = max(1, num_bytes // BYTES_PER_TOKEN)


_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ANSWERS = ("n", "best_of")


def _most_output(found: Fields, prompts: int) -> int | None:
    """The greatest limit that an engine may obey, for each answer to each prompt.

    Wrong values are not ours to refuse.
    """
    limits = [count for name in _LIMITS if (count := _count(found, name)) is not None]
    if not limits:
        return None
    answers = [count for name in _ANSWERS if (count := _count(found, name)) is not None]
    return max(limits) * max(answers, default=1) * prompts


def _count(found: Fields, name: str) -> int | None:
    raw = found.get(name)
    written = b"" if raw is None or len(raw) > MAX_DIGITS else bytes(raw)
    return int(written) if written.isdigit() else None


@lru_cache(maxsize=256)
def _salt(model: str | None, cache_salt: str | None) -> bytes:
    """Each part with its letter and its length, so that no name can pass for a salt."""
    salt = b""
    for tag, text in ((b"m", model), (b"c", cache_salt)):
        if text is not None:
            value = text.encode()
            salt += tag + struct.pack("<I", len(value)) + value
    return salt


def _completion(found: Fields, names: int) -> Flat:
    return flat(found.get("prompt"), names)


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


def _chat(found: Fields, names: int) -> Flat:
    read = Conversation(names)
    beside = read.fields(found, _BESIDE_MESSAGES)
    return Flat(beside + read.messages(found.get("messages"), "messages"), read.unread)


def _responses(found: Fields, names: int) -> Flat:
    read = Conversation(names)
    before = read.fields(found, _BESIDE_INPUT)
    before += read.message("system", found.get("instructions"))
    given = found.get("input")
    if given is not None and bytes(given).startswith(b"["):
        conversation = read.messages(given, "input")
    else:
        conversation = read.message("user", given)
    return Flat(before + conversation, read.unread)


def _embedding(found: Fields, names: int) -> Flat:
    return _chat(found, names) if "messages" in found else flat(found.get("input"), names)


def _anthropic(found: Fields, names: int) -> Flat:
    read = Conversation(names)
    before = read.fields(found, ("tools",)) + read.message("system", found.get("system"))
    return Flat(before + read.messages(found.get("messages"), "messages"), read.unread)


def _tokenize(found: Fields, names: int) -> Flat:
    return _chat(found, names) if "messages" in found else _completion(found, names)


_GENERATE = ("token_ids", "input_ids", "prompt", "text", "text_input")  # vLLM's, SGLang's, Triton's


def _generate(found: Fields, names: int) -> Flat:
    for name in _GENERATE:
        if name in found and bytes(found[name]) != b"null":
            return flat(found[name], names)
    return Flat(b"")


_CHAT_FIELDS = ("messages", *_BESIDE_MESSAGES)
_DIALECTS = {
    Kind.COMPLETION: _Dialect(_completion, ("prompt",), streams=True),
    Kind.CHAT: _Dialect(_chat, _CHAT_FIELDS, streams=True),
    Kind.RESPONSES: _Dialect(_responses, (*_BESIDE_INPUT, "instructions", "input")),
    Kind.EMBEDDING: _Dialect(_embedding, ("input", *_CHAT_FIELDS)),
    Kind.MESSAGES: _Dialect(_anthropic, ("tools", "system", "messages")),
    Kind.TOKENIZE: _Dialect(_tokenize, ("prompt", *_CHAT_FIELDS)),
    Kind.GENERATE: _Dialect(_generate, _GENERATE),
}
_STREAM_FIELDS = ("stream", "stream_options")
_ACTED_ON = {
    kind: frozenset(
        (
            "model",
            "cache_salt",
            *_LIMITS,
            *_ANSWERS,
            *dialect.prompt_fields,
            *_STREAM_FIELDS * dialect.streams,
        )
    )
    for kind, dialect in _DIALECTS.items()
}

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
_WITHOUT_ANSWER = (Kind.EMBEDDING, Kind.TOKENIZE)


@lru_cache(maxsize=256)
def _api(path: str) -> tuple[Kind, bool]:
    """Which API a path is of, and whether that answers with tokens that it makes.

    It is read as pods read it, with escapes decoded, so that no spelling goes around a limit. A
    prefix before the API's name, a query and a `/render` behind it do not matter.
    """
    path = normpath(unquote(path.partition("?")[0]))
    name = path.removesuffix("/render")
    _, version, versioned = name.rpartition("/v1/")
    if version:
        kind = _V1.get(versioned, Kind.OTHER)
    else:
        kind = _UNVERSIONED.get(name.rpartition("/")[2], Kind.OTHER)
    answers = kind not in _WITHOUT_ANSWER and path == name and not path.endswith("/count_tokens")
    return kind, answers


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
