"""Tokens to text, one at a time, stopping at the first stop string.

Text is sent as soon as nothing can take it back: whole characters, and no more held back than
could still turn out to be a stop string.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]
    strips_first_space: bool  # as SentencePiece's do: it is written into a text's first token

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """The text of one sequence. `push` each token, then `finish` unless a stop string matched.

    The pieces together are the text that follows the prompt, up to the stop string, or with it
    if `include_stop`. The first `min_tokens` tokens are sent as they are and never match.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None  # the stop string that matched
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop) if any(stop) else None
        self._include_stop = include_stop
        self._free_tokens = min_tokens if self._matcher else 0
        context = self._last_bytes(prompt_ids)
        self._decoder.decode(context)  # leaves only half a character, if the prompt ends in one
        self._drop_space = tokenizer.strips_first_space and not context

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now safe to send."""
        text = self._text(token_id)
        if self._matcher is None:
            return text
        if self._free_tokens > 0:
            self._free_tokens -= 1
            return text
        return self._until_stop(text)

    def finish(self) -> str:
        """What was held back, once the sequence ended. Half a character becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        if self._matcher is None:
            return text
        return self._until_stop(text) + (self._matcher.release() if self.stopped is None else "")

    def _text(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._token_bytes(token_id))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def _until_stop(self, text: str) -> str:
        if self.stopped is not None or self._matcher is None:
            return ""
        safe, self.stopped = self._matcher.feed(text)
        return safe + self.stopped if self.stopped and self._include_stop else safe

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The prompt's last few bytes: as many as a character can have."""
        last = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                last = self._token_bytes(token_id) + last
                if len(last) >= _LONGEST_CHARACTER:
                    break
        return last


class _State(NamedTuple):
    """A place in the automaton: some text was read that begins a stop string."""

    depth: int  # the length of that text
    next: dict[str, int]
    match: str | None  # the longest stop string that ends here


class StopMatcher:
    """Finds the stop string that is complete first, in text that comes in pieces.

    An Aho-Corasick automaton (Communications of the ACM 18(6), 1975): its depth is the length of
    the longest end of the text so far that begins a stop string, which is what to hold back.
    If two stop strings end at the same place, the longer one is found.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._states, self._fail = _automaton(tuple(word for word in stop if word))
        self._at = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that cannot be part of a stop string, and the stop string if one is complete.

        After a match, what follows the stop string is dropped.
        """
        text_so_far = self._held + text
        states, fail, at = self._states, self._fail, self._at
        for index, character in enumerate(text, len(self._held) + 1):
            while at and character not in states[at].next:
                at = fail[at]
            at = states[at].next.get(character, 0)
            match = states[at].match
            if match is not None:
                return text_so_far[: index - len(match)], match
        self._at = at
        cut = len(text_so_far) - states[at].depth
        self._held = text_so_far[cut:]
        return text_so_far[:cut], None

    def release(self) -> str:
        """What is held back, when no more text will come."""
        held, self._held, self._at = self._held, "", 0
        return held


@lru_cache(maxsize=64)  # every choice of a request asks with the same words
def _automaton(words: tuple[str, ...]) -> tuple[list[_State], list[int]]:
    """The states, root first, and for each the one to fall back to."""
    states = [_State(0, {}, None)]
    for word in words:
        at = 0
        for character in word:
            at = states[at].next.setdefault(character, len(states))
            if at == len(states):
                states.append(_State(0, {}, None))
        states[at] = states[at]._replace(match=word)
    fail = [0] * len(states)
    queue = deque([0])
    while queue:
        parent = queue.popleft()
        for character, child in states[parent].next.items():
            back = fail[parent]
            while back and character not in states[back].next:
                back = fail[back]
            fail[child] = states[back].next.get(character, 0) if parent else 0
            match = states[child].match or states[fail[child]].match
            states[child] = states[child]._replace(depth=states[parent].depth + 1, match=match)
            queue.append(child)
    return states, fail
