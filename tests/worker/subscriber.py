"""A KV event subscriber as a router has one: what does this worker's prefix cache hold?

It knows the wire form only (vLLM's), nothing of the worker: a live SUB socket, and a DEALER
socket that asks for what was missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import zmq

QUIET = 0.1  # seconds without a live message before asking whether any was missed
REPLAY_TIMEOUT = 5.0  # seconds
END = b"\xff" * 8


class Block(NamedTuple):
    """One cached block."""

    parent: int | None
    tokens: tuple[int, ...]
    extra: list[Any] | None


class KVSubscriber:
    """Mirrors one worker's prefix cache in `blocks`, by hash.

    `gaps` lists (expected, got) sequence numbers of live messages that skipped some; each is
    then asked for again. `restarts` counts live sequences that went backwards: everything known
    before is forgotten. A late joiner asks for the past, which is neither.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, hwm: int = 0, rcvbuf: int = -1):
        self.blocks: dict[int, Block] = {}
        self.events: list[dict[str, Any]] = []
        self.topics: set[str] = set()
        self.timestamps: list[float] = []
        self.gaps: list[tuple[int, int]] = []
        self.lost = 0  # batches that no replay brought back
        self.unknown_removals = 0
        self.restarts = 0
        self.last = -1  # newest sequence number applied
        self._last_live = -1
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.rcvhwm = hwm
        self._live.rcvbuf = rcvbuf
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._replay = self._connect_replay()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def poll_until(self, predicate: Callable[[Self], bool], timeout: float = 20.0) -> None:
        """Follow the worker until the predicate holds; TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not predicate(self):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not reached in {timeout} s: last={self.last} blocks={len(self.blocks)} "
                    f"gaps={self.gaps} restarts={self.restarts}"
                )
            if not self.receive(QUIET):
                self.catch_up()

    def receive(self, timeout: float) -> bool:
        """Apply one live message; False if none came within `timeout` seconds."""
        if not self._live.poll(int(timeout * 1000)):
            return False
        topic, number, batch = self._live.recv_multipart()
        seq = int.from_bytes(number, "big")
        self.topics.add(topic.decode())
        if seq <= self._last_live:
            self._restart()
        elif self._last_live >= 0 and seq > self._last_live + 1:
            self.gaps.append((self._last_live + 1, seq))
        self._last_live = seq
        if seq > self.last + 1:
            self.catch_up()
        self._apply(seq, batch)
        return True

    def catch_up(self) -> None:
        """Ask for everything after the newest applied batch, and apply it."""
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while self._replay.poll(int(REPLAY_TIMEOUT * 1000)):
            empty, topic, number, batch = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, batch) == (b"", b"")
                return
            self._apply(int.from_bytes(number, "big"), batch)
        # Whatever still comes would be taken for the next answer.
        self._replay.close(linger=0)
        self._replay = self._connect_replay()

    def _connect_replay(self) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._replay_endpoint)
        return dealer

    def _restart(self) -> None:
        self.restarts += 1
        self.blocks.clear()
        self.last = -1

    def _apply(self, seq: int, batch: bytes) -> None:
        if seq <= self.last:
            return  # live and replayed both
        self.lost += seq - self.last - 1
        self.last = seq
        ts, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        self.timestamps.append(ts)
        for event in events:
            self.events.append(event)
            getattr(self, "_" + event["type"])(event)

    def _BlockStored(self, event: dict[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        assert len(tokens) == len(hashes) * size
        assert event["medium"] == "GPU"
        parent = event["parent_block_hash"]
        for i, (block_hash, extra) in enumerate(zip(hashes, event["extra_keys"], strict=True)):
            self.blocks[block_hash] = Block(parent, tuple(tokens[i * size : (i + 1) * size]), extra)
            parent = block_hash

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        for block_hash in event["block_hashes"]:
            if self.blocks.pop(block_hash, None) is None:
                self.unknown_removals += 1

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.blocks.clear()
