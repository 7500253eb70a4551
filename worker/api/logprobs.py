"""Log-probabilities in the shapes of the OpenAI API and of vLLM."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from worker.api.prompts import Tokenizer
from worker.sequence import TokenLogprobs

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot write

PromptLogprobs = Sequence[TokenLogprobs | None]


class LogprobsWriter:
    """Writes log-probabilities with tokens as text; one for each choice, since it counts offsets.

    `top` alternatives are written for each token. `hidden` tokens add nothing to the text.
    `as_ids` writes tokens as `token_id:ID` (vLLM's `return_tokens_as_token_ids`).
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int, hidden: frozenset[int], as_ids: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._hidden = hidden
        self._as_ids = as_ids
        self._offset = 0  # characters of text before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, entries: PromptLogprobs, token_ids: Sequence[int]) -> dict[str, Any]:
        """For /v1/completions; `entries` are of `token_ids`, None where none can be known."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [_logprob(entry) for entry in entries],
            "tokens": [self._text(token_id) for token_id in token_ids],
            "top_logprobs": [entry and self._by_text(entry) for entry in entries],
        }

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """For /v1/chat/completions."""
        return {
            "content": [
                self._described(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._described(*top) for top in entry.top[: self._top]]}
                for entry in entries
            ]
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """Most likely first; where two tokens read the same, the likelier one counts."""
        by_text: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob)):
            by_text.setdefault(self._text(token_id), max(LOWEST, logprob))
        return by_text

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token_id),
            "logprob": max(LOWEST, logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def prompt_logprobs(
    entries: PromptLogprobs | None, top: int | None, tokenizer: Tokenizer
) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: for each prompt token, what was likely there, by token id."""
    if entries is None or top is None:
        return None
    return [entry and _by_id(entry, top, tokenizer) for entry in entries]


def _by_id(entry: TokenLogprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    for rank, (token_id, logprob) in enumerate(entry.top[:top], 1):
        if token_id != entry.token_id:
            ranked.append((token_id, logprob, rank))
    return {
        str(token_id): {
            "logprob": max(LOWEST, logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob, rank in ranked
    }


def _logprob(entry: TokenLogprobs | None) -> float | None:
    return None if entry is None else max(LOWEST, entry.logprob)
