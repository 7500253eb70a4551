"""One publisher of KV events, followed over ZMQ: its live batches, and replays of those missed.

The wire form is vLLM's. A live message is [topic, number, batch]; some publishers leave the topic
out. A replay is asked for with [empty, first number] on a DEALER socket, and answered with
[empty, topic, number, batch] for each batch, where older publishers have no topic, and an end mark:
number ff*8, or no batch. Whose events they are is known by the socket; topics are not read.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import zmq

from picker.prefix.addresses import Address
from picker.prefix.events import MAX_PAYLOAD, Event, Tier, decode
from picker.prefix.rate import Rate
from picker.prefix.sequence import Sequence
from picker.prefix.turns import Turns

if TYPE_CHECKING:
    from picker.prefix.index import BlockIndex

log = logging.getLogger(__name__)

SLICE = 0.0005  # seconds of reading in one turn; what was read then goes into the index
AT_ONCE = 16  # messages
HIGH_WATER = 256  # live messages that wait for us; the others wait with the publisher
REPLAY_HIGH_WATER = 100_000  # a publisher does not wait here: what is too much is lost
REPLAY_IDLE = 2.0  # seconds without an answer
REPLAY_TOTAL = 60.0  # seconds
QUIET = 1.0  # seconds without a live message, after one: time to ask whether one was lost
RECONNECT_MS, RECONNECT_MAX_MS = 100, 5000
AFRESH = 10.0  # seconds without a connection: ZMQ gives up where it was not spoken to as it should
KEEPALIVE = (10, 5, 3)  # seconds of silence, between probes, and probes: finds hosts that vanished
END = b"\xff" * 8

_EVENT = struct.Struct("=Hi")
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Subscription:
    """Keeps an index told of what one publisher's pod holds.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        turns: Turns,
        index: BlockIndex,
        slot: int,
        address: Address,
    ) -> None:
        self.address = address
        self.sequence = Sequence(self, replayable=bool(address.replay))
        self.connected = False
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
        self._events: list[Event] = []  # read, and not yet in the index
        self._quiet = True  # nothing came since the last check
        self._replay: zmq.Socket[bytes] | None = None
        self._asked_at = self._answered_at = 0.0
        self._connected_at = time.monotonic()  # or tried to
        self._live = self._socket(zmq.SUB, HIGH_WATER, address.live)
        self._live.subscribe(b"")
        self._monitor: zmq.Socket[bytes] = self._live.get_monitor_socket(_WATCHED)
        self._listen()
        self._source = index.open(slot)
        self._watch(self._live)
        self._watch(self._monitor)

    @property
    def held(self) -> dict[Tier, int]:
        """Blocks that the publisher holds."""
        return self._index.held(self._source)

    @property
    def cleared(self) -> int:
        """Times that all it held was forgotten: it said so, or what it holds was not certain."""
        return self._source.cleared

    @property
    def following(self) -> bool:
        """Whether all that the publisher told so far is known, as far as it can be."""
        return self.connected and not self.sequence.replaying

    def close(self) -> None:
        """Hear no more, and forget the pod."""
        self._index.close(self._source)
        self._events.clear()
        self._drop_replay()
        self._unwatch(self._monitor)
        self._unwatch(self._live)
        self._close_live()

    def tick(self, now: float) -> None:
        """Look at the clock, by time.monotonic; to be called about twice a second."""
        self.rate.update(self.events, now)
        if self._replay is not None:
            if now - self._answered_at > REPLAY_IDLE or now - self._asked_at > REPLAY_TOTAL:
                self.sequence.replay_failed()
                self._turns.ask(self)
        elif not self._quiet and self.last_batch is not None and now - self.last_batch > QUIET:
            self._quiet = True
            self.sequence.check()
        if self.connected:
            self._connected_at = now
        elif now - self._connected_at > AFRESH and not self.address.bound:
            self._connected_at = now
            with suppress(zmq.ZMQError):  # it has given up
                self._live.disconnect(self.address.live)
            self._live.connect(self.address.live)

    def turn(self) -> bool:
        """Read for a short while, and put what was read into the index. True: there is more."""
        if self._live.closed:
            return False
        until = time.perf_counter() + SLICE
        more = True
        while more and time.perf_counter() < until:
            more = self.sequence.advance() or self._receive()
        if not self.sequence.replaying:
            self._drop_replay()
        if self._events:
            events, self._events = self._events, []
            self._index.apply(self._source, events)
        return more

    # What the sequence wants

    def apply(self, payload: bytes) -> None:
        batch = decode(payload)
        self.batches += 1
        self.events += len(batch.events)
        self.malformed += batch.malformed
        self.unknown += batch.unknown
        self._events += batch.events

    def forget(self) -> None:
        self._events.clear()
        self._index.clear(self._source)

    def ask(self, first: int) -> None:
        self._drop_replay()  # a socket serves one question, so that no answer is to another one
        self._replay = self._socket(zmq.DEALER, REPLAY_HIGH_WATER, self.address.replay)
        self._replay.connect(self.address.replay)
        self._replay.send_multipart([b"", first.to_bytes(8, "big")], zmq.DONTWAIT)
        self._asked_at = self._answered_at = time.monotonic()
        self._watch(self._replay)
        self._turns.ask(self)  # sending may have taken the sign that there is something to read

    # What comes in

    def _receive(self) -> bool:
        """Read some messages. False: there are none.

        Live ones first, then the news of the connection they came by, then answers: whatever a
        process sent before another took its place is here when that one's answers are looked at.
        """
        messages = _read(self._live)
        if self._connected_anew():
            self.sequence.reconnected()
        for message in messages:
            self._hear(message)
        replay = self._replay
        if messages or replay is None:
            return bool(messages)
        answers = _read(replay)
        for answer in answers:
            self._hear_again(answer)
            if self._replay is not replay:
                break  # another question was asked
        return bool(answers)

    def _hear(self, message: list[bytes]) -> None:
        if len(message) < 2 or len(message[-2]) != 8:
            self.malformed += 1
            return
        self.last_batch = time.monotonic()
        self._quiet = False
        self.sequence.live(int.from_bytes(message[-2], "big"), message[-1])

    def _hear_again(self, answer: list[bytes]) -> None:
        self._answered_at = time.monotonic()
        number = answer[-2] if len(answer) > 1 else b""
        if answer[-1] in (b"", END) or number == END:
            self.sequence.replay_ended()
        elif len(number) == 8:
            self.sequence.replayed(int.from_bytes(number, "big"), answer[-1])
        else:
            self.malformed += 1

    def _connected_anew(self) -> bool:
        anew = False
        for message in _read(self._monitor):
            event, _ = _EVENT.unpack(message[0])
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            anew |= self.connected
        return anew

    # Sockets

    def _listen(self) -> None:
        """Connect, or wait for the publisher to. The monitor is there by now and misses nothing."""
        bound, address = self.address.bound, self.address.live
        try:
            if bound:
                self._live.bind(address)
            else:
                self._live.connect(address)
        except zmq.ZMQError as error:
            self._close_live()
            reason = zmq.strerror(error.errno or 0)
            raise OSError(
                f"cannot {'listen at' if bound else 'connect to'} {address}: {reason}"
            ) from None

    def _close_live(self) -> None:
        self._live.disable_monitor()
        self._monitor.close(linger=0)
        self._live.close(linger=0)

    def _socket(self, kind: int, high_water: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.rcvhwm = high_water
        socket.linger = 0
        socket.maxmsgsize = MAX_PAYLOAD
        socket.ipv6 = not address.startswith(("tcp://*:", "tcp://0.0.0.0:"))
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.add_reader(socket.fileno(), partial(self._wake, socket))

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(socket.fileno())

    def _wake(self, socket: zmq.Socket[bytes]) -> None:
        socket.get(zmq.EVENTS)  # takes the sign off the descriptor; it comes again after EAGAIN
        self._turns.ask(self)

    def _drop_replay(self) -> None:
        if self._replay is not None:
            self._unwatch(self._replay)
            self._replay.close(linger=0)
            self._replay = None


def _read(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    try:
        while len(messages) < AT_ONCE:
            messages.append(socket.recv_multipart(zmq.DONTWAIT))
    except zmq.Again:
        pass
    return messages
