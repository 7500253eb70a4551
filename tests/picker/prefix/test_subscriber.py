"""Pods followed over real sockets: what they hold is known, whatever happens to them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from picker.config import EndpointSpec, Events, EventSource, Prefix
from picker.pool import Endpoint, Pool
from picker.prefix.events import MAX_PAYLOAD
from picker.prefix.index import BlockIndex, TokenPrompt
from picker.prefix.subscriber import Subscriptions
from picker.prefix.subscription import AFRESH, AT_ONCE, REPLAY_IDLE, Subscription
from tests.picker.prefix.publishers import CLEARED, END, Pod, Server, prompt, removed, stored
from tests.picker.waiting import until
from worker.events import AllBlocksCleared, BlockRemoved, BlockStored, Publisher

ADDRESS = "127.0.0.1:8000"
FRAMES = json.loads((Path(__file__).parents[2] / "data" / "vllm_kv_frames.json").read_text())


class Picker:
    """A pool, the index, and what keeps it told."""

    def __init__(self, settings: Prefix) -> None:
        self.pool = Pool("test")
        self.index = BlockIndex(self.pool.capacity, 1 << 12)
        self.subscriptions = Subscriptions(self.pool, settings, self.index)

    def follow(self, *sources: EventSource, address: str = ADDRESS) -> Endpoint:
        """The pool has this endpoint alone, with the event sources that the file names."""
        self.pool.update([EndpointSpec(address=address, events=list(sources))])
        return next(iter(self.pool.endpoints.values()))

    async def subscription(self, endpoint: Endpoint, rank: int = 0) -> Subscription:
        await until(lambda: self.subscriptions.of(endpoint))
        return self.subscriptions.of(endpoint)[rank]

    def depth(self, endpoint: Endpoint, blocks: int = 100) -> int:
        """Leading blocks of `prompt` that an endpoint is known to hold."""
        tokens = np.array(prompt(blocks), np.uint32)
        return int(self.index.match(TokenPrompt(tokens)).blocks[endpoint.slot])


@asynccontextmanager
async def running(settings: Prefix) -> AsyncIterator[Picker]:
    picker = Picker(settings)
    await picker.subscriptions.start()
    try:
        yield picker
    finally:
        await picker.subscriptions.stop()


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    async with running(Prefix()) as picker:
        yield picker


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def skip_ahead(subscription: Subscription, seconds: float) -> None:
    """Let time pass."""
    subscription.tick(time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("with_topic", "end"),
    [
        (True, [b"", END, b""]),  # vLLM's, and ours
        (False, [END, b""]),  # vLLM's, before
        (True, [b"topic", (302).to_bytes(8, "big"), b""]),
        (False, [END, b"\x90"]),
        (False, [END]),
        (False, [b""]),
    ],
)
async def test_a_late_joiner_knows_all_that_is_cached(
    picker: Picker, with_topic: bool, end: list[bytes]
) -> None:
    async with Pod(with_topic=with_topic, end=end) as pod:
        for i in range(300):
            pod.lose(stored(i, i + 1))
        pod.lose(removed(299, 298))
        endpoint = picker.follow(pod.source)
        await until(lambda: picker.depth(endpoint, 300) == 298)
        await pod.subscribed()
        await pod.publish(stored(298, 300))
        await until(lambda: picker.depth(endpoint, 300) == 300)
        subscription = await picker.subscription(endpoint)
        assert subscription.connected
        assert (subscription.batches, subscription.events) == (302, 302)
        assert subscription.sequence.counts.gaps == 0
        assert subscription.malformed == 0


async def test_events_are_applied_as_they_come(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 2), stored(2, 5))
        await until(lambda: picker.depth(endpoint) == 5)
        await pod.publish(removed(3))
        await until(lambda: picker.depth(endpoint) == 3)
        await pod.publish(CLEARED)
        await until(lambda: picker.depth(endpoint) == 0)
        await pod.publish(stored(0, 1))
        await until(lambda: picker.depth(endpoint) == 1)


async def test_a_gap_is_filled(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 1))
        await until(lambda: picker.depth(endpoint) == 1)
        pod.lose(stored(1, 2))
        pod.lose(removed(1), stored(1, 3))
        await pod.publish(stored(3, 4))
        await until(lambda: picker.depth(endpoint) == 4)
        counts = (await picker.subscription(endpoint)).sequence.counts
        assert (counts.gaps, counts.forgotten, counts.restarts) == (1, 0, 0)


async def test_what_is_lost_at_the_end_is_asked_for_once_it_is_quiet(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 1))
        await until(lambda: picker.depth(endpoint) == 1)
        pod.lose(stored(1, 3))
        subscription = await picker.subscription(endpoint)
        await until(lambda: not subscription.sequence.replaying)
        skip_ahead(subscription, 1.5)
        await until(lambda: picker.depth(endpoint) == 3)


async def test_an_engine_that_restarts_in_place_holds_nothing(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 2))
        await pod.publish(stored(2, 3))
        await until(lambda: picker.depth(endpoint) == 3)
        pod.sent.clear()
        pod.next = 0
        await pod.publish(stored(0, 1))
        await until(lambda: picker.depth(endpoint) == 1)
        assert (await picker.subscription(endpoint)).sequence.counts.restarts == 1


async def test_another_process_is_found_without_a_word_of_it(picker: Picker) -> None:
    """It connects again, and what it replays is not what was told before."""
    pod = Pod()
    endpoint = picker.follow(pod.source)
    await pod.subscribed()
    await pod.publish(stored(0, 4))
    await until(lambda: picker.depth(endpoint) == 4)
    pod.close()
    subscription = await picker.subscription(endpoint)
    await until(lambda: not subscription.connected)
    async with Pod(pod.source.address, pod.source.replay) as another:
        another.lose(stored(0, 1))
        another.lose(stored(1, 2))
        await until(lambda: picker.depth(endpoint) == 2)
        await another.subscribed()
        await another.publish(stored(2, 3))
        await until(lambda: picker.depth(endpoint) == 3)


async def test_a_connection_lost_and_found_loses_nothing(picker: Picker) -> None:
    pod = Pod()
    endpoint = picker.follow(pod.source)
    await pod.subscribed()
    await pod.publish(stored(0, 4))
    await until(lambda: picker.depth(endpoint) == 4)
    pod.close()
    async with Pod(pod.source.address, pod.source.replay) as same:
        same.sent, same.next = pod.sent, pod.next
        same.lose(stored(4, 6))
        await until(lambda: picker.depth(endpoint) == 6)
        counts = (await picker.subscription(endpoint)).sequence.counts
        assert (counts.restarts, counts.forgotten) == (0, 0)


async def test_what_a_process_told_last_does_not_outlive_it(picker: Picker) -> None:
    """Its batches are read in one turn with the first one of the next process."""
    async with Pod() as pod:
        endpoint = picker.follow(EventSource(address=pod.source.address))
        subscription = await picker.subscription(endpoint)
        await pod.subscribed()
        for i in range(AT_ONCE):
            await pod.publish(stored(i, i + 1))
        pod.next = 0
        await pod.publish(stored(0, 1))
        await until(lambda: subscription.sequence.counts.restarts)
        await until(lambda: picker.depth(endpoint) > 0)
        assert picker.depth(endpoint) == 1


async def test_without_replays_a_gap_clears(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(EventSource(address=pod.source.address))
        pod.lose(stored(0, 1))
        await pod.subscribed()
        await pod.publish(stored(0, 3))
        await until(lambda: picker.depth(endpoint) == 3)
        pod.lose(removed(0))
        await pod.publish(stored(0, 1))
        await until(lambda: picker.depth(endpoint) == 1)
        assert pod.questions == []


async def test_a_pod_that_does_not_replay_goes_on_live(picker: Picker) -> None:
    async with Pod() as pod:
        pod.deaf = True
        endpoint = picker.follow(pod.source)
        subscription = await picker.subscription(endpoint)
        await until(lambda: pod.questions)
        await pod.subscribed()
        await pod.publish(stored(0, 2))
        await until(lambda: subscription.last_batch)
        skip_ahead(subscription, REPLAY_IDLE + 1)
        await until(lambda: picker.depth(endpoint) == 2)
        pod.lose(removed(1))
        await pod.publish(stored(0, 1))
        await until(lambda: subscription.sequence.counts.gaps)
        assert picker.depth(endpoint) == 2
        skip_ahead(subscription, REPLAY_IDLE + 1)
        await until(lambda: picker.depth(endpoint) == 1)
        assert subscription.sequence.counts.failed_replays == 2


async def test_a_replay_that_stops_is_taken_up_again(picker: Picker) -> None:
    async with Pod() as pod:
        for i in range(9):
            pod.lose(stored(i, i + 1))
        pod.stops_after = 4
        endpoint = picker.follow(pod.source)
        subscription = await picker.subscription(endpoint)
        await until(lambda: picker.depth(endpoint) == 4)
        skip_ahead(subscription, REPLAY_IDLE + 1)
        await until(lambda: picker.depth(endpoint) == 7)
        pod.stops_after = None
        skip_ahead(subscription, REPLAY_IDLE + 1)
        await until(lambda: picker.depth(endpoint) == 9)
        assert pod.questions == [0, 3, 6]


async def test_a_message_may_have_two_frames(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(EventSource(address=pod.source.address))
        await pod.subscribed()
        payload = msgspec.msgpack.encode([1.5, [stored(0, 2)]])
        await pod.send([(0).to_bytes(8, "big"), payload])
        await until(lambda: picker.depth(endpoint) == 2)


async def test_wrong_messages_cost_only_themselves(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 1))
        number = (1).to_bytes(8, "big")
        for frames in ([b"alone"], [b"topic", b"short", b"x"], [b"topic", number + b"x", b"x"]):
            await pod.send(frames)
        await pod.publish(["BlockStored"], stored(1, 2), {"type": "New"}, stored(2, 3))
        pod.lose()
        pod.sent[2] = b"\xc1"
        await pod.send([b"topic", (2).to_bytes(8, "big"), b"\xc1"])
        await pod.publish(stored(3, 4))
        await until(lambda: picker.depth(endpoint) == 4)
        subscription = await picker.subscription(endpoint)
        assert (subscription.malformed, subscription.unknown) == (5, 1)
        assert subscription.sequence.counts.gaps == 0


async def test_a_message_may_have_very_many_events(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 3000))
        await until(lambda: picker.depth(endpoint, 3000) == 3000)
        await pod.publish(*[removed(i) for i in range(2999, 0, -1)], stored(1, 2))
        await until(lambda: picker.depth(endpoint, 3000) == 2)


async def test_a_message_too_large_ends_the_connection_and_nothing_else(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        subscription = await picker.subscription(endpoint)
        await pod.subscribed()
        await until(lambda: subscription.connected)
        await pod.send([b"topic", (0).to_bytes(8, "big"), bytes(MAX_PAYLOAD + 1)])
        await pod.left()
        await until(lambda: not subscription.connected)
        skip_ahead(subscription, AFRESH + 1)
        await pod.subscribed()
        await pod.publish(stored(0, 2))
        await until(lambda: picker.depth(endpoint) == 2)


async def test_whose_events_they_are_is_known_by_the_socket(picker: Picker) -> None:
    other = "127.0.0.1:8001"
    async with (
        Pod(topic=f"kv@{other}@model".encode()) as one,
        Pod(topic=f"kv@{ADDRESS}@model".encode()) as two,
    ):
        picker.pool.update(
            [
                EndpointSpec(address=ADDRESS, events=[one.source]),
                EndpointSpec(address=other, events=[two.source]),
            ]
        )
        endpoints = list(picker.pool.endpoints.values())
        await one.subscribed()
        await two.subscribed()
        await one.publish(stored(0, 1))
        await two.publish(stored(0, 2))
        await until(lambda: [picker.depth(endpoint) for endpoint in endpoints] == [1, 2])


async def test_each_rank_is_followed(picker: Picker) -> None:
    async with Pod() as one, Pod() as two:
        endpoint = picker.follow(one.source, two.source)
        await one.subscribed()
        await two.subscribed()
        await one.publish(stored(0, 2))
        await two.publish(stored(0, 3))
        await until(lambda: picker.depth(endpoint) == 3)
        await two.publish(CLEARED)
        await until(lambda: picker.depth(endpoint) == 2)


async def test_a_pod_that_leaves_is_forgotten_and_heard_no_more(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 2))
        await until(lambda: picker.depth(endpoint) == 2)
        picker.pool.update([])
        assert picker.depth(endpoint) == 0
        assert picker.subscriptions.of(endpoint) == ()
        assert picker.index.stats.sources == 0
        await pod.left()
        again = picker.follow(pod.source)
        assert again.slot == endpoint.slot
        await until(lambda: picker.depth(again) == 2)


async def test_a_new_life_of_a_pod_is_followed_from_the_start(picker: Picker) -> None:
    async with Pod() as pod:
        endpoint = picker.follow(pod.source)
        await pod.subscribed()
        await pod.publish(stored(0, 2))
        await until(lambda: picker.depth(endpoint) == 2)
        again = picker.pool.restarted(endpoint)
        assert picker.depth(again) == 0
        await until(lambda: picker.depth(again) == 2)


async def test_a_pod_whose_events_come_from_elsewhere_now(picker: Picker) -> None:
    async with Pod() as one, Pod() as two:
        one.lose(stored(0, 1))
        two.lose(stored(0, 2))
        endpoint = picker.follow(one.source)
        await until(lambda: picker.depth(endpoint) == 1)
        again = picker.follow(two.source)
        assert not endpoint.alive
        await until(lambda: picker.depth(again) == 2)
        assert picker.follow(two.source) is again


async def test_pods_may_connect_to_us(picker: Picker) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with Pod(address, connect=True) as pod:
        endpoint = picker.follow(
            EventSource(address=address.replace("127.0.0.1", "*"), replay=pod.source.replay)
        )
        pod.lose(stored(0, 1))
        await pod.subscribed()
        await pod.publish(stored(1, 3))
        await until(lambda: picker.depth(endpoint) == 3)


async def test_a_port_that_is_taken_is_told_and_tried_again(
    picker: Picker, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        address = f"tcp://0.0.0.0:{taken.getsockname()[1]}"
        endpoint = picker.follow(EventSource(address=address))
        await until(lambda: picker.subscriptions.trouble(endpoint))
        assert "Address already in use" in picker.subscriptions.trouble(endpoint)
    await until(lambda: picker.subscriptions.of(endpoint))
    assert picker.subscriptions.trouble(endpoint) == ""
    assert caplog.messages == [
        f"pod {ADDRESS}: no KV events yet: cannot listen at {address}: Address already in use"
    ]


def test_on_the_loop_that_pickers_run_on() -> None:
    async def follow() -> None:
        async with running(Prefix()) as picker, Pod() as pod, Server(told(pod)) as server:
            for i in range(500):
                pod.lose(stored(i, i + 1))
            endpoint = picker.follow(address=f"127.0.0.1:{server.port}")
            await pod.subscribed()
            await until(lambda: picker.depth(endpoint, 600) == 500)
            for i in range(500, 600):
                await pod.publish(stored(i, i + 1))
            await until(lambda: picker.depth(endpoint, 600) == 600)
            picker.pool.update([])
            await pod.left()

    uvloop.run(follow())


# Where pods publish


def told(*pods: Pod) -> dict[str, Any]:
    return {
        str(rank): {
            "endpoint": pod.source.address.replace("127.0.0.1", "*"),
            "replay_endpoint": pod.source.replay.replace("127.0.0.1", "*"),
        }
        for rank, pod in enumerate(pods)
    }


async def test_a_pod_says_where_it_publishes(picker: Picker) -> None:
    async with Pod() as one, Pod() as two, Server(told(one, two)) as server:
        one.lose(stored(0, 1))
        two.lose(stored(0, 2))
        endpoint = picker.follow(address=f"127.0.0.1:{server.port}")
        await until(lambda: picker.depth(endpoint) == 2)
        assert server.asked == 1


@pytest.mark.parametrize(("answer", "status"), [({}, 404), ("?", 200), ({}, 401)])
async def test_a_pod_that_does_not_say_publishes_at_the_usual_ports(
    answer: object, status: int
) -> None:
    async with Pod() as pod, Server(answer, status) as server:
        ports = Events(port=port_of(pod.source.address), replay_port=port_of(pod.source.replay))
        pod.lose(stored(0, 2))
        async with running(Prefix(events=ports)) as picker:
            endpoint = picker.follow(address=f"127.0.0.1:{server.port}")
            await until(lambda: picker.depth(endpoint) == 2)


async def test_a_pod_is_asked_again_until_it_says(
    picker: Picker, caplog: pytest.LogCaptureFixture
) -> None:
    async with Pod() as pod, Server({}, 503) as server:
        address = f"127.0.0.1:{server.port}"
        endpoint = picker.follow(address=address)
        await until(lambda: "503" in picker.subscriptions.trouble(endpoint))
        server.status = 200
        await until(lambda: "publishes no" in picker.subscriptions.trouble(endpoint))
        server.answer = told(pod)
        pod.lose(stored(0, 2))
        await until(lambda: picker.depth(endpoint) == 2)
        assert picker.subscriptions.trouble(endpoint) == ""
        assert caplog.messages == [
            f"pod {address}: no KV events yet: /kv_event_sources answers with status 503",
            f"pod {address}: no KV events yet: it says that it publishes no KV events",
        ]


async def test_a_pod_that_is_not_there_is_awaited(picker: Picker) -> None:
    endpoint = picker.follow(address=f"127.0.0.1:{free_port()}")
    await until(lambda: "cannot connect" in picker.subscriptions.trouble(endpoint))
    picker.pool.update([])
    assert picker.subscriptions.trouble(endpoint) == ""


# Real publishers


async def test_our_worker(picker: Picker) -> None:
    publisher = Publisher("127.0.0.1", 0, 0, "kv@pod@model")
    try:
        for i in range(3):
            start = i * 4
            publisher.publish(
                [BlockStored([50 + i], 49 + i if i else None, prompt(3)[start : start + 4], 4)]
            )
        source = EventSource(address=publisher.endpoint, replay=publisher.replay_endpoint)
        endpoint = picker.follow(source)
        await until(lambda: picker.depth(endpoint) == 3)
        subscription = await picker.subscription(endpoint)
        await until(lambda: not subscription.sequence.replaying)
        publisher.publish([BlockRemoved([52])])
        await until(lambda: picker.depth(endpoint) == 2)
        publisher.publish([AllBlocksCleared()])
        await until(lambda: picker.depth(endpoint) == 0)
        assert (subscription.malformed, subscription.unknown) == (0, 0)
    finally:
        publisher.close()


class Told:
    """What a file of vLLM's events says, read as plainly as can be."""

    def __init__(self) -> None:
        self.cached: set[int] = set()
        self.parents: dict[int, int | None] = {}  # of all blocks that ever were
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}

    def read(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.cached.clear()
                continue
            if event["type"] == "BlockRemoved":
                self.cached.difference_update(event["block_hashes"])
                continue
            parent, size = event["parent_block_hash"], event["block_size"]
            for i, name in enumerate(event["block_hashes"]):
                self.cached.add(name)
                self.parents[name] = parent
                self.tokens[name] = event["token_ids"][i * size : (i + 1) * size]
                if event["extra_keys"][i]:
                    (self.salts[name],) = event["extra_keys"][i]
                parent = name

    def chain(self, name: int | None) -> list[int]:
        """The blocks of the prompt that ends with this one."""
        chain = []
        while name is not None:
            chain.append(name)
            name = self.parents[name]
        return chain[::-1]

    def check(self, index: BlockIndex, slot: int) -> None:
        """The index says the same of each prompt that ever was."""
        for name in self.parents:
            chain = self.chain(name)
            held = next((i for i, each in enumerate(chain) if each not in self.cached), len(chain))
            tokens = np.array([token for each in chain for token in self.tokens[each]], np.uint32)
            salt = self.salts.get(chain[0])
            found = index.match(TokenPrompt(tokens, None, {0: (salt,)} if salt else {}))
            assert found.blocks[slot] == held
            if salt:
                other = TokenPrompt(tokens, None, {0: (salt + "?",)})
                assert index.match(other).blocks[slot] == 0


async def test_all_frames_of_vllm(picker: Picker) -> None:
    """After each message, the index equals what the file says is cached."""
    said = Told()
    async with Pod() as pod:
        endpoint = picker.follow(EventSource(address=pod.source.address))
        await pod.subscribed()
        subscription = await picker.subscription(endpoint)
        for number, message in enumerate(FRAMES["live"], 1):
            frames = [bytes.fromhex(frame) for frame in message["frames"]]
            await pod.send(frames)
            said.read(msgspec.msgpack.decode(frames[-1])[1])
            await until(lambda number=number: subscription.batches == number)  # type: ignore[misc]
            said.check(picker.index, endpoint.slot)
        assert picker.index.stats.held == len(said.cached)
        counts = subscription.sequence.counts
        assert (subscription.malformed, subscription.unknown, counts.gaps) == (0, 0, 0)


async def test_all_replayed_frames_of_vllm(picker: Picker) -> None:
    said = Told()
    async with Pod() as pod:
        for message in FRAMES["replay_first"]:
            _, _, number, payload = (bytes.fromhex(frame) for frame in message["frames"])
            pod.sent[int.from_bytes(number, "big")] = payload
            said.read(msgspec.msgpack.decode(payload)[1])
        *_, number, payload = (
            bytes.fromhex(frame) for frame in FRAMES["replay_last"][-1]["frames"]
        )
        assert (number, payload) == (END, b""), "the pod of these tests ends replays so"
        endpoint = picker.follow(pod.source)
        await until(lambda: picker.index.stats.held == len(said.cached))
        said.check(picker.index, endpoint.slot)
