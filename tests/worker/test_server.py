"""What a user of the API gets, through the official client where it can say it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.worker.api import ALIAS, END, MODEL, ScriptedRunner, serving

DATA = Path(__file__).parents[1] / "data"
HELLO: Any = [{"role": "user", "content": "Hello"}]
HELLO_IDS = [257, *b"user\nHello", END, 10, 257, *b"assistant\n"]


async def test_chat() -> None:
    async with serving(ScriptedRunner("Hi there")) as api:
        answer = await api.client.chat.completions.create(model=MODEL, messages=HELLO)
    choice = answer.choices[0]
    assert choice.message.content == "Hi there"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(HELLO_IDS)
    assert answer.usage.completion_tokens == len("Hi there") + 1  # and the end itself
    assert answer.usage.total_tokens == len(HELLO_IDS) + 9


async def test_chat_stream() -> None:
    async with serving(ScriptedRunner("Hi there")) as api:
        stream = await api.client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in body[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "Hi there"
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons == [None] * (len(body) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in body)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(HELLO_IDS)
    assert last.usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_and_its_stream_agree() -> None:
    async with serving() as api:
        whole = await api.client.completions.create(
            model=MODEL, prompt="Once", max_tokens=40, seed=7
        )
        stream = await api.client.completions.create(
            model=MODEL, prompt="Once", max_tokens=40, seed=7, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert len(whole.choices[0].text) > 0
    assert text == whole.choices[0].text


async def test_default_lengths() -> None:
    async with serving(ScriptedRunner("x" * 600)) as api:
        completion = await api.client.completions.create(model=MODEL, prompt="a")
        chat = await api.client.chat.completions.create(model=MODEL, messages=HELLO)
        short = await api.client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, max_completion_tokens=3
        )
    assert completion.choices[0].text == "x" * 16
    assert len(chat.choices[0].message.content or "") == 512 - len(HELLO_IDS)  # the context
    assert chat.choices[0].finish_reason == "length"
    assert short.choices[0].message.content == "xxx"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
async def test_prompt_forms(prompt: Any, texts: list[str]) -> None:
    async with serving() as api:
        answer = await api.ok("/v1/completions", prompt=prompt, max_tokens=0, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert answer["usage"]["completion_tokens"] == 0


async def test_several_answers_are_ordered_by_prompt_and_counted_once() -> None:
    async with serving() as api:
        ask = {"prompt": ["aa", "bb"], "n": 3, "max_tokens": 4, "seed": 5, "echo": True}
        answer = await api.ok("/v1/completions", **ask)
        chunks = await api.events("/v1/completions", **ask)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [text[:2] for text in texts] == ["aa"] * 3 + ["bb"] * 3
    assert len(set(texts)) == 6  # each has a seed of its own
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 24
    streamed = [""] * 6
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


async def test_a_seed_repeats_an_answer() -> None:
    async with serving() as api:
        ask = {"prompt": "x", "max_tokens": 20, "seed": 3}
        first = await api.ok("/v1/completions", **ask)
        again = await api.ok("/v1/completions", **ask)
        other = await api.ok("/v1/completions", **{**ask, "seed": 4})
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert first["choices"][0]["text"] != other["choices"][0]["text"]


async def test_cached_tokens_and_what_separates_caches() -> None:
    async def cached(**body: object) -> int:
        answer = await api.ok("/v1/completions", max_tokens=2, **body)
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    prompt = "x" * 100
    async with serving() as api:
        assert await cached(prompt=prompt) == 0
        assert await cached(prompt=prompt) == 96
        assert await cached(prompt=prompt, n=3) == 96
        assert await cached(prompt=[prompt, prompt]) == 192
        assert await cached(prompt=prompt, cache_salt="a") == 0
        assert await cached(prompt=prompt, cache_salt="a") == 96
        assert await cached(prompt=prompt, cache_salt="b") == 0
        await api.until_idle()
        assert await api.ok("/reset_prefix_cache") == {"success": True}
        assert await cached(prompt=prompt, n=3) == 0


async def test_scoring_a_prompt_as_evaluation_harnesses_do() -> None:
    """lm-evaluation-harness: token ids, echo, logprobs; it sums `token_logprobs[context:-1]`."""
    ask = {"echo": True, "temperature": 0, "seed": 1234, "logprobs": 1}
    async with serving(ScriptedRunner("zz")) as api:
        one = await api.ok("/v1/completions", prompt=[[97, 98, 99]], max_tokens=1, **ask)
        none = await api.ok("/v1/completions", prompt="abc", max_tokens=0, **ask)
    half = math.log(0.5)
    scores = one["choices"][0]["logprobs"]
    assert scores["tokens"] == ["a", "b", "c", "z"]
    assert scores["token_logprobs"] == [None, half, half, half]
    assert scores["text_offset"] == [0, 1, 2, 3]
    assert scores["top_logprobs"] == [None, {"b": half}, {"c": half}, {"z": half}]
    assert one["choices"][0]["text"] == "abcz"
    without_answer = {key: values[:3] for key, values in scores.items()}
    assert none["choices"][0]["logprobs"] == without_answer
    assert none["choices"][0]["text"] == "abc"
    assert none["choices"][0]["finish_reason"] == "length"


async def test_an_echo_streams_as_it_reads_whole() -> None:
    ask = {"prompt": "abc", "max_tokens": 6, "logprobs": 1, "echo": True, "ignore_eos": True}
    async with serving(ScriptedRunner("zz")) as api:
        whole = (await api.ok("/v1/completions", **ask))["choices"][0]
        chunks = await api.events("/v1/completions", **ask)
        alone = await api.events("/v1/completions", prompt="abc", max_tokens=0, echo=True)
    scores: dict[str, list[Any]] = {key: [] for key in whole["logprobs"]}
    for chunk in chunks:
        for key, values in chunk["choices"][0]["logprobs"].items():
            scores[key] += values
    assert scores == whole["logprobs"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"] == "abczzzz"
    assert scores["tokens"] == [*"abczz", "<|im_end|>", *"zz", "<|im_end|>"]
    assert scores["text_offset"] == [0, 1, 2, 3, 4, 5, 5, 6, 7]  # a hidden token has no text
    assert "".join(chunk["choices"][0]["text"] for chunk in alone) == "abc"


async def test_completion_logprobs() -> None:
    async with serving(ScriptedRunner("bé")) as api:
        ask = {"prompt": "a", "max_tokens": 3, "logprobs": 3}
        answer = await api.ok("/v1/completions", **ask)
        chunks = await api.events("/v1/completions", **ask)
        bare = await api.ok("/v1/completions", prompt="a", max_tokens=1, logprobs=0)
        ids = await api.ok(
            "/v1/completions",
            prompt="a",
            max_tokens=1,
            logprobs=1,
            return_tokens_as_token_ids=True,
        )
    scores = answer["choices"][0]["logprobs"]
    assert scores["top_logprobs"][0] == {
        "b": math.log(0.5),
        "a": math.log(0.25),
        "\0": -9999.0,  # cannot happen; JSON has no infinity
    }
    assert scores["text_offset"] == [0, 1, 1]  # both bytes of é belong to the second character
    joined = {key: [] for key in scores}
    for chunk in chunks:
        for key, values in chunk["choices"][0]["logprobs"].items():
            joined[key] += values
    assert joined == scores
    assert bare["choices"][0]["logprobs"]["top_logprobs"] == [{"b": math.log(0.5)}]
    assert ids["choices"][0]["logprobs"]["tokens"] == ["token_id:98"]


async def test_chat_logprobs() -> None:
    async with serving(ScriptedRunner("hé")) as api:
        answer = await api.client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
        )
        events = await api.events(
            "/v1/chat/completions", messages=HELLO, logprobs=True, max_tokens=3
        )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [entry.bytes for entry in content] == [[0x68], [0xC3], [0xA9]]
    assert content[0].token == "h"
    assert [top.token for top in content[0].top_logprobs] == ["h", "g"]
    assert [top.logprob for top in content[0].top_logprobs] == [math.log(0.5), math.log(0.25)]
    streamed = [
        entry
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["bytes"] for entry in streamed] == [[0x68], [0xC3], [0xA9]]
    assert all(entry["top_logprobs"] == [] for entry in streamed)


async def test_prompt_logprobs() -> None:
    async with serving() as api:
        answer = await api.ok("/v1/completions", prompt="ab", prompt_logprobs=1, max_tokens=1)
        chat = await api.ok("/v1/chat/completions", messages=HELLO, prompt_logprobs=0, max_tokens=1)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {"98": {"logprob": 0.0, "rank": 1, "decoded_token": "b"}}
    assert len(chat["prompt_logprobs"]) == len(HELLO_IDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "text", "stop_reason", "tokens"),
    [
        ({"stop": "lo w"}, "hel", "lo w", 7),
        ({"stop": ["zzz", "wor", "world"]}, "hello ", "wor", 9),
        ({"stop": ["o"], "include_stop_str_in_output": True}, "hello", "o", 5),
        ({"stop": ["l"], "min_tokens": 5}, "hello wor", "l", 10),
        ({"stop_token_ids": [ord("w")]}, "hello ", ord("w"), 7),
        ({"stop_token_ids": [ord("w")], "include_stop_str_in_output": True}, "hello w", 119, 7),
        ({"stop": "worlds"}, "hello world", None, 12),  # held back, but never complete
        ({"stop_token_ids": [END]}, "hello world", None, 12),  # the model's own end
    ],
)
async def test_stops(
    ask: dict[str, Any], text: str, stop_reason: object, tokens: int, stream: bool
) -> None:
    ask = {"prompt": "a", "max_tokens": 50, **ask}
    async with serving(ScriptedRunner("hello world")) as api:
        if stream:
            *chunks, last = await api.events(
                "/v1/completions", **ask, stream_options={"include_usage": True}
            )
            choices = [chunk["choices"][0] for chunk in chunks]
            usage = last["usage"]
        else:
            answer = await api.ok("/v1/completions", **ask)
            choices, usage = answer["choices"], answer["usage"]
        await api.until_idle()
        page = (await api.get("/metrics"))[1].decode()
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == stop_reason
    assert usage["completion_tokens"] == tokens
    assert re.search(r'request_success_total{.*finished_reason="stop".*} 1.0', page)


async def test_ignore_eos() -> None:
    async with serving(ScriptedRunner("ab")) as api:
        answer = await api.ok("/v1/completions", prompt="x", max_tokens=7, ignore_eos=True)
        shown = await api.ok(
            "/v1/completions",
            prompt="x",
            max_tokens=3,
            ignore_eos=True,
            skip_special_tokens=False,
        )
        stopped = await api.ok("/v1/completions", prompt="x", ignore_eos=True, stop_token_ids=[END])
    assert answer["choices"][0]["text"] == "ababa"
    assert answer["usage"]["completion_tokens"] == 7
    assert shown["choices"][0]["text"] == "ab<|im_end|>"
    assert stopped["choices"][0]["stop_reason"] == END


async def test_min_tokens_puts_off_the_end() -> None:
    async with serving(ScriptedRunner("ab")) as api:
        answer = await api.ok("/v1/completions", prompt="x", min_tokens=4, max_tokens=10)
    assert answer["choices"][0]["text"] == "abab"


async def test_streams_never_break_a_character() -> None:
    text = "Grüße, 世界 🎉"
    async with serving(ScriptedRunner(text)) as api:
        chunks = await api.events("/v1/completions", prompt="x", max_tokens=50)
        cut = await api.ok("/v1/completions", prompt="x", max_tokens=len("Gr") + 1)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert cut["choices"][0]["text"] == "Gr\N{REPLACEMENT CHARACTER}"  # nothing more will come


async def test_token_ids() -> None:
    async with serving(ScriptedRunner("hé")) as api:
        ask = {"messages": HELLO, "return_token_ids": True}
        answer = await api.ok("/v1/chat/completions", **ask)
        chunks = await api.events("/v1/chat/completions", **ask)
        completion = await api.ok("/v1/completions", prompt="ab", return_token_ids=True)
        events = await api.events("/v1/completions", prompt="ab", return_token_ids=True)
        rendered = await api.ok("/v1/chat/completions/render", messages=HELLO)
        (rendered_completion,) = await api.ok("/v1/completions/render", prompt="ab")
    output = [*"hé".encode(), END]
    assert answer["prompt_token_ids"] == HELLO_IDS
    assert answer["choices"][0]["token_ids"] == output
    assert chunks[0]["prompt_token_ids"] == HELLO_IDS
    streamed = [chunk["choices"][0].get("token_ids") or [] for chunk in chunks]
    assert [token for ids in streamed for token in ids] == output
    assert completion["choices"][0]["prompt_token_ids"] == [97, 98]
    assert completion["choices"][0]["token_ids"] == output
    assert events[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert rendered["token_ids"] == HELLO_IDS
    assert rendered_completion["token_ids"] == [97, 98]
    assert rendered_completion["sampling_params"]["max_tokens"] == 16


async def test_usage_on_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(ScriptedRunner("abc")) as api:
        *chunks, last = await api.events("/v1/completions", prompt="x", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_in_streams_unless_asked(options: object) -> None:
    async with serving() as api:
        chunks = await api.events("/v1/completions", prompt="x", stream_options=options)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_chats_reach_the_model_through_its_template() -> None:
    async def prompt_of(**ask: object) -> str:
        rendered = await api.ok("/v1/chat/completions/render", **ask)
        return bytes(i for i in rendered["token_ids"] if i < 256).decode()

    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    answer_begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    async with serving(ScriptedRunner("yes")) as api:
        assert await prompt_of(messages=HELLO) == "user\nHello\nassistant\n"
        assert await prompt_of(messages=HELLO, add_generation_prompt=False) == "user\nHello\n"
        assert "Hel\nlo" in await prompt_of(messages=[{"role": "user", "content": parts}])
        assert "weather" in await prompt_of(messages=HELLO, tools=[tool], tool_choice="auto")
        going_on = {"messages": answer_begun, "continue_final_message": True}
        assert (await prompt_of(**going_on)).endswith("assistant\nWell, ")
        answer = await api.ok("/v1/chat/completions", **going_on, echo=True)
        chunks = await api.events("/v1/chat/completions", **going_on, echo=True)
        as_user = await api.ok("/v1/chat/completions", messages=HELLO, add_generation_prompt=False)
    assert answer["choices"][0]["message"]["content"] == "Well, yes"
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Well, yes"
    assert as_user["choices"][0]["message"]["role"] == "user"


async def test_tokenize_and_detokenize() -> None:
    async with serving() as api:
        answer = await api.ok("/tokenize", model=MODEL, prompt="Hé", return_token_strs=True)
        chat = await api.ok("/tokenize", messages=HELLO)
        text = await api.ok("/detokenize", tokens=answer["tokens"])
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [*"Hé".encode()],
        "token_strs": ["<0x48>", "<0xC3>", "<0xA9>"],
    }
    assert chat["tokens"] == HELLO_IDS
    assert text == {"prompt": "Hé"}


async def test_a_large_text_is_tokenised_like_a_small_one() -> None:
    async with serving() as api:
        text = "<|im_end|>" * 480 + "abc"  # long enough for a thread, short enough for the model
        answer = await api.ok("/tokenize", prompt=text)
        completion = await api.ok("/v1/completions", prompt=text)
    assert answer["tokens"] == [END] * 480 + [97, 98, 99]
    assert completion["usage"]["prompt_tokens"] == 483


async def test_models_and_aliases() -> None:
    async with serving() as api:
        listed = await api.client.models.list()
        status, body = await api.get("/v1/models")
        answer = await api.ok("/v1/completions", model=ALIAS, prompt="x")
        unnamed = await api.ok("/v1/completions", prompt="x")
    assert [model.id for model in listed.data] == [MODEL, ALIAS]
    assert status == 200
    assert [card["max_model_len"] for card in json.loads(body)["data"]] == [512, 512]
    assert answer["model"] == ALIAS
    assert unnamed["model"] == MODEL


async def test_operations() -> None:
    async with serving() as api:
        assert await api.get("/health") == (200, b"")
        assert await api.get("/ping") == (200, b"")
        assert (await api.get("/ready"))[0] == 503  # nothing has warmed it up
        assert await api.get("/load") == (200, b'{"server_load":0}')
        assert (await api.get("/version"))[1].startswith(b'{"version":"')
        sources = json.loads((await api.get("/kv_event_sources"))[1])
        assert sources == {"0": {"endpoint": "tcp://127.0.0.1:5557"}}
        await api.ok("/v1/completions", prompt="x")
        await api.get("/no/such/path")
        status, page = await api.get("/metrics")
    text = page.decode()
    assert status == 200
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in text
    assert "no/such/path" not in text
    assert 'handler="/health"' not in text


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [
        ("trace-1.2:3", None, "cmpl-trace-1.2:3"),
        (None, "mine", "cmpl-mine"),
        ("a b\té<script>" + "x" * 200, None, "cmpl-abscript" + "x" * 120),
    ],
)
async def test_request_ids(header: str | None, field: str | None, expected: str) -> None:
    async with serving() as api:
        headers = {} if header is None else {"X-Request-Id": header}
        body = {"prompt": "x", "request_id": field}
        status, answer = await api.post("/v1/completions", body, headers)
    assert status == 200
    assert answer["id"] == expected


def keys(value: object) -> object:
    """The names in a JSON value, at every depth."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value else []
    return None


