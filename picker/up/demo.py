"""A handful of conversations through Envoy: once by round robin, once down the warm path."""

from __future__ import annotations

import json
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

MAX_TOKENS = 12  # of an answer: the demo is about the prompts

_GUIDE = (
    "You answer questions of visitors to the town of Brennick. Be brief and friendly. What you "
    "know: the museum on Castle Hill opens at nine and closes at five, and on Mondays it stays "
    "shut. The ferry to the island leaves every forty minutes from pier three; the last one "
    "returns at eight in the evening. The market is on Wednesdays and Saturdays, on the square "
    "between the old bridge and the town hall, and sells cheese, bread, flowers and wool. Buses "
    "number two and seven go to the station, a day ticket costs four pounds and children ride "
    "for free. The swimming pool is closed for repairs until the spring. The lighthouse may be "
    "climbed on Sundays, a hundred and twelve steps, not with a pram. Boats to see the seals go "
    "from the small harbour at high tide, and the skipper decides about the weather on the same "
    "morning. The bakery in Mill Lane sells warm rolls from six; the fish shop beside it opens "
    "when the first boat is back. There are two walks that everybody likes: one along the cliffs "
    "to the ruined chapel, two hours there and back, and one through the beech wood to the "
    "waterfall, which is short and good for children. Parking is free behind the station."
)
_COOK = (
    "You are a patient cook who helps beginners. Name exact amounts, times and temperatures, and "
    "never more than three steps at once. In this kitchen there are an oven, two pans, a pot of "
    "five litres, a sharp knife, a wooden board, a scale and a whisk. In the cupboard there are "
    "flour, sugar, salt, rice, lentils, canned tomatoes, olive oil, vinegar, garlic and onions. "
    "In the fridge there are six eggs, butter, milk, a lemon, two carrots, spinach and a piece of "
    "hard cheese. One guest eats no meat and another must not have nuts. Dinner is at seven. The "
    "oven runs hot: set it ten degrees lower than any recipe says. The large pan sticks unless it "
    "is heated before the oil goes in, and the small one has no lid. There is no blender, no "
    "microwave, and only one clean towel. Rice needs twice its weight in water, lentils three "
    "times, and both are salted at the end. When somebody asks for a substitute, say first what "
    "the thing is good for in the dish, and then what in this kitchen does the same. When "
    "something burns or curdles, stay calm, say how to save it, and what it will taste like."
)
_EDITOR = (
    "You edit texts for a gardening magazine. Keep the author's voice, shorten long sentences, "
    "prefer verbs to nouns, and explain each change in a few words. The house style: numbers up "
    "to twelve are written out, plants carry their common name first and the Latin one in "
    "brackets, seasons are lower case, measures are metric. Readers are amateurs with small "
    "gardens in a cool, wet climate; they like advice that costs little and works the first time. "
    "Never recommend poison. Articles close with one thing that can be done this very weekend. "
    "Titles have at most six words and no question mark. Do not write that something is easy: show "
    "it. Prices are left out, because they change, and so are the names of shops. Photographs are "
    "described in one line that tells what cannot be seen in them. A recipe for compost, a "
    "sowing table or a plan of a bed stands in a box of its own and is not repeated in the text. "
    "If the author contradicts last month's issue, keep both views and name the reasons. Answer "
    "with the edited text first, and then, after an empty line, with your remarks."
)
CONVERSATIONS: dict[str, tuple[str, Sequence[str]]] = {
    "guide": (
        _GUIDE,
        ("When does the museum open?", "How do I get to the station?", "Is there a market today?"),
    ),
    "cook": (
        _COOK,
        ("What can I cook tonight?", "How long does the rice take?", "And for the one without?"),
    ),
    "editor": (
        _EDITOR,
        ("Shorten: 'It is of importance to water.'", "Now make it friendlier.", "A title, please."),
    ),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt met."""

    conversation: str
    turn: int  # from 1
    pod: str
    prompt_tokens: int
    predicted_tokens: int | None  # cached, as the picker expected; None by round robin
    cached_tokens: int  # as the worker counted them
    ttft: float  # seconds to the first token


@dataclass(frozen=True, slots=True)
class Served:
    """Which pod answered, and what the picker knew."""

    pod: str
    predicted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A way to the pods: a port of Envoy, and how to learn which pod answered."""

    url: str
    served: Callable[[str, aiohttp.ClientResponse], Awaitable[Served]]  # by request id


class DemoFailed(Exception):
    """A prompt was not answered. The message is one line."""


async def converse(http: aiohttp.ClientSession, route: Route, model: str) -> AsyncIterator[Answer]:
    """Hold all conversations turn by turn, as visitors who do not wait for each other would."""
    chats = {
        name: [{"role": "system", "content": system}] for name, (system, _) in CONVERSATIONS.items()
    }
    turns = max(len(questions) for _, questions in CONVERSATIONS.values())
    for turn in range(turns):
        for name, (_, questions) in CONVERSATIONS.items():
            chats[name].append({"role": "user", "content": questions[turn]})
            answer, text = await _ask(http, route, model, name, turn + 1, chats[name])
            chats[name].append({"role": "assistant", "content": text})
            yield answer


async def _ask(
    http: aiohttp.ClientSession,
    route: Route,
    model: str,
    name: str,
    turn: int,
    messages: list[dict[str, str]],
) -> tuple[Answer, str]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request_id = uuid.uuid4().hex
    started = time.perf_counter()
    ttft, text = 0.0, ""
    usage: dict[str, Any] = {}
    async with http.post(
        f"{route.url}/v1/chat/completions", json=body, headers={"x-request-id": request_id}
    ) as response:
        if response.status != 200:
            raise DemoFailed(f"a prompt got {response.status}: {(await response.text())[:200]}")
        async for chunk in _events(response):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece or choice["finish_reason"]:  # not the chunk that only names the role
                    ttft = ttft or time.perf_counter() - started
                text += piece
    served = await route.served(request_id, response)
    details = usage.get("prompt_tokens_details") or {}
    answer = Answer(
        conversation=name,
        turn=turn,
        pod=served.pod,
        prompt_tokens=usage.get("prompt_tokens", 0),
        predicted_tokens=served.predicted_tokens,
        cached_tokens=details.get("cached_tokens", 0),
        ttft=ttft,
    )
    return answer, text


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


def speedup(warm: Sequence[Answer], round_robin: Sequence[Answer]) -> float:
    """How much shorter the median time to first token of repeated prompts is."""
    return _median_repeat(round_robin) / _median_repeat(warm)


def _median_repeat(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft for answer in answers if answer.turn > 1)


def prompts() -> int:
    """How many prompts the conversations hold."""
    return sum(len(questions) for _, questions in CONVERSATIONS.values())
