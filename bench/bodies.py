"""Chat requests of a given size, in English-like text, that share prefixes as conversations do."""

from __future__ import annotations

import json
import random

NONCE = "@nonce------"  # in its place each request says something new
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also did many
off before must well back through years much where your way down should because long each just
state those people too good little how world make very year still see own work men day get here
old between both life being under three never know same last another while us might great go
come since against right came take used himself few house american use place during high
without again home around small however found part school thought went say general once upon
war left number course harbour invoice customer delivery warehouse contract weather engine
schedule station measure record answer question report library
"""
_WORDS = (2 * _TEXT.split())[:256]  # one for each byte


def english(length: int, source: random.Random) -> str:
    """Text of so many characters."""
    words = [_WORDS[byte] for byte in source.randbytes(length // 3 + 1)]
    for i in range(9, len(words), 11):
        words[i] += "."
    return " ".join(words)[:length].ljust(length, ".")


def chat_bodies(size: int, count: int, seed: int = 0) -> list[bytes]:
    """Bodies of exactly `size` bytes, with NONCE at the start of the last message.

    Four system prompts are two fifths of the text; each two bodies share the turns after it, which
    are the next two fifths; the last message is a body's own, and each request's.
    """
    return [_chat_body(size, number, seed) for number in range(count)]


def _chat_body(size: int, number: int, seed: int) -> bytes:
    system = random.Random(f"{seed} system {number // 2 % 4}")
    history = random.Random(f"{seed} history {number // 2}")
    own = random.Random(f"{seed} own {number}")
    shared = size >= 4000  # a smaller one is but a question
    turns = [english(size // 20, history) for _ in range(8)] if shared else []
    spare = size - len(_encoded("." if shared else "", turns, NONCE)) + shared
    if spare < 0:
        raise ValueError(f"a body has at least {size - spare} bytes")
    prompt = english(2 * size // 5, system) if shared else ""
    return _encoded(prompt, turns, NONCE + english(spare - len(prompt), own))


def _encoded(prompt: str, turns: list[str], last: str) -> bytes:
    messages = [{"role": "system", "content": prompt}] if prompt else []
    for number, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    messages.append({"role": "user", "content": last})
    body = {"model": "llama", "max_tokens": 64, "temperature": 0.2, "messages": messages}
    return json.dumps(body).encode()
