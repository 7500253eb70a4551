"""Texts to token ids as arrays, remembering the pieces of earlier texts.

So the next turn of a conversation needs only its new pieces to be encoded: see text.cuts.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from text.asked import Renderer
from text.byte_tokenizer import ByteTokenizer
from text.chat_messages import ChatTemplateError
from text.cuts import cuts_of
from text.load import load_tokenizer
from text.tokenizer import Tokenizer

Ids = NDArray[np.uint32]

MAX_PIECES = 8192  # of one text; a text of more is encoded whole
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
        self.cuts = cuts_of(tokenizer)  # None: only whole texts are remembered
        self._tokenizer = tokenizer
        self._known = Remembered(max_bytes)
        self._around = _added_around(tokenizer)

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """The ids of a text: the same as those of encoding it as a whole.

        Raises:
            ModelError: the tokenizer failed.
        """
        around = self._around if add_special_tokens else (_NONE, _NONE)
        if self.cuts is None or around is None:
            return self._whole(text, add_special_tokens)
        pieces = self.cuts.pieces(text)
        if len(pieces) > MAX_PIECES:
            return self._whole(text, add_special_tokens)
        found = [self._known.get(piece) for piece in pieces]
        missing = {piece for piece, ids in zip(pieces, found, strict=True) if ids is None}
        new = dict(zip(missing, self._encoded(list(missing), False), strict=True))
        for piece, ids in new.items():
            self._known.keep(piece, ids)
        parts = [
            new[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True)
        ]
        return np.concatenate([around[0], *parts, around[1]])

    def _whole(self, text: str, add_special_tokens: bool) -> Ids:
        key = f"{add_special_tokens:d}{text}".encode("utf-8", "surrogatepass")  # no piece's name
        known = self._known.get(key)
        if known is None:
            (known,) = self._encoded([text], add_special_tokens)
            self._known.keep(key, known)
        return known

    def _encoded(self, texts: list[str], add_special_tokens: bool) -> list[Ids]:
        return [_packed(ids) for ids in self._tokenizer.encode_all(texts, add_special_tokens)]


def _packed(ids: list[int]) -> Ids:
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
