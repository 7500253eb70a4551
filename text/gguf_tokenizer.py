"""Builds a tokenizer from the vocabulary in a GGUF file's metadata.

Two kinds exist there: `gpt2`, byte-level BPE with merges and a named way to split words first,
and `llama`, SentencePiece's BPE whose merges follow from the pieces' scores.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from text.checked import Fields, ModelError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types
_MAX_PIECE = 512  # characters of a SentencePiece piece that merges are looked for in

_LLAMA3 = "llama-bpe"
_QWEN2 = "qwen2"
_SMOLLM = "smollm"
_GPT2 = "gpt-2"
# tokenizer.ggml.pre -> the way of splitting; files from before that key have GPT-2's
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _SMOLLM,
}
# As in the tokenizer.json of Llama 3 and Qwen 2; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS, QWEN2_WORDS = _WORDS % "{1,3}", _WORDS % ""


def build_backend(metadata: Fields) -> Tokenizer:
    """The tokenizer of a GGUF file; ModelError if its kind is unknown or its parts disagree."""
    kind = metadata.string("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not tokens:
        raise ModelError(f"{metadata.source}: tokenizer.ggml.tokens is empty or repeats a token")
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata, vocabulary)
    elif kind == "llama":
        backend = _sentencepiece_bpe(metadata, tokens, vocabulary)
    else:
        raise ModelError(
            f"{metadata.source}: has a tokenizer of the kind {kind[:40]!r}; "
            "supported are gpt2 and llama"
        )
    special, ordinary = _added_tokens(metadata, tokens)
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)
    _add_template(backend, metadata, tokens, kind)
    return backend


def _byte_level_bpe(metadata: Fields, vocabulary: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    merges = []
    for line in _strings(metadata, "tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"{metadata.source}: the merge {line[:40]!r} is not of known tokens")
        merges.append((left, right))
    split = _split(metadata)
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=split == _LLAMA3))
    normalizer, splitter = _splitter(split)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return backend


def _split(metadata: Fields) -> str:
    name = metadata.string("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ModelError(
            f"{metadata.source}: splits words as {name[:40]!r}; supported are {', '.join(_SPLITS)}"
        )
    return _SPLITS[name]


def _splitter(split: str) -> tuple[Normalizer | None, PreTokenizer]:
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if split == _GPT2:
        return None, ByteLevel(add_prefix_space=False)
    if split == _SMOLLM:
        return None, Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    words = Split(Regex(LLAMA3_WORDS if split == _LLAMA3 else QWEN2_WORDS), "isolated")
    pieces = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    return normalizers.NFC() if split == _QWEN2 else None, pieces


def _sentencepiece_bpe(
    metadata: Fields, tokens: list[str], vocabulary: dict[str, int]
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    scores = metadata.list("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise metadata.wrong("tokenizer.ggml.scores", f"a list of {len(tokens)} numbers")
    unknown = tokens[token_id(metadata, "unknown", len(tokens)) or 0]
    merges = _merges_from_scores(tokens, vocabulary, scores)
    backend = Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: list[str], vocabulary: dict[str, int], scores: list[object]
) -> list[tuple[str, str]]:
    """SentencePiece joins whichever neighbours make the best-scored piece: merges in that order."""
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _MAX_PIECE:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((score, vocabulary[left], vocabulary[right], left, right))
    merges.sort(key=lambda merge: (-merge[0], merge[1], merge[2]))  # type: ignore[operator]
    return [(left, right) for _, _, _, left, right in merges]


def _added_tokens(metadata: Fields, tokens: list[str]) -> tuple[list[AddedToken], list[AddedToken]]:
    """The special tokens, then those that are only kept whole wherever they stand in a text."""
    from tokenizers import AddedToken

    if not metadata.has("tokenizer.ggml.token_type"):
        return [], []
    types = metadata.list("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise metadata.wrong("tokenizer.ggml.token_type", f"a list of {len(tokens)} numbers")
    special, ordinary = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL and token:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and token:
            ordinary.append(AddedToken(token, special=False, normalized=False))
    return special, ordinary


def _add_template(backend: Tokenizer, metadata: Fields, tokens: list[str], kind: str) -> None:
    """Makes encoding add the begin and end tokens that the file asks for."""
    from tokenizers.processors import TemplateProcessing

    by_default = kind == "llama" or _split(metadata) == _LLAMA3
    bos, eos = token_id(metadata, "bos", len(tokens)), token_id(metadata, "eos", len(tokens))
    template, special = ["$A"], []
    if bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", by_default):
        template.insert(0, tokens[bos])
        special.append((tokens[bos], bos))
    if eos is not None and metadata.flag("tokenizer.ggml.add_eos_token", False):
        template.append(tokens[eos])
        special.append((tokens[eos], eos))
    if special:
        backend.post_processor = TemplateProcessing(single=template, special_tokens=special)


def token_id(metadata: Fields, name: str, vocab_size: int) -> int | None:
    """The id of the token that the file calls `bos`, `eos`, `eot`, ..., or None."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.values.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise metadata.wrong(key, f"a token id below {vocab_size}")
    return value


def _strings(metadata: Fields, key: str) -> list[str]:
    values = metadata.list(key)
    if not all(isinstance(value, str) for value in values):
        raise metadata.wrong(key, "a list of strings")
    return [value for value in values if isinstance(value, str)]
