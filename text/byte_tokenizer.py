"""A tokenizer whose tokens are bytes, for simulated workers: it has no vocabulary to load.

Ids 0 to 255 are the bytes of UTF-8; three special tokens follow. It imports nothing heavy, since
a simulated cluster runs many of these on one machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from text.chat_messages import ChatTemplateError, Message, prepare

_SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
_SPECIAL_TEXT = {token_id: text for text, token_id in _SPECIAL.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")


class ByteTokenizer:
    """The same surface as text.tokenizer.Tokenizer; chats are written in ChatML."""

    vocab_size = 256 + len(_SPECIAL)
    eos_ids = frozenset({_SPECIAL["<|endoftext|>"], _SPECIAL["<|im_end|>"]})
    bos_id: int | None = None
    special_ids = frozenset(_SPECIAL_TEXT)
    strips_first_space = False
    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes, and one id for each special token written out in the text."""
        ids: list[int] = []
        for part in self.split(text):
            ids.extend([part] if isinstance(part, int) else part)
        return ids

    def split(self, text: str) -> list[int | bytes]:
        """The ids of special tokens, and the bytes between them."""
        return [
            _SPECIAL[part] if index % 2 else part.encode("utf-8", "replace")
            for index, part in enumerate(_SPLIT.split(text))
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(each) for each in ids if each not in skipped)
        return data.decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        """The byte as <0x41>, as SentencePiece writes them, or the special token."""
        if 0 <= token_id < 256:
            return f"<0x{token_id:02X}>"
        return _SPECIAL_TEXT.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return _BYTES[token_id]
        return _SPECIAL_TEXT.get(token_id, "").encode()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """ChatML: <|im_start|>role, a newline, the text, <|im_end|> and a newline, for each."""
        turns = prepare(messages, keep_parts=False)
        if continue_final_message and not turns:
            raise ChatTemplateError("there is no final message with a text to continue")
        if tools:
            turns.insert(0, {"role": "system", "content": f"Tools: {json.dumps(list(tools))}"})
        text = "".join(
            f"<|im_start|>{turn.get('role', 'user')}\n{turn['content']}<|im_end|>\n"
            for turn in turns
        )
        if continue_final_message:
            return text.removesuffix("<|im_end|>\n")
        return text + "<|im_start|>assistant\n" if add_generation_prompt else text


_BYTES = [bytes([value]) for value in range(256)]