def recorded_events(name: str) -> list[Any]:
    lines = (DATA / name).read_text().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_answers_have_the_fields_of_vllms() -> None:
    recorded = json.loads((DATA / "vllm_responses.json").read_text())
    async with serving() as api:
        for name, answer in recorded.items():
            request = answer["request"]
            ours = await api.ok(request["path"], **(request["body"] | {"model": MODEL}))
            assert keys(ours) == keys(answer["response"]), name


async def test_chunks_have_the_fields_of_vllms() -> None:
    async with serving(ScriptedRunner("abcdef")) as api:
        chat = await api.events(
            "/v1/chat/completions", messages=HELLO, stream_options={"include_usage": True}
        )
        completion = await api.events("/v1/completions", prompt="x", max_tokens=3)
    recorded = recorded_events("vllm_chat_stream.txt")
    del recorded[-1]["usage"]["prompt_tokens_details"]["created_cache_tokens"]  # not known here
    assert keys(chat[0]) == keys(recorded[0])
    assert {str(keys(c)) for c in chat[1:-2]} <= {str(keys(recorded[1]))}
    assert keys(chat[-2]) == keys(recorded[-2])
    assert keys(chat[-1]) == keys(recorded[-1])
    recorded = recorded_events("vllm_completion_stream.txt")
    assert {str(keys(c)) for c in completion[:-1]} <= {str(keys(recorded[0]))}
    assert keys(completion[-1]) == keys(recorded[-1])
