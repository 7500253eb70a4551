"""Tokens to text: whole characters, stop strings, nothing lost and nothing leaked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text.byte_tokenizer import ByteTokenizer
from text.detokenizer import Detokenizer, StopMatcher
from text.models import resolve
from text.tokenizer import Tokenizer
from worker.loader import open_model

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return open_model(resolve("smollm2-135m")).tokenizer()


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """What is sent for each token, then at the end."""
    sent = []
    for token_id in ids:
        sent.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None:
            return sent
    return [*sent, detokenizer.finish()]


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """By definition: the stop string complete first, the longest of those complete together."""
    for end in range(len(text) + 1):
        found = [word for word in stop if word and text[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return text[: end - len(word)], word
    return text, None


def could_become(held: str, stop: Sequence[str]) -> bool:
    return any(word.startswith(held) and word != held for word in stop)


token_lists = st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 400)), max_size=40)
byte_lists = st.one_of(
    st.lists(st.integers(0, 258), max_size=40),
    st.text(max_size=20).map(lambda text: list(text.encode("utf-8", "replace"))),
)


@given(ids=token_lists, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_make_up_what_the_tokenizers_library_decodes(smollm2, ids, skip):
    detokenizer = Detokenizer(smollm2, [], skip_special_tokens=skip)
    text = "".join(pieces(detokenizer, ids))
    assert text == smollm2.backend.decode(ids, skip_special_tokens=skip)
    assert text == smollm2.decode(ids, skip_special_tokens=skip)


@given(ids=byte_lists, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_of_bytes_make_up_the_decoded_text(ids, skip):
    detokenizer = Detokenizer(BYTES, [], skip_special_tokens=skip)
    assert "".join(pieces(detokenizer, ids)) == BYTES.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.sampled_from("aé€😀 "), max_size=12))
def test_only_whole_characters_are_sent(text):
    detokenizer = Detokenizer(BYTES, [])
    sent = "".join(detokenizer.push(byte) for byte in text.encode())
    assert sent == text
    assert detokenizer.finish() == ""


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_stop_strings_cut_the_text_at_the_first_match(data):
    text = data.draw(st.text(st.sampled_from("abc€"), max_size=30))
    stop = data.draw(st.lists(st.text(st.sampled_from("abc€"), min_size=1, max_size=5), max_size=4))
    include = data.draw(st.booleans())
    detokenizer = Detokenizer(BYTES, [], stop, include_stop=include)
    sent = ""
    ids = list(text.encode())
    for count, token_id in enumerate(ids, 1):
        sent += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            break
        seen = bytes(ids[:count]).decode("utf-8", "ignore")
        held = seen.removeprefix(sent)
        # Just what may yet be a stop string is held back: not less, and not more.
        assert held == "" or could_become(held, stop)
        assert not any(could_become(seen[at:], stop) for at in range(len(seen)) if at < len(sent))
    if detokenizer.stopped is None:
        sent += detokenizer.finish()
    before, word = first_stop(text, stop)
    assert detokenizer.stopped == word
    assert sent == (before + word if include and word else before)


@given(ids=token_lists, data=st.data())
@settings(max_examples=300, deadline=None)
def test_stop_strings_are_found_across_tokens(smollm2, ids, data):
    text = smollm2.decode(ids, skip_special_tokens=False)
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=3))
    stop = [text[at : at + size] for at, size in cuts if text[at : at + size]]
    detokenizer = Detokenizer(smollm2, [], stop, skip_special_tokens=False)
    sent = "".join(pieces(detokenizer, ids))
    assert (sent, detokenizer.stopped) == first_stop(text, stop)


@given(
    chunks=st.lists(st.text("ab", max_size=4), max_size=8), stop=st.lists(st.text("ab"), max_size=3)
)
@settings(max_examples=300)
def test_the_result_does_not_depend_on_where_tokens_are_cut(chunks, stop):
    matcher = StopMatcher(stop)
    sent, found = "", None
    for chunk in chunks:
        part, found = matcher.feed(chunk)
        sent += part
        if found:
            break
    assert (sent + ("" if found else matcher.release()), found) == first_stop("".join(chunks), stop)


def test_text_of_the_first_min_tokens_is_sent_and_never_matches():
    detokenizer = Detokenizer(BYTES, [], ["ab"], min_tokens=3)
    assert [detokenizer.push(byte) for byte in b"aba"] == ["a", "b", "a"]
    assert detokenizer.push(ord("b")) == "b"  # the match would have begun too early
    assert detokenizer.push(ord("a")) == ""
    assert detokenizer.push(ord("b")) == ""
    assert detokenizer.stopped == "ab"


def test_nothing_follows_a_stop_string():
    detokenizer = Detokenizer(BYTES, [], ["."])
    assert [detokenizer.push(byte) for byte in b"a.bc"] == ["a", "", "", ""]
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == "."


def test_half_a_character_at_the_end_is_one_replacement_character():
    detokenizer = Detokenizer(BYTES, [])
    assert [detokenizer.push(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_a_character_begun_in_the_prompt_is_finished_in_the_answer():
    prompt, answer = [*b"so ", *"😀".encode()[:2]], "😀".encode()[2:]
    assert "".join(pieces(Detokenizer(BYTES, prompt), answer)) == "😀"


def test_special_tokens_are_left_out_unless_asked_for():
    ids = [*b"a", 258, *b"b"]
    assert "".join(pieces(Detokenizer(BYTES, []), ids)) == "ab"
    shown = Detokenizer(BYTES, [], skip_special_tokens=False)
    assert "".join(pieces(shown, ids)) == "a<|im_end|>b"


def test_a_special_token_can_be_a_stop_string():
    detokenizer = Detokenizer(BYTES, [], ["<|im_end|>"], skip_special_tokens=False)
    assert [detokenizer.push(each) for each in [*b"a", 258]] == ["a", ""]
    assert detokenizer.stopped == "<|im_end|>"
