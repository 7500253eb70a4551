"""The answers of both APIs, whole and as chunks of a stream, in vLLM's shape.

One `Answer` belongs to one request. Its head (id, model and so on) is encoded once, since a
stream repeats it with every token.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from worker.api.generation import Choice, Delta, Generation, Usage
from worker.api.logprobs import LogprobsWriter, prompt_logprobs
from worker.api.prompts import Tokenizer
from worker.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from worker.sequence import TokenLogprobs

VERSION = version("warmpath")
FINGERPRINT = f"warmpath-{VERSION}"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class Answer(ABC):
    """What answers to completions and to chats have in common."""

    whole_kind: str
    chunk_kind: str
    id_prefix: str
    ask: GenerationRequest

    def __init__(
        self, ask: GenerationRequest, request_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        self.id = self.id_prefix + request_id
        self.created = int(time.time())
        self.model = model
        self._tokenizer = tokenizer
        self._logprobs: dict[int, LogprobsWriter] = {}
        self._begun: set[int] = set()  # choices that have had their first chunk
        self._head = b"data: " + _encode(self._envelope(self.chunk_kind))[:-1] + b',"choices":['

    @abstractmethod
    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A whole answer's entry in `choices`."""

    @abstractmethod
    def _first_chunk(self, choice: Choice) -> bytes:
        """What precedes a choice's text in a stream; may be empty."""

    @abstractmethod
    def _chunk_choice(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        """A chunk's entry in `choices`."""

    @abstractmethod
    def _trailer(self, generation: Generation) -> dict[str, Any]:
        """What a whole answer has after its usage."""

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        """The JSON answer of a request that does not stream."""
        pairs = zip(generation.choices, deltas, strict=True)
        return _encode(
            {
                **self._envelope(self.whole_kind),
                "choices": [self._choice(choice, delta) for choice, delta in pairs],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": _whole_usage(generation.usage(self.ask.num_choices)),
                **self._trailer(generation),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def chunks(self, choice: Choice, delta: Delta) -> bytes:
        """The events that tell what a choice gained; none if that cannot be seen."""
        first = choice.index not in self._begun
        events = b""
        if first:
            self._begun.add(choice.index)
            events = self._first_chunk(choice)
        if not (delta.text or delta.finish_reason or self.shows_tokens or first):
            return events
        tail = b"]"
        if self.ask.includes_continuous_usage:
            prompt, completion = len(choice.prompt.token_ids), choice.num_tokens
            tail += b',"usage":' + _encode(_token_counts(prompt, completion))
        if delta.finish_reason and not self.ask.includes_usage:
            tail += b',"system_fingerprint":' + _encode(FINGERPRINT)
        data = _encode(self._chunk_choice(choice, delta, first))
        return events + self._head + data + tail + b"}\n\n"

    def usage_chunk(self, generation: Generation) -> bytes:
        """The extra event that ends a stream with `include_usage`."""
        usage = generation.usage(self.ask.num_choices)
        counts = _token_counts(usage.prompt, usage.completion)
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached}
        fingerprint = _encode(FINGERPRINT)
        tail = b'],"usage":' + _encode(counts) + b',"system_fingerprint":' + fingerprint
        return self._head + tail + b"}\n\n"

    @property
    def shows_tokens(self) -> bool:
        """Whether each token is told of, and not only the text."""
        ask = self.ask
        per_token = ask.return_token_ids or ask.prompt_logprobs is not None
        return bool(per_token) or ask.includes_continuous_usage

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _ids(self, token_ids: list[int]) -> list[int] | None:
        return token_ids if self.ask.return_token_ids else None

    def _prompt_logprobs(self, choice: Choice) -> list[Any] | None:
        wanted = self.ask.prompt_logprobs
        return prompt_logprobs(choice.prompt_logprobs, wanted, self._tokenizer)

    def _writer(self, choice: Choice, top: int) -> LogprobsWriter:
        writer = self._logprobs.get(choice.index)
        if writer is None:
            writer = self._logprobs[choice.index] = LogprobsWriter(
                self._tokenizer,
                top,
                hidden=self._tokenizer.special_ids if self.ask.hides_specials else frozenset(),
                as_ids=bool(self.ask.return_tokens_as_token_ids),
            )
        return writer


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    whole_kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self, ask: CompletionRequest, request_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        self.ask: CompletionRequest = ask
        super().__init__(ask, request_id, model, tokenizer)

    @property
    def shows_tokens(self) -> bool:
        return super().shows_tokens or self.ask.logprobs is not None

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": (choice.prompt.echo or "") + delta.text,
            "logprobs": self._token_logprobs(choice, delta, first=True),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": self._ids(delta.token_ids),
            "prompt_logprobs": self._prompt_logprobs(choice),
            "prompt_token_ids": self._ids(choice.prompt.token_ids),
            "routed_experts": None,
        }

    def _trailer(self, generation: Generation) -> dict[str, Any]:
        return {}

    def _first_chunk(self, choice: Choice) -> bytes:
        return b""

    def _chunk_choice(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": (choice.prompt.echo or "") + delta.text if first else delta.text,
            "logprobs": self._token_logprobs(choice, delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": self._ids(choice.prompt.token_ids) if first else None,
            "token_ids": self._ids(delta.token_ids),
        }

    def _token_logprobs(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any] | None:
        top = self.ask.logprobs
        if top is None:
            return None
        entries: Sequence[TokenLogprobs | None] = delta.logprobs
        token_ids = delta.token_ids
        if first and self.ask.echo:
            entries = [*(choice.prompt_logprobs or ()), *entries]
            token_ids = choice.prompt.token_ids + token_ids
        return self._writer(choice, top).completion(entries, token_ids)


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, ask: ChatRequest, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self.ask: ChatRequest = ask
        super().__init__(ask, request_id, model, tokenizer)

    @property
    def shows_tokens(self) -> bool:
        return super().shows_tokens or bool(self.ask.logprobs)

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {
                "role": self.ask.response_role,
                "content": (choice.prompt.echo or "") + delta.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": self._content_logprobs(choice, delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": self._ids(delta.token_ids),
            "routed_experts": None,
        }

    def _trailer(self, generation: Generation) -> dict[str, Any]:
        choice = generation.choices[0]
        return {
            "prompt_logprobs": self._prompt_logprobs(choice),
            "prompt_token_ids": self._ids(choice.prompt.token_ids),
            "prompt_text": None,
        }

    def _first_chunk(self, choice: Choice) -> bytes:
        opening = {
            "index": choice.index,
            "delta": {"role": self.ask.response_role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        ids = _encode(self._ids(choice.prompt.token_ids))
        tail = b'],"prompt_token_ids":' + ids + b',"prompt_text":null}\n\n'
        return self._head + _encode(opening) + tail

    def _chunk_choice(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        text = (choice.prompt.echo or "") + delta.text if first else delta.text
        entry = {
            "index": choice.index,
            "delta": {"content": text},
            "logprobs": self._content_logprobs(choice, delta),
            "finish_reason": delta.finish_reason,
            "token_ids": self._ids(delta.token_ids),
        }
        if delta.finish_reason:
            entry["stop_reason"] = delta.stop_reason
        return entry

    def _content_logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        if not self.ask.logprobs:
            return None
        return self._writer(choice, self.ask.top_logprobs or 0).chat(delta.logprobs)


def _token_counts(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _whole_usage(usage: Usage) -> dict[str, Any]:
    return _token_counts(usage.prompt, usage.completion) | {
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }
