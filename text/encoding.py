"""Texts to token ids as arrays, remembering the pieces of earlier texts.

A chat is cut before each special token. What a tokenizer makes of a text between two of them does
not depend on what stands around, so the next turn of a conversation needs only its new pieces to
be encoded. Each piece begins with its special token, and is encoded together with it: a tokenizer
that treats a text's very beginning differently sees the same surroundings as in the whole.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from itertools import pairwise
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from text.asked import Renderer
from text.byte_tokenizer import ByteTokenizer
from text.chat_messages import ChatTemplateError
from text.load import load_tokenizer
from text.tokenizer import Tokenizer

Ids = NDArray[np.uint32]

MAX_PIECES = 8192  # of one text; a text of more is encoded whole
_TRIED = 64  # special tokens; some vocabularies have a thousand alike
_STEP = 1 << 14  # ids converted at a time, so that other threads get their turn
_ENTRY_BYTES = 200  # of a dictionary's entry, an array's head and the like, about
_GREETING = [{"role": "user", "content": "Hi"}]
_NONE: Ids = np.empty(0, np.uint32)


class Encoder(Protocol):
    """Makes the token ids of texts and chats; usable from several threads."""

    @property
    def renderer(self) -> Renderer: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool) -> Ids: ...


def open_encoder(name: str, max_bytes: int) -> Encoder:
    """The encoder of a model by its name, remembering so much; raises as `load_tokenizer`."""
    tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, ByteTokenizer):
        return ByteEncoder()
    if tokenizer.has_chat_template:
        with suppress(ChatTemplateError):  # this one chat may not be to its liking
            tokenizer.render_chat(_GREETING)  # the first takes long: templates are compiled
    return CachedEncoder(tokenizer, max_bytes)


class ByteEncoder:
    """That of the byte tokenizer."""

    def __init__(self) -> None:
        self.renderer = ByteTokenizer()

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        parts = [
            np.array([token], np.uint32)
            if isinstance(token, int)
            else np.frombuffer(token, np.uint8).astype(np.uint32)
            for token in self.renderer.split(text)
        ]
        return np.concatenate(parts) if parts else _NONE


class CachedEncoder:
    """That of a tokenizer, with a memory of `max_bytes`."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self.renderer = tokenizer
        self.has_chat_template = tokenizer.has_chat_template
        self._tokenizer = tokenizer
        self._pieces = Remembered(max_bytes)
        self._cut = cut_before(tokenizer)
        self._around = _added_around(tokenizer) if self._cut else None

    @property
    def cuts(self) -> bool:
        """Whether texts are cut; if not, only whole texts are remembered."""
        return self._cut is not None

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """The ids of a text: the same as those of encoding it as a whole.

        Raises:
            ModelError: the tokenizer failed.
        """
        if self._cut is None or (add_special_tokens and self._around is None):
            return self._piece(text, add_special_tokens)
        pieces = _pieces(self._cut, text)
        if len(pieces) > MAX_PIECES:
            return self._encoded(text, add_special_tokens)
        parts = [self._piece(piece, False) for piece in pieces]
        if add_special_tokens and self._around is not None:
            before, after = self._around
            parts = [before, *parts, after]
        return np.concatenate(parts) if parts else _NONE

    def _piece(self, text: str, add_special_tokens: bool) -> Ids:
        key = f"{add_special_tokens:d}{text}"
        known = self._pieces.get(key)
        if known is None:
            known = self._encoded(text, add_special_tokens)
            self._pieces.keep(key, known)
        return known

    def _encoded(self, text: str, add_special_tokens: bool) -> Ids:
        ids = self._tokenizer.encode(text, add_special_tokens)
        array = np.empty(len(ids), np.uint32)
        for start in range(0, len(ids), _STEP):
            array[start : start + _STEP] = ids[start : start + _STEP]
        return array


class Remembered:
    """Token ids by name, the least recently used forgotten first. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: dict[str | bytes, Ids] = {}
        self._lock = Lock()
        self.num_bytes = 0

    def get(self, key: str | bytes) -> Ids | None:
        with self._lock:
            ids = self._found.pop(key, None)
            if ids is not None:
                self._found[key] = ids  # the most recent again
            return ids

    def keep(self, key: str | bytes, ids: Ids) -> None:
        size = _size(key, ids)
        if size > self._max_bytes:
            return
        with self._lock:
            if key in self._found:  # two threads met the same text
                return
            self._found[key] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                oldest = next(iter(self._found))
                self.num_bytes -= _size(oldest, self._found.pop(oldest))


def _size(key: str | bytes, ids: Ids) -> int:
    return sys.getsizeof(key) + ids.nbytes + _ENTRY_BYTES


def cut_before(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """What texts can be cut before without a change of their ids; None: nothing is sure.

    The tokenizers library takes added tokens out of a text first, the leftmost and of those the
    longest, and then handles what is between them piece by piece. So a special token divides a text
    wherever it stands, provided that it is found in the text as it is (not normalised, without its
    surroundings), and that no other added token can hide it. Tried out besides.
    """
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder().values()
    raw = [token for token in added if not token.normalized]
    marks = sorted({token.content for token in raw if token.special}, key=len, reverse=True)
    if not marks or backend.encode_special_tokens:
        return None
    if any(token.lstrip or token.rstrip or token.single_word for token in raw):
        return None
    others = [token.content for token in raw if not token.special]
    if any(_can_hide(other, mark) for other in others for mark in marks):
        return None
    pattern = re.compile("|".join(map(re.escape, marks)))
    return pattern if _cuts_well(tokenizer, pattern, marks) else None


def _can_hide(other: str, mark: str) -> bool:
    """Whether a match of `other` can cover the beginning of `mark`."""
    if mark in other:
        return True
    return any(other.endswith(mark[:length]) for length in range(1, min(len(other), len(mark))))


def _cuts_well(tokenizer: Tokenizer, cut: re.Pattern[str], marks: list[str]) -> bool:
    for mark in marks[:_TRIED]:
        text = f"Hi, {mark} there{mark}{mark}\n 1{mark}\u0301e  {mark}the{mark} "
        cut_up = [token for piece in _pieces(cut, text) for token in tokenizer.encode(piece, False)]
        if cut_up != tokenizer.encode(text, False):
            return False
    return True


def _pieces(cut: re.Pattern[str], text: str) -> list[str]:
    """A text, cut before each special token; none is empty."""
    bounds = [0, *(match.start() for match in cut.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds) if start < end]


def _added_around(tokenizer: Tokenizer) -> tuple[Ids, Ids] | None:
    """The special tokens that a text is given, before and after it; None: that is not all."""
    around = set()
    for text in ("a", "Hi there"):
        bare, full = tokenizer.encode(text, False), tokenizer.encode(text, True)
        spare = len(full) - len(bare)
        places = [at for at in range(spare + 1) if full[at : at + len(bare)] == bare]
        if len(places) != 1:
            return None
        (at,) = places
        around.add((tuple(full[:at]), tuple(full[at + len(bare) :])))
    if len(around) != 1:
        return None
    before, after = around.pop()
    if tokenizer.encode("", True) != [*before, *after]:
        return None
    return np.array(before, np.uint32), np.array(after, np.uint32)
