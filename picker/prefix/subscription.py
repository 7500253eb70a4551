"""One publisher of KV events, followed over ZMQ: its live batches, and replays of those missed.

The wire form is vLLM's. A live message is [topic, number, batch]; some publishers leave the topic
out. A replay is asked for with [empty, first number] on a DEALER socket, and answered with
[empty, topic, number, batch] for each batch, where older publishers have no topic, and an end mark:
number ff*8, or no batch. Whose events they are is known by the socket; topics are not read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import zmq

from picker.prefix import sockets
from picker.prefix.addresses import Address
from picker.prefix.backlog import Backlog
from picker.prefix.events import Tier, decode
from picker.prefix.index import BlockIndex
from picker.prefix.rate import Rate
from picker.prefix.sequence import Sequence
from picker.prefix.sockets import Context, LiveSocket, Message, Socket
from picker.prefix.turns import Turns

log = logging.getLogger(__name__)

SLICE = 0.0004  # seconds (of CPU time) of reading in one turn; the index then takes it in
AT_ONCE = 16  # live messages read at once
REPLAY_IDLE = 2.0  # seconds without an answer
REPLAY_TOTAL = 60.0  # seconds
QUIET = 1.0  # seconds without a live message, after one: time to ask whether one was lost
AFRESH = 10.0  # seconds without a connection, until another is made
END = b"\xff" * 8


class Subscription:
    """Keeps an index told of what one publisher's pod holds.

    Raises:
        OSError: the address cannot be listened at, or there are too many sockets.
    """

    def __init__(
        self, context: Context, turns: Turns, index: BlockIndex, slot: int, address: Address
    ) -> None:
        self.address = address
        self.sequence = Sequence(self, replayable=bool(address.replay))
        self.last_batch: float | None = None  # by time.monotonic, when it came
        self.batches = 0
        self.events = 0
        self.rate = Rate(time.monotonic())  # of events
        self.malformed = 0  # events, batches and messages that cannot be understood
        self.unknown = 0  # events of types that we do not know
        self.rested = 0.0
        self.waiting = False

        self._context = context
        self._turns = turns
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog()
        self._quiet = True  # nothing came since the last check
        self._replay: Socket | None = None
        self._asked_at = self._answered_at = 0.0
        self._connected_at = time.monotonic()  # or tried to
        self._live = LiveSocket(context, address)
        self._open = True
        self._source = index.open(slot)
        for socket in self._live.sockets:
            self._watch(socket)

    @property
    def connected(self) -> bool:
        return self._live.connected

    @property
    def following(self) -> bool:
        """Whether all that the publisher told so far is known, as far as it can be."""
        return self.connected and not self.sequence.replaying

    @property
    def held(self) -> dict[Tier, int]:
        """Blocks that the publisher holds."""
        return self._index.held(self._source)

    @property
    def cleared(self) -> int:
        """Times that all it held was forgotten: it said so, or what it holds was not certain."""
        return self._source.cleared

    def close(self) -> None:
        """Hear no more, and forget the pod."""
        self._open = False
        self._index.close(self._source)
        self._drop_replay()
        for socket in self._live.sockets:
            self._loop.remove_reader(socket.fileno())
        self._live.close()

    def tick(self, now: float) -> None:
        """Look at the clock, by time.monotonic; to be called about twice a second."""
        self.rate.update(self.events, now)
        if self.sequence.replaying:
            if now - self._answered_at > REPLAY_IDLE or now - self._asked_at > REPLAY_TOTAL:
                self.sequence.replay_failed()
                self._turns.ask(self)
        elif not self._quiet and self.last_batch is not None and now - self.last_batch > QUIET:
            self._quiet = True
            self.sequence.check()
        if self.connected:
            self._connected_at = now
        elif now - self._connected_at > AFRESH:
            self._connected_at = now
            self._live.connect_afresh()

    def turn(self) -> bool:
        """Read for a short while, and put what was read into the index. True: there is more."""
        if not self._open:
            return False
        until = time.thread_time() + SLICE
        more = True
        while more and not self._backlog.enough and time.thread_time() < until:
            more = self.sequence.advance() or self._receive()
        if not self.sequence.replaying:
            self._drop_replay()
        if portion := self._backlog.take():
            self._index.apply(self._source, portion)
        return more or len(self._backlog) > 0

    # What the sequence wants

    def apply(self, payload: bytes) -> None:
        batch = decode(payload)
        self.batches += 1
        self.events += len(batch.events)
        self.malformed += batch.malformed
        self.unknown += batch.unknown
        self._backlog.add(batch.events)

    def forget(self) -> None:
        self._backlog.clear()
        self._index.clear(self._source)

    def ask(self, first: int) -> None:
        self._drop_replay()  # a socket serves one question, so that no answer is to another one
        self._asked_at = self._answered_at = time.monotonic()
        try:
            self._replay = sockets.ask(self._context, self.address.replay, first)
        except OSError as problem:
            log.warning("no replay of KV events: %s", problem)  # as if it did not answer
            return
        self._watch(self._replay)
        self._turns.ask(self)  # sending may have taken the sign that there is something to read

    # What comes in

    def _receive(self) -> bool:
        """Read some messages. False: there are none.

        Live ones first, then the news of their connection, then answers: whatever a process sent
        before another took its place is here when that one's answers are looked at.
        """
        messages = self._live.read(AT_ONCE)
        if self._live.connected_anew():
            self.sequence.reconnected()
        for message in messages:
            self._hear(message)
        if messages or self._replay is None:
            return bool(messages)
        answers = sockets.read(self._replay, 1)  # decoded at once; live ones wait for `advance`
        for answer in answers:
            self._hear_again(answer)
        return bool(answers)

    def _hear(self, message: Message) -> None:
        if len(message) < 2 or len(message[-2]) != 8:
            self.malformed += 1
            return
        self.last_batch = time.monotonic()
        self._quiet = False
        self.sequence.live(int.from_bytes(message[-2], "big"), message[-1])

    def _hear_again(self, answer: Message) -> None:
        self._answered_at = time.monotonic()
        number = answer[-2] if len(answer) > 1 else b""
        if answer[-1] in (b"", END) or number == END:
            self.sequence.replay_ended()
        elif len(number) == 8:
            self.sequence.replayed(int.from_bytes(number, "big"), answer[-1])
        else:
            self.malformed += 1

    # When to look

    def _watch(self, socket: Socket) -> None:
        self._loop.add_reader(socket.fileno(), partial(self._wake, socket))

    def _wake(self, socket: Socket) -> None:
        socket.get(zmq.EVENTS)  # takes the sign off the descriptor; it comes again after EAGAIN
        self._turns.ask(self)

    def _drop_replay(self) -> None:
        if self._replay is not None:
            self._loop.remove_reader(self._replay.fileno())
            self._replay.close(linger=0)
            self._replay = None
