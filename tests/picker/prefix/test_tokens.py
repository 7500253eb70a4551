"""The tokens of requests: the very ones that the engine will have, or none and a reason."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from picker import config
from picker.config import EndpointSpec
from picker.document import ConfigError
from picker.pool import Pool
from picker.prefix import tokens as module
from picker.prefix.tokens import MAX_BYTES, Tokens
from picker.request import LLMRequest, parse
from tests.worker.api import serving
from tests.worker.tiny import write_hf_model
from text.load import load_tokenizer
from text.tokenizer import Tokenizer
from worker.api.errors import ApiError
from worker.api.params import ModelLimits
from worker.api.prompts import PromptReader
from worker.api.protocol import ChatRequest, CompletionRequest, parser

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = "the quick brown fox jumps over the lazy dog " * 100


def request(path: str, /, **body: Any) -> LLMRequest:
    return of_bytes(path, json.dumps(body).encode())


def of_bytes(path: str, body: bytes, **headers: str) -> LLMRequest:
    return parse("POST", path, {"content-type": "application/json"} | headers, body)


@asynccontextmanager
async def running(tokenizer: str, *addresses: str) -> AsyncIterator[Tokens]:
    pool = Pool("test")
    pool.update([EndpointSpec(address=address) for address in addresses])
    tokens = Tokens(pool, config.Prefix(mode="events", tokenizer=tokenizer))
    await tokens.start()
    try:
        yield tokens
    finally:
        await tokens.stop()


async def prepared(tokens: Tokens, request: LLMRequest) -> list[int] | None:
    """The tokens that a request gets, after whatever it has to wait for."""
    waiting = tokens.prepare(request)
    if waiting is not None:
        await waiting()
    if request.token_ids is None:
        return None
    assert request.token_ids.dtype == np.uint32
    return request.token_ids.tolist()


def misses(tokens: Tokens) -> dict[str, int]:
    return {reason.value: count for reason, count in tokens.missed.items() if count}


# Token ids


@pytest.mark.parametrize(
    ("path", "body", "ids", "in_all"),
    [
        (COMPLETION, {"prompt": [5, 0, 2**31 - 1]}, [5, 0, 2**31 - 1], 3),
        (COMPLETION, {"prompt": [[1, 2], [3]]}, [1, 2], 3),
        (COMPLETION, {"prompt": [[1, 2]]}, [1, 2], 2),
        ("/v1/embeddings", {"input": [1, 2]}, [1, 2], 2),
        ("/inference/v1/generate", {"token_ids": [1, 2]}, [1, 2], 2),
        ("/generate", {"input_ids": [[1, 2], [3]]}, [1, 2], 3),
    ],
)
async def test_token_ids_are_used_as_they_are(path, body, ids, in_all):
    async with running("pods") as tokens:
        asked = request(path, **body)
        assert tokens.prepare(asked) is None
    assert asked.token_ids is not None
    assert asked.token_ids.tolist() == ids
    assert asked.prompt_tokens == in_all


@pytest.mark.parametrize("shape", ["{}", "[{}]", "[{},[7]]", "[ {} , [7]]", "[\n{}\n]"])
async def test_very_many_token_ids_are_all_read(shape):
    ids = [number % 50_000 for number in range(100_000)]
    body = b'{"prompt":%b}' % shape.format(json.dumps(ids)).encode()
    async with running("simulated") as tokens:
        assert await prepared(tokens, of_bytes(COMPLETION, body)) == ids


@pytest.mark.parametrize("odd", ['"a"', "-1", "2147483648", "1.5", "[1]", "null"])
async def test_what_is_no_token_id_among_many_is_no_prompt(odd):
    ids = ",".join(["1"] * 90_000)
    async with running("simulated") as tokens:
        body = b'{"prompt":[%b,%b,1]}' % (ids.encode(), odd.encode())
        assert await prepared(tokens, of_bytes(COMPLETION, body)) is None
        assert misses(tokens) == {"form": 1}


async def test_token_ids_of_which_the_engine_takes_a_part_are_not_used():
    async with running("simulated") as tokens:
        asked = request(COMPLETION, prompt=[1, 2, 3], truncate_prompt_tokens=2)
        assert await prepared(tokens, asked) is None
        assert misses(tokens) == {"form": 1}


# As the worker


TEXTS = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "the fox ", LONG])
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS | PARTS}
    ),
    min_size=1,
    max_size=4,
)
FLAGS = st.none() | st.booleans()
TOOLS = st.just([{"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}}])
CHATS = st.fixed_dictionaries(
    {"messages": MESSAGES},
    optional={
        "add_generation_prompt": FLAGS,
        "continue_final_message": FLAGS,
        "add_special_tokens": FLAGS,
        "tools": st.none() | st.just([]) | TOOLS,
        "documents": st.just([{"text": "d"}]),
        "reasoning_effort": st.just("low"),
        "chat_template_kwargs": st.just({"enable_thinking": False}),
    },
)
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A directory with a tiny tokenizer and a template that shows all it is given."""
    directory = tmp_path_factory.mktemp("model")
    write_hf_model(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


class Both:
    """The picker's tokens and the worker's, of one model, in an event loop of their own."""

    def __init__(self, name: str) -> None:
        tokenizer = load_tokenizer(name)
        assert isinstance(tokenizer, Tokenizer)
        limits = ModelLimits(1 << 20, tokenizer.vocab_size, tokenizer.eos_ids)
        self.reader = PromptReader(tokenizer, limits)
        self.tokens = Tokens(Pool("test"), config.Prefix(mode="events", tokenizer=name))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.tokens.start())

    def close(self) -> None:
        self.reader.close()
        self.loop.run_until_complete(self.tokens.stop())
        self.loop.close()

    def of_chat(self, body: dict[str, Any]) -> tuple[list[int] | None, list[int] | None]:
        """The picker's and the worker's, or None for a refusal."""
        return self.loop.run_until_complete(self._of_chat(json.dumps(body).encode()))

    async def _of_chat(self, body: bytes) -> tuple[list[int] | None, list[int] | None]:
        found = await prepared(self.tokens, of_bytes(CHAT, body))
        try:
            return found, (await self.reader.of_chat(_parse_chat(body))).token_ids
        except ApiError:
            return found, None

    def of_completion(self, body: dict[str, Any]) -> tuple[list[int] | None, list[int] | None]:
        return self.loop.run_until_complete(self._of_completion(json.dumps(body).encode()))

    async def _of_completion(self, body: bytes) -> tuple[list[int] | None, list[int] | None]:
        found = await prepared(self.tokens, of_bytes(COMPLETION, body))
        try:
            prompts = await self.reader.of_completion(_parse_completion(body))
        except ApiError:
            return found, None
        return found, prompts[0].token_ids


