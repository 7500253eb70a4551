"""KV events on the wire: vLLM's bytes, replays, and subscribers that are late, slow or hostile."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.worker.subscriber import END, KVSubscriber
from worker.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Publisher,
    default_topic,
)

VLLM = json.loads((Path(__file__).parents[1] / "data" / "vllm_kv_events.json").read_text())
LIVE = [[bytes.fromhex(frame) for frame in message["frames"]] for message in VLLM["live"]]
REPLAY = [[bytes.fromhex(frame) for frame in message["frames"]] for message in VLLM["replay"]]
TOPIC = default_topic("10.0.0.7:8000", "tiny/llama")
PATIENCE = 20.0  # seconds


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.001)


def open_publisher(port: int = 0, replay_port: int = 0, **options: Any) -> Publisher:
    return Publisher("127.0.0.1", port, replay_port, TOPIC, **options)


def subscribe(publisher: Publisher, **options: Any) -> KVSubscriber:
    """A subscriber that is known to get live messages: a PUB socket drops what comes earlier."""
    subscriber = KVSubscriber(publisher.endpoint, publisher.replay_endpoint, **options)
    deadline = time.monotonic() + PATIENCE
    while not subscriber.topics:
        assert time.monotonic() < deadline, "no live message"
        publisher.publish([AllBlocksCleared()])
        subscriber.receive(0.05)
    publisher.publish([AllBlocksCleared()])
    number = next_seq(publisher) - 1
    subscriber.poll_until(lambda s: s.last == number)
    return subscriber


def next_seq(publisher: Publisher) -> int:
    """The number of the next batch; it will find the queue empty."""
    wait_until(lambda: not publisher._queue)
    return publisher._next_seq


def stored(block_hash: int, parent: int | None = None, size: int = 4) -> BlockStored:
    return BlockStored([block_hash], parent, list(range(size)), size)


def port_of(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = open_publisher(linger=0.1)
    yield publisher
    publisher.close()


@pytest.fixture
def dealer(publisher: Publisher) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    yield dealer
    context.destroy(linger=0)


def answers(dealer: zmq.Socket[bytes]) -> list[list[bytes]]:
    """The frames of one replay, its end marker included."""
    got: list[list[bytes]] = []
    while not got or got[-1][2] != END:
        assert dealer.poll(int(PATIENCE * 1000)), "no answer"
        got.append(dealer.recv_multipart())
    return got


def numbers(replay: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frames[2], "big") for frames in replay[:-1]]


# The wire form


@pytest.mark.parametrize("frames", [*LIVE, REPLAY[0][1:]])
def test_real_batches_decode_and_encode_to_the_same_bytes(frames: list[bytes]) -> None:
    batch = msgspec.msgpack.decode(frames[2], type=EventBatch)
    assert batch.events
    assert msgspec.msgpack.encode(batch) == frames[2]


def test_publisher_sends_what_vllm_sent(publisher: Publisher) -> None:
    batches = [msgspec.msgpack.decode(frames[2], type=EventBatch) for frames in LIVE]
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    for batch in batches:
        publisher.publish(batch.events)
    wait_until(lambda: publisher.published == len(batches))
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    replay = answers(dealer)
    context.destroy(linger=0)

    stamp = slice(2, 10)  # 0x93, 0xcb, then the time
    for (empty, topic, seq, ours), (_, _, theirs), i in zip(replay, LIVE, range(99), strict=False):
        assert (empty, topic, seq) == (b"", TOPIC.encode(), i.to_bytes(8, "big"))
        assert ours[: stamp.start] + ours[stamp.stop :] == theirs[: stamp.start] + theirs[10:]
    assert len(replay) == len(LIVE) + 1
    assert replay[-1] == REPLAY[1]


def test_defaults_are_those_of_a_plain_block() -> None:
    event = msgspec.to_builtins(BlockStored([1, 2], None, [5, 6, 7, 8], 2))
    assert list(event) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ]
    assert event["extra_keys"] == [None, None]
    assert msgspec.to_builtins(AllBlocksCleared()) == {"type": "AllBlocksCleared"}


def test_topic_names_the_pod_and_the_model() -> None:
    assert TOPIC == "kv@10.0.0.7:8000@tiny/llama"


# Live


def test_subscriber_mirrors_the_cache(publisher: Publisher) -> None:
    before = time.time()
    with subscribe(publisher) as subscriber:
        salted = BlockStored([2**64 - 1, 7], None, [1, 2, 3, 4], 2, extra_keys=[["salt"], None])
        publisher.publish([salted, stored(8, parent=7)])
        publisher.publish([BlockRemoved([2**64 - 1]), BlockRemoved([8])])
        subscriber.poll_until(lambda s: set(s.blocks) == {7})
        assert subscriber.blocks[7] == (2**64 - 1, (3, 4), None)
        assert subscriber.topics == {TOPIC}
        assert before <= subscriber.timestamps[-1] <= time.time()
        publisher.publish([AllBlocksCleared()])
        subscriber.poll_until(lambda s: not s.blocks)
        assert (subscriber.gaps, subscriber.restarts, subscriber.lost) == ([], 0, 0)
        assert subscriber.unknown_removals == 0


def test_a_step_without_events_takes_no_number(publisher: Publisher) -> None:
    publisher.publish([])
    assert next_seq(publisher) == 0
    publisher.publish([stored(1)])
    with subscribe(publisher) as subscriber:
        assert subscriber.last == next_seq(publisher) - 1
        assert subscriber.events[0]["block_hashes"] == [1]


def test_idle_thread_sleeps_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[int | None] = []
    poll = zmq.Poller.poll

    def spy(poller: zmq.Poller, timeout: int | None = None) -> Any:
        timeouts.append(timeout)
        return poll(poller, timeout)

    monkeypatch.setattr(zmq.Poller, "poll", spy)
    publisher = open_publisher()
    publisher.publish([stored(1)])
    wait_until(lambda: publisher.published == 1 and timeouts[-1] is None)
    publisher.close()
    assert set(timeouts) <= {None, 0}


def test_restart_starts_again_at_0() -> None:
    first = open_publisher()
    with subscribe(first) as subscriber:
        for i in range(1000):
            first.publish([stored(i)])
        subscriber.poll_until(lambda s: len(s.blocks) == 1000)
        ports = port_of(first.endpoint), port_of(first.replay_endpoint)
        first.close()

        second = open_publisher(*ports, linger=0.1)
        deadline = time.monotonic() + PATIENCE
        while not subscriber.restarts:  # what comes before it is connected again is not seen
            assert time.monotonic() < deadline
            second.publish([stored(3)])
            subscriber.receive(0.05)
        subscriber.poll_until(lambda s: s.last == next_seq(second) - 1)
        assert set(subscriber.blocks) == {3}
        assert subscriber.restarts == 1
        second.close()


# Replay


def test_late_joiner_asks_for_the_past(publisher: Publisher) -> None:
    for i in range(300):
        publisher.publish([stored(i, parent=i - 1 if i else None)])
    wait_until(lambda: publisher.published == 300)
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        subscriber.poll_until(lambda s: len(s.blocks) == 300)
        assert subscriber.blocks[299].parent == 298
        assert (subscriber.gaps, subscriber.lost) == ([], 0)


def test_buffer_forgets_the_oldest() -> None:
    publisher = open_publisher(buffer_steps=10)
    for i in range(100):
        publisher.publish([stored(i)])
    wait_until(lambda: publisher.published == 100)
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        subscriber.poll_until(lambda s: s.last == 99)
        assert set(subscriber.blocks) == set(range(90, 100))
        assert subscriber.lost == 90
    publisher.close()


@pytest.mark.parametrize("start", [0, 1, 64, 149, 150, 2**63, 2**64 - 1])
def test_replay_from(publisher: Publisher, dealer: zmq.Socket[bytes], start: int) -> None:
    for i in range(150):
        publisher.publish([stored(i)])
    wait_until(lambda: publisher.published == 150)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    assert numbers(answers(dealer)) == list(range(start, 150))


def test_replay_without_delimiter(publisher: Publisher, dealer: zmq.Socket[bytes]) -> None:
    publisher.publish([stored(1)])
    wait_until(lambda: publisher.published == 1)
    dealer.send((0).to_bytes(8, "big"))
    assert numbers(answers(dealer)) == [0]


def test_live_goes_on_during_a_replay(publisher: Publisher, dealer: zmq.Socket[bytes]) -> None:
    with subscribe(publisher) as subscriber:
        joined = next_seq(publisher)
        for i in range(500):
            publisher.publish([stored(i)])
            if i % 100 == 50:
                dealer.send_multipart([b"", (0).to_bytes(8, "big")])
                replay = numbers(answers(dealer))
                assert replay == list(range(len(replay)))
        subscriber.poll_until(lambda s: s.last == joined + 499)
        assert (subscriber.gaps, subscriber.restarts) == ([], 0)


def test_slow_replay_client_gets_everything() -> None:
    publisher = open_publisher(buffer_steps=2000)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.rcvhwm, dealer.rcvbuf, dealer.linger = 1, 4096, 0
        dealer.connect(publisher.replay_endpoint)
        for i in range(2000):
            publisher.publish([stored(i, size=2000)])
        wait_until(lambda: publisher.published == 2000)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        assert dealer.poll(int(PATIENCE * 1000))
        wait_until(lambda: not publisher._replays)  # all handed over before the client reads on
        assert numbers(answers(dealer)) == list(range(2000))
    assert publisher.abandoned_replays == 0
    publisher.close()


HOSTILE = [
    [b""],
    [b"", b""],
    [b"", b"", b""],
    [b"garbage"],
    [b"", b"-1"],
    [b"", b"0"],
    [b"", b"\0" * 7],
    [b"", b"\0" * 9],
    [b"", b"\0" * 8, b"more"],
    [b"a", b"\0" * 8],
    [b"", b"\x93\xcb\xff" * 200],
    [b"x"] * 1000,
]


def test_malformed_requests_are_ignored_and_counted(
    publisher: Publisher, dealer: zmq.Socket[bytes]
) -> None:
    publisher.publish([stored(1)])
    for frames in HOSTILE:
        dealer.send_multipart(frames)
    wait_until(lambda: publisher.malformed_requests == len(HOSTILE))
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    assert numbers(answers(dealer)) == [0]


def test_oversized_request_costs_its_sender_the_connection(
    publisher: Publisher, dealer: zmq.Socket[bytes]
) -> None:
    publisher.publish([stored(1)])
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send_multipart([b"", b"x" * 1_000_000])
    assert monitor.poll(int(PATIENCE * 1000))
    dealer.disable_monitor()
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        subscriber.poll_until(lambda s: set(s.blocks) == {1})
    assert publisher.malformed_requests == 0


def test_replay_client_that_never_reads_blocks_nobody() -> None:
    publisher = open_publisher(buffer_steps=50, linger=0.1)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.rcvhwm, dealer.rcvbuf = 1, 4096
    dealer.connect(publisher.replay_endpoint)
    with subscribe(publisher) as subscriber:
        for i in range(50):
            publisher.publish([stored(i, size=10_000)])
        joined = next_seq(publisher)
        for _ in range(1000):
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        wait_until(lambda: publisher.abandoned_replays > 0)
        publisher.publish([stored(1000)])
        subscriber.poll_until(lambda s: 1000 in s.blocks)
        assert subscriber.last == joined
        assert subscriber.gaps == []
    context.destroy(linger=0)
    publisher.close()


# Who is too slow


def test_full_queue_drops_batches_and_shows_a_gap() -> None:
    publisher = open_publisher(max_queue_size=1)
    with subscribe(publisher) as subscriber:
        deadline = time.monotonic() + PATIENCE
        while publisher.dropped_batches < 5:
            assert time.monotonic() < deadline
            publisher.publish([stored(1)])
        last = next_seq(publisher)
        publisher.publish([stored(2)])
        subscriber.poll_until(lambda s: s.last == last)
        missing = sum(got - expected for expected, got in subscriber.gaps)
        assert missing == subscriber.lost == publisher.dropped_batches
        assert publisher.dropped_sends == 0
    publisher.close()


def test_batch_that_cannot_be_encoded_is_a_gap(publisher: Publisher) -> None:
    with subscribe(publisher) as subscriber:
        publisher.publish([BlockStored([1], None, [1, 2], 2, extra_keys=[["\ud800"]])])
        publisher.publish([BlockStored([2**64], None, [1, 2], 2)])
        publisher.publish([stored(3)])
        subscriber.poll_until(lambda s: 3 in s.blocks)
        assert set(subscriber.blocks) == {3}
        assert subscriber.lost == publisher.dropped_batches == 2


def fill(publisher: Publisher, reader: KVSubscriber | None = None) -> None:
    """Publish until a subscriber that does not read is found full."""
    big: list[Event] = [stored(1, size=20_000)]
    deadline = time.monotonic() + PATIENCE
    before = publisher.dropped_sends
    while publisher.dropped_sends == before:
        assert time.monotonic() < deadline
        publisher.publish(big)
        last = next_seq(publisher) - 1
        if reader is not None:
            reader.poll_until(lambda s, last=last: s.last == last)  # type: ignore[misc]


def test_slow_subscriber_is_counted_and_harms_no_other() -> None:
    publisher = open_publisher(hwm=10)
    with subscribe(publisher, hwm=1, rcvbuf=4096) as slow, subscribe(publisher) as fast:
        fill(publisher, fast)
        publisher.publish([stored(2)])
        fast.poll_until(lambda s: 2 in s.blocks)
        assert (fast.gaps, fast.lost) == ([], 0)

        slow.poll_until(lambda s: 2 in s.blocks)
        assert slow.lost == 0  # the replay had what it missed
        assert publisher.dropped_sends >= 1
        assert publisher.dropped_batches == 0

        fill(publisher, fast)  # counted again after it has recovered
        assert fast.gaps == []
    publisher.close()


def close_in_time(publisher: Publisher) -> None:
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_close_does_not_wait_for_a_dead_subscriber() -> None:
    publisher = open_publisher(hwm=10, linger=0.1)
    with subscribe(publisher, hwm=1, rcvbuf=4096):
        fill(publisher)
        close_in_time(publisher)
        open_publisher(port_of(publisher.endpoint), linger=0.1).close()


def test_close_sends_what_is_queued() -> None:
    publisher = open_publisher()
    with subscribe(publisher) as subscriber:
        last = next_seq(publisher) + 499
        for i in range(500):
            publisher.publish([stored(i)])
        close_in_time(publisher)
        while subscriber.last < last:
            assert subscriber.receive(PATIENCE)
        assert (subscriber.gaps, subscriber.lost) == ([], 0)


def test_publish_after_close_is_harmless(publisher: Publisher) -> None:
    publisher.close()
    publisher.publish([stored(1)])
    publisher.close()
    assert publisher.published == 0


# Addresses


def test_port_in_use_is_reported_to_the_caller(publisher: Publisher) -> None:
    port = port_of(publisher.endpoint)
    with pytest.raises(OSError, match=rf"cannot bind KV events to 127\.0\.0\.1:{port}: Address"):
        open_publisher(port)
    with pytest.raises(OSError, match=r"cannot bind KV event replays .* already in use"):
        open_publisher(0, port)


def test_failed_start_holds_no_port(publisher: Publisher) -> None:
    other = open_publisher(linger=0.1)
    other.close()
    with pytest.raises(OSError, match="replays") as failure:
        open_publisher(port_of(other.endpoint), port_of(publisher.endpoint))
    open_publisher(port_of(other.endpoint), linger=0.1).close()
    assert failure.value.errno == errno.EADDRINUSE


def test_unknown_host_is_reported_to_the_caller() -> None:
    with pytest.raises(OSError, match="cannot resolve host 'no host'"):
        Publisher("no host", 0, 0, TOPIC)


def test_host_may_be_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: both)
    publisher = Publisher("localhost", 0, 0, TOPIC)
    assert publisher.endpoint.startswith("tcp://127.0.0.1:")
    publisher.close()
