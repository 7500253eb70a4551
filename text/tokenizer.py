"""Text to token ids and back, and chats to text: one model's tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text.chat_messages import ChatTemplateError, Message
from text.checked import Fields, ModelError, one_line, read_json
from text.gguf_tokenizer import build_backend, token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from text.chat_template import ChatTemplate

__all__ = ["ChatTemplateError", "Tokenizer"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAMPLE = "To try it: é 1."  # some broken tokenizers load, and fail at the first text
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what a server needs to know around it.

    `vocab_size` is one more than the largest id; `eos_ids` are the tokens that end a text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: frozenset[int],
        bos_id: int | None,
        chat_template: ChatTemplate | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = frozenset(added)
        self._is_byte_level, self.strips_first_space = _way_of_writing(backend)
        self._bytes: dict[int, bytes] = {}  # what token_bytes found

    @staticmethod
    def from_directory(directory: Path) -> Tokenizer:
        """From tokenizer.json and its neighbours in a Hugging Face directory, or ModelError."""
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory}: holds no tokenizer.json; other kinds are not supported")
        try:
            backend = Backend.from_file(str(path))
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise ModelError(f"{path}: is no valid tokenizer: {one_line(error)}") from error
        settings = _optional_json(directory / "tokenizer_config.json")
        special = _special_tokens(settings)
        tokenizer = Tokenizer(
            backend,
            eos_ids=_eos_ids(directory, backend, special.get("eos_token")),
            bos_id=_id_of(backend, special.get("bos_token")),
            chat_template=_chat_template(directory, settings, special),
        )
        tokenizer.encode(_SAMPLE)
        return tokenizer

    @staticmethod
    def from_gguf(metadata: Fields) -> Tokenizer:
        """From the metadata of a GGUF file, or ModelError."""
        try:
            backend = build_backend(metadata)
        except (ModelError, ImportError):
            raise
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise ModelError(
                f"{metadata.source}: has no valid tokenizer: {one_line(error)}"
            ) from error
        size = backend.get_vocab_size()
        ids = {name: token_id(metadata, name, size) for name in ("bos", "eos", "eot", "eom")}
        special = {
            f"{name}_token": backend.id_to_token(index) or ""
            for name, index in ids.items()
            if index is not None
        }
        template = metadata.string("tokenizer.chat_template", "")
        tokenizer = Tokenizer(
            backend,
            eos_ids=frozenset(
                index for name, index in ids.items() if name != "bos" and index is not None
            ),
            bos_id=ids["bos"],
            chat_template=_make_template(template, special) if template else None,
        )
        tokenizer.encode(_SAMPLE)
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A chat that was rendered has its special tokens already: add none then."""
        (ids,) = self.encode_all([text], add_special_tokens)
        return ids

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of several texts. Python's lock is free meanwhile."""
        encode = self.backend.encode_batch_fast  # the others also find each token's place
        try:
            found = encode(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            # Half a surrogate pair, which JSON can carry: no tokenizer has a token for it.
            repaired = [
                text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
            ]
            found = encode(repaired, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not _is_library_error(error):
                raise
            raise ModelError(f"the tokenizer failed: {one_line(error)}") from error
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens; ids that the vocabulary lacks stand for nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(each) for each in ids if each not in skipped)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def token(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty if the vocabulary lacks the id."""
        known = 0 <= token_id < self.vocab_size
        return (self.backend.id_to_token(token_id) or "") if known else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for within a text: perhaps not whole characters."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled_out(token_id)
        return known

    def _spelled_out(self, token_id: int) -> bytes:
        piece = self.token(token_id)
        if token_id in self._added:
            return piece.encode()
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
            except KeyError:  # not written in the byte alphabet
                return piece.encode()
        match = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The chat as the model was trained to read it; ChatTemplateError if it cannot be."""
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template: use plain completions")
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )


def _is_library_error(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: nothing narrow, and panics of its Rust code."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _way_of_writing(backend: Backend) -> tuple[bool, bool]:
    """How the vocabulary writes text: in GPT-2's byte alphabet, or as SentencePiece does.

    Also whether a text's first space is the vocabulary's and not the text's. Both are read from
    the decoder that the tokenizer carries; any other decoder is a ModelError.
    """
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps = state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return True, False
    if kinds <= _SENTENCEPIECE_STEPS and kinds & {"Replace", "Metaspace"}:
        strips = any(
            step.get("start", 0) > 0 or step.get("prepend_scheme", "never") != "never"
            for step in steps
        )
        return False, strips
    raise ModelError(f"its tokenizer decodes by {sorted(kinds)}, which is not supported")


_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's way of writing bytes as characters: printable ones as themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_alphabet()


def _optional_json(path: Path) -> Fields:
    return read_json(path) if path.exists() else Fields(str(path), {})


def _special_tokens(settings: Fields) -> dict[str, str]:
    """bos_token and the like, each a string or an object that holds it."""
    special = {}
    for name in _SPECIAL_NAMES:
        value = settings.values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value.isprintable():
            special[name] = value
        elif value is not None:
            raise settings.wrong(name, "a token")
    return special


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _eos_ids(directory: Path, backend: Backend, eos_token: str | None) -> frozenset[int]:
    """What ends a text: generation_config.json's list, else config.json's; and eos_token."""
    ids: set[int | None] = {_id_of(backend, eos_token)}
    for name in ("generation_config.json", "config.json"):
        fields = _optional_json(directory / name)
        if fields.has("eos_token_id"):
            value = fields.values["eos_token_id"]
            for each in value if isinstance(value, list) else [value]:
                if type(each) is not int or each < 0:
                    raise fields.wrong("eos_token_id", "a token id or a list of them")
                ids.add(each)
            break
    return frozenset(each for each in ids if each is not None)


def _chat_template(
    directory: Path, settings: Fields, special: Mapping[str, str]
) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return _make_template(path.read_text("utf-8"), special)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    value = settings.values.get("chat_template")
    if isinstance(value, list):  # several, each with a name
        value = next((_named(each, "default") for each in value if _named(each, "default")), None)
    return _make_template(value, special) if isinstance(value, str) else None


def _named(entry: object, name: str) -> object:
    matches = isinstance(entry, dict) and entry.get("name") == name
    return entry.get("template") if isinstance(entry, dict) and matches else None


def _make_template(source: str, special: Mapping[str, str]) -> ChatTemplate:
    from text.chat_template import ChatTemplate  # loads Jinja, which only chats need

    return ChatTemplate(source, special)