_parse_chat = parser(ChatRequest)
_parse_completion = parser(CompletionRequest)


@pytest.fixture(scope="module", params=["tiny", "smollm2-135m"])
def both(request, model) -> Iterator[Both]:
    both = Both(model if request.param == "tiny" else request.param)
    yield both
    both.close()


@given(body=CHATS)
@settings(max_examples=100, deadline=None)
def test_chats_have_the_tokens_that_the_worker_gives_them(both, body):
    found, wanted = both.of_chat(body)
    if wanted is not None:
        assert found == wanted
        assert both.of_chat(body) == (wanted, wanted)  # which is known by now


@given(
    prompt=TEXTS | st.lists(TEXTS, min_size=1, max_size=2),
    add_special_tokens=FLAGS,
)
@settings(max_examples=50, deadline=None)
def test_completions_have_the_tokens_that_the_worker_gives_them(both, prompt, add_special_tokens):
    body = {"prompt": prompt, "add_special_tokens": add_special_tokens}
    found, wanted = both.of_completion(body)
    if wanted is not None:
        assert found == wanted
        assert both.of_completion(body) == (wanted, wanted)


def test_the_next_turn_has_the_tokens_that_the_worker_gives_it(both):
    messages = []
    for number in range(6):
        messages += [
            {"role": "user", "content": f"{number} {LONG}"},
            {"role": "assistant", "content": "Yes, " * number},
        ]
        found, wanted = both.of_chat({"messages": messages[:-1]})
        assert found == wanted is not None


