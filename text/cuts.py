"""Where texts can be cut so that their pieces have the token ids of the whole.

Of a text that has grown, only the new pieces need to be encoded then. A place is one to cut at only
where the tokenizer's own description says so; whoever cannot be understood is not cut.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

from text.gguf_tokenizer import LLAMA3_WORDS, QWEN2_WORDS
from text.tokenizer import Tokenizer

PIECE = 2048  # characters after which a long text is cut at the next word
_LONG = "It's 12 o'clock, the CAFE is\nclosed  now " * (PIECE // 16)
_TRIED = 64  # special tokens; some vocabularies have a thousand alike

# Where a word follows another. Each known way of splitting words ends one there, since nothing but
# letters goes on with letters, and begins another with the space, whatever comes before. No
# normaliser joins a letter with a space.
_NEXT_WORD = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
_KNOWN_WORDS = frozenset((LLAMA3_WORDS, QWEN2_WORDS))
_KNOWN_NORMALIZERS = frozenset(("none", "NFC"))


class Cuts(NamedTuple):
    """How to cut the texts of one tokenizer."""

    marks: re.Pattern[str]  # special tokens: a piece begins with each
    words: bool  # whether long pieces are cut between words too

    def pieces(self, text: str) -> list[str]:
        """A text in pieces, none of them empty. Texts with equal beginnings have equal pieces."""
        bounds = [0, *(match.start() for match in self.marks.finditer(text)), len(text)]
        if self.words:
            for start, end in list(pairwise(bounds)):
                while end - start > 2 * PIECE:
                    match = _NEXT_WORD.search(text, start + PIECE, end)
                    if match is None:
                        break
                    start = match.start()
                    bounds.append(start)
            bounds.sort()
        return [text[start:end] for start, end in pairwise(bounds) if start < end]


def cuts_of(tokenizer: Tokenizer) -> Cuts | None:
    """How texts can be cut; None: not at all.

    The tokenizers library takes added tokens out of a text first, the leftmost and of those the
    longest, and then handles what is between them piece by piece. So a special token divides a text
    wherever it stands, provided that it is found in the text as it is (not normalised, without its
    surroundings), and that no other added token can hide it.

    Each piece begins with its special token and is encoded together with it, since some tokenizers
    treat the very beginning of a text differently. Tried out besides.
    """
    backend = tokenizer.backend
    added = list(backend.get_added_tokens_decoder().values())
    raw = [token for token in added if not token.normalized]
    marks = sorted({token.content for token in raw if token.special}, key=len, reverse=True)
    if not marks or backend.encode_special_tokens:
        return None
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    others = [token.content for token in raw if not token.special]
    if any(_can_hide(other, mark) for other in others for mark in marks):
        return None
    words = _splits_words(backend.pre_tokenizer, backend.normalizer) and not any(
        re.search("[A-Za-z] ", token.content) for token in added
    )
    cuts = Cuts(re.compile("|".join(map(re.escape, marks))), words)
    return cuts if all(_hold(cuts, tokenizer, mark) for mark in marks[:_TRIED]) else None


def _can_hide(other: str, mark: str) -> bool:
    """Whether a match of `other` can cover the beginning of `mark`."""
    if mark in other:
        return True
    return any(other.endswith(mark[:length]) for length in range(1, min(len(other), len(mark))))


def _splits_words(splitter: object, normalizer: object) -> bool:
    """Whether `_NEXT_WORD` is where words are divided."""
    if _state(normalizer)["type"] not in _KNOWN_NORMALIZERS:
        return False
    state = _state(splitter)
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return any(map(_divides, steps)) and all(_divides(step) or _is_harmless(step) for step in steps)


def _divides(step: dict[str, Any]) -> bool:
    """Whether a step divides letters from a space that follows them, and not that from letters."""
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex", True)) and not step["add_prefix_space"]
    return (
        step["type"] == "Split"
        and step["behavior"] == "Isolated"
        and not step["invert"]
        and step["pattern"].get("Regex") in _KNOWN_WORDS
    )


def _is_harmless(step: dict[str, Any]) -> bool:
    """Whether a step only rewrites bytes, or divides digits from all else."""
    return step["type"] == "Digits" or (
        step["type"] == "ByteLevel" and not step["add_prefix_space"]
    )


def _state(part: Any) -> dict[str, Any]:
    state = {"type": "none"} if part is None else json.loads(part.__getstate__())
    assert isinstance(state, dict)
    return state


def _hold(cuts: Cuts, tokenizer: Tokenizer, mark: str) -> bool:
    """Whether all is as expected in one text."""
    text = f"Hi, {mark} there{mark}{mark}\n 1{mark}\u0301e  {mark}the{mark} {_LONG}"
    cut_up = tokenizer.encode_all(cuts.pieces(text), False)
    return [token for ids in cut_up for token in ids] == tokenizer.encode(text, False)
