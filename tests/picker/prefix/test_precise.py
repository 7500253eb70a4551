"""Prompts matched with what pods tell: real publishers, and the byte tokenizer."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from picker.config import EndpointSpec, EventSource, Prefix
from picker.document import ConfigError
from picker.pool import Endpoint, Pool
from picker.prefix import precise
from picker.prefix.match import By, Match
from picker.prefix.precise import EventsPrefix
from picker.request import LLMRequest, parse
from tests.picker.prefix.publishers import BLOCK_SIZE, Pod, prompt, stored
from tests.picker.waiting import until

ADDRESSES = ["127.0.0.1:8001", "127.0.0.1:8002"]
SETTINGS = Prefix(mode="events", tokenizer="simulated", block_bytes=64)
LONG = prompt(50)  # 12 blocks of 16 tokens, which is what pods are thought to have until they tell


class Picker:
    """A pool whose pods publish, and the producer."""

    def __init__(self) -> None:
        self.pool = Pool("test")
        self.prefix = EventsPrefix(self.pool, SETTINGS)

    def follow(self, *sources: EventSource) -> list[Endpoint]:
        """The pool has an endpoint for each of these."""
        addresses = ADDRESSES[: len(sources)]
        self.pool.update(
            [
                EndpointSpec(address=address, events=[source])
                for address, source in zip(addresses, sources, strict=True)
            ]
        )
        return [self.pool.endpoints[address] for address in addresses]

    def match(self, ids: list[int], **fields: Any) -> Match:
        request = asked(ids, **fields)
        assert self.prefix.prepare(request) is None
        return self.prefix.match(request)

    async def knows(self, endpoint: Endpoint, blocks: int) -> None:
        """Wait until an endpoint is known to hold so many blocks of `prompt`."""
        await until(lambda: self.match(LONG).blocks[endpoint.slot] == blocks)


def asked(given: Any, **fields: Any) -> LLMRequest:
    body = json.dumps({"model": "m", "prompt": given, **fields}).encode()
    return parse("POST", "/v1/completions", {}, body)


@asynccontextmanager
async def running() -> AsyncIterator[Picker]:
    picker = Picker()
    await picker.prefix.start()
    try:
        yield picker
    finally:
        await picker.prefix.stop()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    async with running() as picker:
        yield picker


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


async def test_what_a_pod_tells_is_predicted(picker: Picker) -> None:
    async with Pod() as one, Pod() as two:
        one.lose(stored(0, 3))
        two.lose(stored(0, 1))
        first, second = picker.follow(one.source, two.source)
        await picker.knows(first, 3)
        await picker.knows(second, 1)
        match = picker.match(prompt(5))
        assert (match.by, match.num_blocks) == (By.EVENTS, 5)
        assert match.cached[[first.slot, second.slot]].tolist() == [12, 4]
        assert match.tokens[[first.slot, second.slot]].tolist() == [12, 4]
        assert match.by_of(first.slot) is By.EVENTS


async def test_of_a_whole_prompt_the_last_block_is_computed_again(picker: Picker) -> None:
    async with Pod() as pod:
        pod.lose(stored(0, 3))
        (endpoint,) = picker.follow(pod.source)
        await picker.knows(endpoint, 3)
        assert picker.match(prompt(3)).cached[endpoint.slot] == 2 * BLOCK_SIZE
        assert picker.match([*prompt(3), 1]).cached[endpoint.slot] == 3 * BLOCK_SIZE


async def test_a_text_is_matched_by_its_tokens(picker: Picker) -> None:
    text = "Sixteen letters!"
    tokens = list(text.encode())
    async with Pod() as pod:
        pod.lose(stored(0, 4) | {"token_ids": tokens})
        (endpoint,) = picker.follow(pod.source)
        await until(lambda: picker.match([*tokens, 1]).blocks[endpoint.slot] == 4)
        request = asked(text + " And more.")
        waiting = picker.prefix.prepare(request)
        if waiting is not None:
            await waiting()
        match = picker.prefix.match(request)
        assert (match.by, match.cached[endpoint.slot]) == (By.EVENTS, 16)


async def test_an_adapters_and_a_salts_blocks_are_their_own(picker: Picker) -> None:
    async with Pod() as pod:
        pod.lose(
            stored(0, 3, lora_id=1, lora_name="pirate", extra_keys=[["pirate"]] * 3),
            stored(0, 2, extra_keys=[["pepper"], None]) | {"block_hashes": [1, 2]},
        )
        (endpoint,) = picker.follow(pod.source)
        await until(lambda: picker.match(LONG, model="pirate").blocks[endpoint.slot] == 3)
        assert picker.match(LONG, cache_salt="pepper").blocks[endpoint.slot] == 2
        for fields in ({}, {"model": "other"}, {"model": "pirate", "cache_salt": "pepper"}):
            assert picker.match(LONG, **fields).blocks[endpoint.slot] == 0


async def test_a_pick_counts_until_the_pod_tells(picker: Picker) -> None:
    async with Pod() as one, Pod() as two:
        first, second = picker.follow(one.source, two.source)
        await picker.prefix.first_round()
        match = picker.match(LONG)
        use = picker.prefix.learn(match, first)
        assert picker.match(LONG).blocks[[first.slot, second.slot]].tolist() == [12, 0]
        assert picker.match(prompt(8)).cached[first.slot] == 16
        # It is served by the other, which held nothing of it, and holds it from now on.
        assert picker.prefix.moved(use, first, second) == (0, 0)
        again = picker.match(LONG)
        assert again.blocks[second.slot] == 12
        use = picker.prefix.learn(again, first)
        assert picker.prefix.moved(use, first, second) == (12, 192)


async def test_the_first_round_is_over_when_all_have_told(picker: Picker) -> None:
    async with Pod() as one, Pod() as two:
        for pod in (one, two):
            for block in range(20):
                pod.lose(stored(block, block + 1))
        endpoints = picker.follow(one.source, two.source)
        await picker.prefix.first_round()
        for endpoint in endpoints:
            assert picker.match(LONG).blocks[endpoint.slot] == 20


async def test_the_first_round_does_not_wait_for_ever_and_says_for_whom(
    picker: Picker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precise, "FIRST_ROUND", 0.2)
    async with Pod() as telling:
        picker.follow(telling.source, EventSource(address=free_address()))
        await picker.prefix.first_round()
    (said,) = [each.message for each in caplog.records if "did not come" in each.message]
    assert "KV events of 1 pods" in said
    assert ADDRESSES[1] in said


async def test_a_pod_that_tells_nothing_is_matched_by_what_was_sent_to_it(
    picker: Picker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precise, "FIRST_ROUND", 0.2)
    address = free_address()
    async with Pod() as one:
        telling, silent = picker.follow(one.source, EventSource(address=address))
        await picker.prefix.first_round()
        match = picker.match(LONG)
        use = picker.prefix.learn(match, silent)
        again = picker.match([*LONG, 1])
        assert again.by_of(silent.slot) is By.APPROXIMATE
        assert again.by_of(telling.slot) is By.EVENTS
        assert 100 < again.cached[silent.slot] <= 200
        assert 6 < again.blocks[silent.slot] <= 12
        assert again.cached[telling.slot] == 0
        # Served by the other, it is no longer thought to be here, but there.
        assert picker.prefix.moved(use, silent, telling) == (0, 0)
        moved = picker.match(LONG)
        assert moved.cached[silent.slot] == 0
        assert moved.blocks[telling.slot] == 12
        async with Pod(live=address) as two:
            two.lose(stored(0, 1))
            await two.publish(stored(1, 2))
            await two.subscribed()
            await two.publish(stored(0, 3))
            await picker.knows(silent, 3)
            assert picker.match(LONG).by_of(silent.slot) is By.EVENTS


async def test_without_tokens_bytes_are_matched(picker: Picker) -> None:
    async with Pod() as pod:
        (endpoint,) = picker.follow(pod.source)
        await picker.prefix.first_round()
        request = asked("Words. " * 50, truncate_prompt_tokens=10)
        assert picker.prefix.prepare(request) is None
        match = picker.prefix.match(request)
        assert match.by is By.APPROXIMATE
        picker.prefix.learn(match, endpoint)
        assert picker.prefix.match(request).cached[endpoint.slot] > 50
        assert picker.prefix.tokens.missed["form"] == 1


async def test_without_a_prompt_nothing_is_matched(picker: Picker) -> None:
    request = parse("GET", "/v1/models", {}, b"")
    assert picker.prefix.prepare(request) is None
    assert picker.prefix.match(request).by is By.NONE


async def test_a_tokenizer_that_is_not_there_is_an_error() -> None:
    prefix = EventsPrefix(Pool("test"), Prefix(mode="events", tokenizer="/nowhere/model.gguf"))
    with pytest.raises(ConfigError, match=r"prefix\.tokenizer: .*'/nowhere/model\.gguf'"):
        await prefix.start()
    await prefix.stop()