async def test_a_simulated_worker_has_the_same_tokens():
    asks = [
        {"messages": HI},
        {"messages": [*HI, {"role": "assistant", "content": "Well"}]},
        {"messages": HI, "add_generation_prompt": False},
        {"messages": [*HI, *HI], "continue_final_message": True},
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    async with serving() as api, running("simulated") as own:
        async with running("pods", f"127.0.0.1:{api.port}") as pods:
            for ask in asks:
                rendered = await api.ok(f"{CHAT}/render", **ask)
                for tokens in (own, pods):
                    asked = request(CHAT, **ask)
                    assert await prepared(tokens, asked) == rendered["token_ids"]
                    assert asked.prompt_tokens == len(rendered["token_ids"])
            for prompt in ("Hi", LONG[:400], "<|im_end|>é"):
                rendered = await api.ok(f"{COMPLETION}/render", prompt=prompt)
                for tokens in (own, pods):
                    asked = request(COMPLETION, prompt=prompt)
                    assert await prepared(tokens, asked) == rendered[0]["token_ids"]
        assert misses(own) == {}


# When to wait


async def test_short_prompts_are_done_at_once_and_long_ones_once():
    async with running("smollm2-135m") as tokens:
        assert tokens.prepare(request(CHAT, messages=HI)) is None
        long = {"messages": [{"role": "user", "content": LONG}]}
        assert await prepared(tokens, request(CHAT, **long)) is not None
        again = request(CHAT, **long, stream=True)
        assert tokens.prepare(again) is None
        assert again.token_ids is not None


async def test_of_several_prompts_the_first_is_looked_up_and_all_are_load():
    async with running("simulated") as tokens:
        asked = request(COMPLETION, prompt=["ab", LONG])
        assert await prepared(tokens, asked) == list(b"ab")
        assert asked.prompt_tokens > 1000
        alone = request(COMPLETION, prompt=["ab"])
        assert await prepared(tokens, alone) == list(b"ab")
        assert alone.prompt_tokens == 2


async def test_what_has_no_prompt_is_no_miss():
    async with running("smollm2-135m") as tokens:
        for asked in (
            parse("GET", "/v1/models", {}, b""),
            parse("POST", "/v1/audio/transcriptions", {}, b"x"),
            parse("POST", CHAT, {}, None),
            request(COMPLETION, prompt=""),
            request(COMPLETION),
            request(CHAT, messages=[]),
        ):
            assert await prepared(tokens, asked) is None
        assert misses(tokens) == {}


async def test_why_there_are_no_tokens_is_counted():
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with running("smollm2-135m") as tokens:
        for body in (
            {"messages": [{"role": "user", "content": image}]},
            {"messages": HI, "chat_template": "mine"},
            {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
            {"messages": HI, "truncate_prompt_tokens": 3},
            {"messages": [{"role": "user", "content": "a" * MAX_BYTES}]},
        ):
            asked = request(CHAT, **body)
            before = asked.prompt_tokens
            assert await prepared(tokens, asked) is None
            assert asked.prompt_tokens == before > 0
        assert misses(tokens) == {"media": 1, "template": 2, "form": 1, "long": 1}


async def test_a_model_without_a_template_has_no_chats(tmp_path):
    write_hf_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    async with running(str(tmp_path)) as tokens:
        assert await prepared(tokens, request(CHAT, messages=HI)) is None
        assert await prepared(tokens, request(COMPLETION, prompt="Hi")) is not None
        assert misses(tokens) == {"template": 1}


@pytest.fixture
def slow_model(tmp_path) -> str:
    """Its template runs until it is stopped, which takes two seconds."""
    write_hf_model(tmp_path)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].content != 'Hi' %}" + loops + "{% endif %}Hi"
    )
    return str(tmp_path)


async def test_a_prompt_does_not_wait_for_ever_nor_others_for_it(slow_model, monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 0.05)
    monkeypatch.setattr("text.chat_template.MAX_STEPS", 1 << 60)
    async with running(slow_model) as tokens:
        slow = request(CHAT, messages=[{"role": "user", "content": LONG}])
        waiting = asyncio.ensure_future(prepared(tokens, slow))
        await asyncio.sleep(0)  # it begins
        assert await prepared(tokens, request(CHAT, messages=HI)) is not None
        assert not waiting.done()
        assert await waiting is None
        assert misses(tokens) == {"slow": 1}


