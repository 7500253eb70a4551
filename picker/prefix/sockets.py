"""ZMQ sockets that speak with publishers of KV events."""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import count

import zmq

from picker.prefix.addresses import Address
from picker.prefix.events import MAX_PAYLOAD

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
Message = list[bytes]  # its frames

HIGH_WATER = 256  # live messages that wait for us; the others wait with the publisher
REPLAY_HIGH_WATER = 100_000  # a publisher does not wait here: what is too much is lost
RECONNECT_MS, RECONNECT_MAX_MS = 100, 5000
KEEPALIVE = (10, 5, 3)  # seconds of silence, between probes, and probes: finds hosts that vanished
MAX_NEWS = 1000  # of a connection at once; there are a few

_NEWS = struct.Struct("=Hi")
_numbers = count()


class LiveSocket:
    """Gets live messages, and knows whether it is connected.

    Raises:
        OSError: the address cannot be listened at, or there are too many sockets.
    """

    def __init__(self, context: Context, address: Address) -> None:
        self.connected = False
        self._address = address
        self._sockets: list[Socket] = []  # live messages, and news of their connection
        try:
            live = _socket(context, zmq.SUB, HIGH_WATER, address.live)
            self._sockets.append(live)
            live.subscribe(b"")
            self._sockets.append(
                live.get_monitor_socket(
                    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED,
                    f"inproc://news-{next(_numbers)}",
                )
            )
            if address.bound:
                live.bind(address.live)
            else:
                live.connect(address.live)  # only now: the news of it must not be missed
        except zmq.ZMQError as error:
            self.close()
            what = "listen at" if address.bound else "connect to"
            raise OSError(f"cannot {what} {address.live}: {_reason(error)}") from None

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        """Those that have something to read when there is something to do."""
        live, monitor = self._sockets
        return live, monitor

    def read(self, most: int) -> list[Message]:
        """Messages that are here."""
        return read(self._sockets[0], most)

    def connected_anew(self) -> bool:
        """Whether a connection began since this was last called.

        If not, no message that has been read comes from it.
        """
        anew = False
        for news in read(self._sockets[1], MAX_NEWS):
            event, _ = _NEWS.unpack(news[0])
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            anew |= self.connected
        return anew

    def connect_afresh(self) -> None:
        """Connect, even where ZMQ has given up, as it does when it is spoken to in another way."""
        if not self._address.bound:
            with suppress(zmq.ZMQError):  # there is nothing left to disconnect
                self._sockets[0].disconnect(self._address.live)
            self._sockets[0].connect(self._address.live)

    def close(self) -> None:
        for socket in reversed(self._sockets):
            socket.close(linger=0)


def ask(context: Context, address: str, first: int) -> Socket:
    """Ask for a replay from this number on. Returns the socket that gets the answers.

    Raises:
        OSError: there are too many sockets.
    """
    try:
        socket = _socket(context, zmq.DEALER, REPLAY_HIGH_WATER, address)
        socket.connect(address)
        socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.DONTWAIT)
    except zmq.ZMQError as error:
        raise OSError(f"cannot connect to {address}: {_reason(error)}") from None
    return socket


def read(socket: Socket, most: int) -> list[Message]:
    """Messages that are here."""
    messages: list[Message] = []
    with suppress(zmq.Again):
        while len(messages) < most:
            messages.append(socket.recv_multipart(zmq.DONTWAIT))
    return messages


def _socket(context: Context, kind: int, high_water: int, address: str) -> Socket:
    socket = context.socket(kind)
    socket.rcvhwm = high_water
    socket.linger = 0
    socket.maxmsgsize = MAX_PAYLOAD
    socket.ipv6 = not address.startswith(("tcp://*:", "tcp://0.0.0.0:"))
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE
    return socket


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)
