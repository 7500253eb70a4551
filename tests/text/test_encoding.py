"""Texts to arrays of ids: the same as by encoding them whole, and only what is new is encoded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from tests.worker.tiny import tiny_tokenizer
from text.byte_tokenizer import ByteTokenizer
from text.cuts import PIECE, cuts_of
from text.encoding import ByteEncoder, CachedEncoder, Remembered
from text.gguf_tokenizer import LLAMA3_WORDS, QWEN2_WORDS
from text.load import load_tokenizer
from text.tokenizer import Tokenizer

MIB = 1 << 20


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = load_tokenizer("smollm2-135m")
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, eos_ids=frozenset(), bos_id=None, chat_template=None)


def words(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])


def as_it_is(backend: Backend) -> None:
    pass


def with_begin_and_end(backend: Backend) -> None:
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )


def as_llama_3(backend: Backend) -> None:
    backend.pre_tokenizer = words(LLAMA3_WORDS)


def as_qwen(backend: Backend) -> None:
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words(QWEN2_WORDS)


def as_smollm(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )


def with_an_ordinary_token(backend: Backend) -> None:
    backend.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("the fox")])


def with_prefix_space(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def that_marks_the_beginning(backend: Backend) -> None:
    backend.normalizer = normalizers.Prepend("_")


def with_a_space_at_the_very_beginning(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace("_", prepend_scheme="first"), pre_tokenizers.ByteLevel(False)]
    )


def that_strips_after_specials(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])


def with_a_token_over_a_special_one(backend: Backend) -> None:
    backend.add_tokens([AddedToken("<<|im", normalized=False)])


def with_a_token_around_a_special_one(backend: Backend) -> None:
    backend.add_tokens([AddedToken("a<|im_end|>", normalized=False)])


def with_specials_that_overlap(backend: Backend) -> None:
    backend.add_special_tokens(["|><", "<|im_end|>x", "xx"])


def of_lower_case(backend: Backend) -> None:
    backend.normalizer = normalizers.Lowercase()


# How much of a text is cut: at special tokens, and between words too.
KINDS: list[tuple[Callable[[Backend], None], bool, bool]] = [
    (as_it_is, True, True),
    (with_begin_and_end, True, True),
    (as_llama_3, True, True),
    (as_qwen, True, True),
    (as_smollm, True, True),
    (with_an_ordinary_token, True, False),
    (with_prefix_space, True, False),
    (that_marks_the_beginning, True, False),
    (with_a_space_at_the_very_beginning, True, False),
    (of_lower_case, True, False),
    (with_specials_that_overlap, True, True),
    (that_strips_after_specials, False, False),
    (with_a_token_over_a_special_one, False, False),
    (with_a_token_around_a_special_one, False, False),
]

FRAGMENTS = st.sampled_from(
    [
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|im", "<", "|>", "x", "a"),
        *(" ", "  ", "\n", "\n\n", "\t", "the", " the", "The fox", "'s", "'ll be", "12", "3456"),
        *("é", "e", "\u0301", "ß", "日本", "😀", ". ", "-", "_", "\u00a0", "\ud800"),
        " the dog and the other" * (PIECE // 20),
        "x" * PIECE,
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=24).map("".join)


@cache
def changed(change: Callable[[Backend], None]) -> Tokenizer:
    backend = tiny_tokenizer()
    change(backend)
    return wrapped(backend)


@pytest.mark.parametrize(
    ("change", "cuts", "at_words"), KINDS, ids=[kind[0].__name__ for kind in KINDS]
)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), add_special_tokens=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_ids_are_those_of_the_whole(change, cuts, at_words, texts, add_special_tokens):
    tokenizer = changed(change)
    encoder = CachedEncoder(tokenizer, MIB)
    assert (encoder.cuts is not None) == cuts
    assert encoder.cuts is None or encoder.cuts.words == at_words
    for text in texts:
        for _ in ("new", "known"):
            ids = encoder.encode(text, add_special_tokens)
            assert ids.dtype == np.uint32
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens)


def test_of_special_tokens_at_one_place_the_longest_counts():
    tokenizer = changed(with_specials_that_overlap)
    text = "<|im_end|>xx"  # <|im_end|>x and x, not <|im_end|> and xx
    assert CachedEncoder(tokenizer, MIB).encode(text, False).tolist() == tokenizer.encode(
        text, False
    )


@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_smollm2s_ids_are_those_of_the_whole(smollm2, texts):
    encoder = CachedEncoder(smollm2, MIB)
    assert encoder.cuts is not None
    assert encoder.cuts.words
    for text in texts:
        assert encoder.encode(text, False).tolist() == smollm2.encode(text, False)


class Counting(Tokenizer):
    """Knows how many characters it encoded."""

    num_characters = 0

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.num_characters += sum(map(len, texts))
        return super().encode_all(texts, add_special_tokens)


def counting() -> Counting:
    return Counting(tiny_tokenizer(), eos_ids=frozenset(), bos_id=None, chat_template=None)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_the_next_turn_of_a_chat_encodes_only_what_is_new():
    tokenizer = counting()
    encoder = CachedEncoder(tokenizer, MIB)
    chat = turn("system", "the fox " * 500) + turn("user", "the dog")
    before = encoder.encode(chat + "<|im_start|>assistant\n", False)
    tokenizer.num_characters = 0
    chat += turn("assistant", "and the other") + turn("user", "jumps")
    after = encoder.encode(chat + "<|im_start|>assistant\n", False)
    assert tokenizer.num_characters < 100
    assert after.tolist() == tokenizer.encode(chat + "<|im_start|>assistant\n", False)
    assert len(after) > len(before)


def test_a_long_text_that_has_grown_is_encoded_from_near_its_end():
    tokenizer = counting()
    encoder = CachedEncoder(tokenizer, MIB)
    text = " ".join(f"the fox number {number} jumps" for number in range(1000))
    encoder.encode(text, True)
    tokenizer.num_characters = 0
    grown = text + ", and the dog sleeps"
    assert encoder.encode(grown, True).tolist() == wrapped(tiny_tokenizer()).encode(grown)
    assert tokenizer.num_characters < 3 * PIECE < len(text) / 4


def test_texts_without_end_or_bounds_are_encoded_whole(monkeypatch):
    monkeypatch.setattr("text.encoding.MAX_PIECES", 3)
    tokenizer = wrapped(tiny_tokenizer())
    text = "<|im_end|>" * 10
    assert CachedEncoder(tokenizer, MIB).encode(text, False).tolist() == [2] * 10


def test_what_is_remembered_is_bounded_and_the_least_used_goes_first():
    known = Remembered(3000)
    ids = np.arange(100, dtype=np.uint32)
    for name in ("a", "b", "c"):
        known.keep(name, ids)
    assert known.get("a") is ids
    for number in range(100):
        known.keep(f"{number}", ids)
        assert known.get("a") is ids  # used all the time
        assert known.num_bytes <= 3000
    assert known.get("b") is None
    known.keep("large", np.zeros(1000, np.uint32))
    assert known.get("large") is None


def test_threads_may_share_an_encoder(smollm2):
    encoder = CachedEncoder(smollm2, 20_000)  # so that it forgets all the time
    texts = [turn("user", f"{number} " + "the fox " * (number % 7)) * 3 for number in range(40)]
    wanted = [smollm2.encode(text, False) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            found = threads.map(lambda text: encoder.encode(text, False).tolist(), texts)
            assert list(found) == wanted


@given(text=TEXTS)
@settings(deadline=None)
def test_bytes_are_encoded_as_the_byte_tokenizer_does(text):
    assert ByteEncoder().encode(text, True).tolist() == ByteTokenizer().encode(text)


def test_pieces_are_those_of_the_text_before_it_grew(smollm2):
    cuts = cuts_of(smollm2)
    assert cuts is not None
    text = turn("user", "the quick brown fox " * 1000)
    pieces, grown = cuts.pieces(text), cuts.pieces(text + turn("assistant", "jumps"))
    assert "".join(pieces) == text
    assert grown[: len(pieces)] == pieces
    assert max(map(len, pieces)) <= 2 * PIECE + 20
