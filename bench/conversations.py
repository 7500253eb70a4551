"""Chat requests over time: many conversations over few documents, or none that share anything."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from math import exp, log

from bench.bodies import english

CHARACTERS_PER_TOKEN = 4.9  # of such text with SmolLM2's tokenizer
MODEL = "bench"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: when it is sent, in seconds, and its body."""

    at: float
    body: bytes


@dataclass(frozen=True, slots=True)
class Mix:
    """What people ask. Lengths in tokens.

    A conversation is held over one of the documents (the system prompt, tools and texts of an
    assistant), some of which are more popular than others. Each turn sends all that was said
    before, and a question. In some conversations the first question brings a text of its own.
    Without documents every request is alone, and shares nothing with another.
    """

    documents: int
    document: tuple[int, int]  # least and most
    popularity: float  # of the n-th document: 1 / n ** popularity
    turns: float  # mean of a geometric distribution
    most_turns: int
    think_seconds: float  # mean between two turns
    question: int  # median; most are between half and twice as long
    answer: int  # likewise
    own_text_share: float  # of conversations
    own_text: tuple[int, int]


SHARED = Mix(
    documents=120,
    document=(1500, 4500),
    popularity=0.7,
    turns=4.0,
    most_turns=10,
    think_seconds=5.0,
    question=80,
    answer=64,
    own_text_share=0.15,
    own_text=(800, 1600),
)
ALONE = Mix(
    documents=0,
    document=(0, 0),
    popularity=0.0,
    turns=1.0,
    most_turns=1,
    think_seconds=0.0,
    question=80,
    answer=64,
    own_text_share=1.0,
    own_text=(300, 1400),
)


def documents(mix: Mix) -> list[str]:
    """Their texts, the most popular first; the same in every run."""
    texts = []
    for number in range(mix.documents):
        source = random.Random(f"document {number}")
        texts.append(_text(source.randint(*mix.document), source))
    return texts


def opening(document: str) -> bytes:
    """A request over a document that answers with one token: it fills a cache."""
    return _body([("system", document), ("user", "Ready?")], 1)


def turns(mix: Mix, *, rate: float, seconds: float, seed: int) -> list[Turn]:
    """All requests of so many seconds, first to last.

    Conversations begin as a Poisson process. Those that began before the time are there too, so
    that the rate is the same from the first second to the last.

    Args:
        rate: requests a second, on average.
        seed: the same one gives the same requests at the same times.
    """
    source = random.Random(f"turns {seed}")
    texts = documents(mix)
    weights = [1 / (n + 1) ** mix.popularity for n in range(mix.documents)]
    per_conversation = _mean_turns(mix)
    found = []
    at = -3.0 * mix.most_turns * mix.think_seconds
    while True:
        at += source.expovariate(rate / per_conversation)
        if at >= seconds:
            break
        document = source.choices(texts, weights)[0] if texts else None
        found += _conversation(mix, at, document, source)
    found.sort(key=lambda turn: turn.at)
    return [turn for turn in found if 0 <= turn.at < seconds]


def _conversation(mix: Mix, at: float, document: str | None, source: random.Random) -> list[Turn]:
    said = [("system", document)] if document is not None else []
    found = []
    for number in range(mix.most_turns):
        question = _text(_about(mix.question, source), source)
        if number == 0 and source.random() < mix.own_text_share:
            question = f"{_text(source.randint(*mix.own_text), source)} {question}"
        said.append(("user", question))
        answer = _about(mix.answer, source)
        found.append(Turn(at, _body(said, answer)))
        said.append(("assistant", _text(answer, source)))
        at += source.expovariate(1 / mix.think_seconds) if mix.think_seconds else 0.0
        if source.random() < 1 / mix.turns:
            break
    return found


def _mean_turns(mix: Mix) -> float:
    """Of a geometric distribution that is cut off."""
    goes_on = 1 - 1 / mix.turns
    return float(sum(goes_on**n for n in range(mix.most_turns)))


def _about(median: int, source: random.Random) -> int:
    return max(1, min(8 * median, round(exp(log(median) + 0.6 * source.gauss(0, 1)))))


def _text(tokens: int, source: random.Random) -> str:
    return english(round(tokens * CHARACTERS_PER_TOKEN), source)


def _body(said: list[tuple[str, str]], answer: int) -> bytes:
    request = {
        "model": MODEL,
        "messages": [{"role": role, "content": text} for role, text in said],
        "max_tokens": answer,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()
