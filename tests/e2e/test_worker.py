"""The real thing: SmolLM2 behind the command, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.worker.process import Worker, running_worker
from tests.worker.subscriber import KVSubscriber

GREEDY = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())
MODEL = "smollm2-135m"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    async with running_worker("--model", MODEL, "--max-model-len", "2048") as worker:
        yield worker
        assert await worker.stop() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(worker: Worker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="-") as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def greedy(client: openai.AsyncOpenAI, case: dict[str, object]) -> str:
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    common = {"model": MODEL, "max_tokens": 32, "temperature": 0, "extra_body": extra}
    if "messages" in case:
        chat = await client.chat.completions.create(messages=case["messages"], **common)
        return chat.choices[0].message.content
    completion = await client.completions.create(prompt=case["prompt"], **common)
    return completion.choices[0].text


async def test_greedy_answers_are_those_of_the_reference(client: openai.AsyncOpenAI):
    expected = [case["text"] for case in GREEDY["prompts"]]
    cold = await asyncio.gather(*(greedy(client, case) for case in GREEDY["prompts"]))
    warm = await asyncio.gather(*(greedy(client, case) for case in GREEDY["prompts"]))
    assert cold == expected
    assert warm == expected


async def test_a_chat_streams_and_reports_its_usage(client: openai.AsyncOpenAI):
    messages = [{"role": "user", "content": "Name three colours."}]
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert GREEDY["prompts"][4]["text_without_special_tokens"].startswith(text)
    assert chunks[-1].usage.prompt_tokens == 34
    assert chunks[-1].usage.completion_tokens == 24


async def test_a_second_turn_finds_the_first_one_cached(client: openai.AsyncOpenAI):
    messages = [{"role": "user", "content": "Tell me about the sea. " * 12}]
    first = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40)
    assert first.usage.prompt_tokens_details.cached_tokens < 32  # the system prompt at most
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "And the sky?"})
    second = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    prompt = first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= prompt - prompt % 16


async def test_prompt_logprobs_as_an_evaluation_harness_asks_for_them(client: openai.AsyncOpenAI):
    case = GREEDY["prompts"][0]
    ids = case["prompt_ids"] + case["new_ids"][:2]
    answer = await client.completions.create(
        model=MODEL, prompt=[ids], max_tokens=1, temperature=0, logprobs=2, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:5] == ["The", " capital", " of", " France", " is"]
    assert logprobs.token_logprobs[0] is None
    for token, logprob, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[5:7]:
        assert max(top.values()) == logprob, f"{token!r} was the greedy choice"


async def test_events_tell_what_the_worker_holds(worker: Worker, client: openai.AsyncOpenAI):
    case = GREEDY["prompts"][1]
    ids = case["prompt_ids"] * 4
    await client.completions.create(model=MODEL, prompt=ids, max_tokens=1)
    prefix = tuple(ids[:16])
    with KVSubscriber(worker.events_endpoint, worker.replay_endpoint) as subscriber:

        def knows_the_prefix(subscriber: KVSubscriber) -> bool:
            return any(b.parent is None and b.tokens == prefix for b in subscriber.blocks.values())

        await asyncio.to_thread(subscriber.poll_until, knows_the_prefix)
        await client.completions.create(model=MODEL, prompt=ids[::-1], max_tokens=1)
        await asyncio.to_thread(subscriber.poll_until, lambda s: s.topics)
        assert subscriber.topics == {f"kv@{worker.url.removeprefix('http://')}@{MODEL}"}
