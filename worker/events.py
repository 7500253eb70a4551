"""KV events: which blocks the prefix cache holds, told to whoever subscribes.

The wire form is vLLM's (0.32, `distributed/kv_events.py`): a batch is a msgpack array, an event
in it a msgpack map whose key "type" names its class. A live message has three frames: the topic,
the sequence number (8 bytes, big-endian, from 0), the batch.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from itertools import islice
from operator import itemgetter

import msgspec
import zmq

log = logging.getLogger(__name__)

END_OF_REPLAY = (b"", b"\xff" * 8, b"")  # topic, sequence number, batch
SLICE = 64  # batches sent before the thread looks at its other work
MAX_REQUEST_BYTES = 1024  # of one frame from outside: subscriptions and replay requests are short


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Consecutive full blocks entered the prefix cache.

    `token_ids` covers all of them: len(block_hashes) * block_size tokens. A hash is 64 bits,
    unsigned. `parent_block_hash` is the block before the first, None at the start of a prompt.
    `extra_keys` has one entry a block: what besides its tokens went into its hash (a cache salt),
    or None; left out, no block has any.

    vLLM always sends the fields with defaults here, so these are sent too.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"

    def __post_init__(self) -> None:
        if self.extra_keys is None:
            self.extra_keys = [None] * len(self.block_hashes)


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks left the prefix cache; vLLM sends one event for each block it evicts."""

    block_hashes: list[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The prefix cache was reset: it holds nothing any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one engine step changed, as sent: [seconds since the epoch, events, rank]."""

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


def default_topic(address: str, model: str) -> str:
    """The topic of one worker, as llm-d writes it; `address` is its HTTP "ip:port"."""
    return f"kv@{address}@{model}"


class Publisher:
    """Sends event batches to ZMQ subscribers, and again to those who ask for a replay.

    A PUB socket is bound to `port` and a ROUTER socket for replays to `replay_port`; 0 takes any
    free port, see `endpoint` and `replay_endpoint`. One thread owns both and sleeps unless there
    is something to send. Only `publish` runs in the engine's thread.

    A replay request is [identity, empty, first sequence number]; the answers are [identity,
    empty, topic, sequence number, batch], then END_OF_REPLAY. Numbers start at 0 again with every
    process: that is how a subscriber notices a restart.

    Counters, all growing: `published` batches sent; `dropped_batches`, never sent because the
    thread was too far behind or could not encode them; `dropped_sends`, times a subscriber was
    found at its high-water mark (it then misses batches, uncounted, until it has read about half
    of them); `malformed_requests` ignored; `abandoned_replays`, their client left or is too slow.

    Raises OSError when a port is taken or the host is not one of this machine's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        replay_port: int,
        topic: str,
        *,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        linger: float = 1.0,
    ) -> None:
        self.published = 0
        self.dropped_batches = 0
        self.dropped_sends = 0
        self.malformed_requests = 0
        self.abandoned_replays = 0

        self._topic = topic.encode()
        self._next_seq = 0
        self._max_queue_size = max_queue_size
        self._queue: deque[tuple[int, float, list[Event]]] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._replays: dict[bytes, int] = {}  # client: the first number it still wants
        self._encode = msgspec.msgpack.Encoder().encode
        self._linger = linger
        self._closing = False

        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "KV events", host, port, hwm)
            # Room for a whole replay, however slowly its client reads.
            self._router = self._bind(
                zmq.ROUTER, "KV event replays", host, replay_port, buffer_steps + 1
            )
        except OSError:
            self._context.destroy(linger=0)
            raise
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # full subscribers raise Again: we can count
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # full or lost clients raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

        wake_reader, wake_writer = os.pipe()
        self._wake_reader = os.fdopen(wake_reader, "rb", buffering=0)
        self._wake_writer = os.fdopen(wake_writer, "wb", buffering=0)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Queue one step's events as one batch; the caller must not change them afterwards.

        Never blocks. When the queue is full the batch is lost but not its sequence number, so
        that subscribers see a gap and know.
        """
        if not events or self._closing:
            return
        seq = self._next_seq
        self._next_seq += 1
        if len(self._queue) >= self._max_queue_size:
            self.dropped_batches += 1
            return
        self._queue.append((seq, time.time(), events))
        if len(self._queue) == 1:  # otherwise the thread still has to look at older batches
            self._wake_writer.write(b"\0")

    def close(self) -> None:
        """Send what is queued, then free the ports.

        Takes `linger` seconds at most for the queue, and as long again for subscribers who are
        slow to take it; what is left then is lost. To be called by the
        thread that publishes, or once that has ended.
        """
        if self._closing:
            return
        self._closing = True
        self._wake_writer.write(b"\0")
        self._thread.join()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _bind(self, kind: int, name: str, host: str, port: int, hwm: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.sndhwm = hwm
        sock.linger = int(self._linger * 1000)
        sock.maxmsgsize = MAX_REQUEST_BYTES
        address = _numeric(host)
        sock.ipv6 = ":" in address
        try:
            sock.bind(f"tcp://[{address}]:{port}" if sock.ipv6 else f"tcp://{address}:{port}")
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            raise OSError(error.errno, f"cannot bind {name} to {host}:{port}: {reason}") from None
        return sock

    def _run(self) -> None:
        try:
            self._serve()
            deadline = time.monotonic() + self._linger
            while self._queue and time.monotonic() < deadline:
                self._send_queued()
        finally:
            self._pub.close()
            self._router.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._closing:
            busy = self._queue or self._replays
            ready = dict(poller.poll(0 if busy else None))
            if self._wake_reader.fileno() in ready:
                self._wake_reader.read(4096)
            self._send_queued()
            if self._router in ready:
                self._accept_requests()
            if self._replays:
                self._serve_replay()

    def _send_queued(self) -> None:
        for _ in range(min(SLICE, len(self._queue))):
            seq, ts, events = self._queue.popleft()
            try:
                batch = self._encode(EventBatch(ts, events))
            except (UnicodeError, OverflowError):  # a salt with a lone surrogate, say
                log.exception("KV events of one step cannot be encoded; subscribers see a gap")
                self.dropped_batches += 1
                continue
            self._sent.append((seq, batch))
            self._send([self._topic, seq.to_bytes(8, "big"), batch])
            self.published += 1

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._pub.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            self.dropped_sends += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)  # only those who are full shall miss it
            self._pub.send_multipart(frames, zmq.DONTWAIT)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _accept_requests(self) -> None:
        for _ in range(SLICE):
            try:
                client, *rest = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if rest and not rest[0]:
                del rest[0]  # the delimiter, which not every client sends
            if len(rest) == 1 and len(rest[0]) == 8:
                self._replays[client] = int.from_bytes(rest[0], "big")
            else:
                self.malformed_requests += 1

    def _serve_replay(self) -> None:
        """Send one slice to the client that has waited longest."""
        client, start = next(iter(self._replays.items()))
        del self._replays[client]
        first = bisect_left(self._sent, start, key=itemgetter(0))
        batches = list(islice(self._sent, first, first + SLICE))
        try:
            for seq, batch in batches:
                self._reply(client, (self._topic, seq.to_bytes(8, "big"), batch))
            if len(batches) < SLICE:
                self._reply(client, END_OF_REPLAY)
            else:
                self._replays[client] = batches[-1][0] + 1
        except zmq.ZMQError:
            self.abandoned_replays += 1

    def _reply(self, client: bytes, frames: tuple[bytes, bytes, bytes]) -> None:
        self._router.send_multipart([client, b"", *frames], zmq.DONTWAIT)


def _numeric(host: str) -> str:
    """The address that a host name stands for; ZMQ binds addresses only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot resolve host {host!r}: {error.strerror}") from None
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])