async def test_only_so_many_wait(slow_model, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    monkeypatch.setattr(module, "MAX_SECONDS", 0.5)
    async with running(slow_model) as tokens:
        asks = [{"role": "user", "content": f"{number} {LONG}"} for number in range(10)]
        found = await asyncio.gather(
            *(prepared(tokens, request(CHAT, messages=[ask])) for ask in asks)
        )
        assert found == [None] * 10
        assert misses(tokens)["busy"] == 7
        assert await prepared(tokens, request(COMPLETION, prompt="Hi")) is not None


async def test_who_gives_up_waiting_leaves_nothing_behind(slow_model):
    async with running(slow_model) as tokens:
        waiting = [
            asyncio.ensure_future(
                prepared(tokens, request(CHAT, messages=[{"role": "user", "content": LONG}]))
            )
            for _ in range(module.MAX_WAITING)
        ]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert await asyncio.gather(*waiting, return_exceptions=True)
        assert await prepared(tokens, request(COMPLETION, prompt=LONG)) is not None
        assert misses(tokens) == {}


# The pods' own tokenizer


class Pod:
    """Answers /tokenize as it is told."""

    def __init__(self, status: int = 200, answer: bytes = b'{"count":2,"tokens":[7,8]}') -> None:
        self.status = status
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.headers.append(request.headers.get("authorization"))
        return web.Response(status=self.status, body=self.answer, content_type="application/json")


@asynccontextmanager
async def listening(pod: Pod) -> AsyncIterator[str]:
    app = web.Application(client_max_size=MAX_BYTES)
    app.router.add_post("/tokenize", pod.tokenize)
    async with TestServer(app) as server:
        yield f"127.0.0.1:{server.port}"


async def test_pods_are_asked_for_what_the_client_asked():
    async with listening(pod := Pod()) as address, running("pods", address) as tokens:
        asked = of_bytes(
            CHAT,
            json.dumps({"messages": HI, "documents": [{"text": "d"}], "model": "adapter"}).encode(),
            authorization="Bearer key",
        )
        assert await prepared(tokens, asked) == [7, 8]
        assert await prepared(tokens, request(COMPLETION, prompt="a")) == [7, 8]
    assert pod.asked == [
        {
            "messages": HI,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "chat_template_kwargs": {"documents": [{"text": "d"}]},
        },
        {"prompt": "a", "add_special_tokens": True},
    ]
    assert pod.headers == ["Bearer key", None]


async def test_very_long_prompts_and_answers():
    answer = json.dumps({"tokens": list(range(100_000))}).encode()
    async with listening(Pod(answer=answer)) as address, running("pods", address) as tokens:
        assert await prepared(tokens, request(COMPLETION, prompt="a" * 400_000)) == list(
            range(100_000)
        )


async def test_another_pod_is_asked_where_one_fails(unused_tcp_port):
    async with (
        listening(bad := Pod(500)) as first,
        listening(good := Pod()) as second,
        running("pods", f"127.0.0.1:{unused_tcp_port}", first, second) as tokens,
    ):
        found = [
            await prepared(tokens, request(COMPLETION, prompt=f"{number}")) for number in range(6)
        ]
    assert found.count([7, 8]) == len(good.asked) == 4  # all but those of two bad ones in turn
    assert len(bad.asked) == 4
    assert misses(tokens) == {"failed": 2}


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (Pod(400), "template"),
        (Pod(404), "failed"),
        (Pod(answer=b"{}"), "failed"),
        (Pod(answer=b"not JSON"), "failed"),
        (Pod(answer=b'{"tokens":7}'), "form"),
        (Pod(answer=b'{"tokens":["a"]}'), "form"),
    ],
)
async def test_pods_that_give_no_tokens(pod, reason):
    async with listening(pod) as address, running("pods", address) as tokens:
        assert await prepared(tokens, request(COMPLETION, prompt="a")) is None
        assert misses(tokens) == {reason: 1}


async def test_an_empty_pool_gives_no_tokens():
    async with running("pods") as tokens:
        assert await prepared(tokens, request(COMPLETION, prompt="a")) is None
        assert misses(tokens) == {"failed": 1}


# Settings


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", r"prefix\.tokenizer: there is no model at './nowhere'"),
        ("no-such-model", r"prefix\.tokenizer: there is no model 'no-such-model' here"),
    ],
)
async def test_a_tokenizer_that_there_is_not_is_told_by_its_setting(name, words):
    tokens = Tokens(Pool("test"), config.Prefix(mode="events", tokenizer=name))
    with pytest.raises(ConfigError, match=words):
        await tokens.start()
    await tokens.stop()


WITHOUT = """
import asyncio, sys

for name in ("tokenizers", "jinja2", "huggingface_hub", "torch", "gguf", "worker"):
    sys.modules[name] = None

from picker import config
from picker.pool import Pool
from picker.prefix.tokens import Tokens

for name in ("pods", "simulated", "smollm2-135m"):
    asyncio.run(Tokens(Pool("test"), config.Prefix(tokenizer=name)).start())
"""


def test_the_picker_starts_without_what_only_tokens_need():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("picker.document.ConfigError: prefix.tokenizer: 'smollm2-135m' needs")
    assert "pip install 'warmpath[events]'" in last
