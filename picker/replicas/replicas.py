"""All of a picker's part among the pickers of its pool."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from picker.config import Config, ReplicasSection
from picker.replicas import replica_pb2 as pb
from picker.replicas.known import Known
from picker.replicas.news import News
from picker.replicas.peer import Peer
from picker.replicas.peers import Peers
from picker.replicas.server import ReplicaServer
from picker.replicas.told import Told

FIRST_ROUND = 2.0  # seconds that others are given to tell what they know, before the first pick
LEAST_SECRET, MOST_SECRET = 16, 4096  # bytes


class Replicas:
    """Follows the other pickers, and is followed by them."""

    def __init__(
        self, config: Config, known: Known, secret: bytes, on_entry: Callable[[bytes], None]
    ) -> None:
        """
        Args:
            secret: see `read_secret`.
            on_entry: takes entries of Envoy's access log that another picker got, about ours.
        """
        self.replica = secrets.randbits(63) + 1
        hello = pb.Hello(replica=self.replica, pool=known.pool.name)
        listen = config.listen
        self.news = News(known, self.replica)
        self.told = Told(known, self.news, on_entry)
        self.peers = Peers(config.replicas, lambda address: Peer(address, hello, secret, self.told))
        self.server = ReplicaServer(self.news, known.pool.name, secret, listen.host, listen.replica)

    async def start(self) -> None:
        """Follow the others."""
        await self.peers.start()

    async def first_round(self) -> None:
        """Wait until the others have told what they know, but not for long."""
        await self.peers.first_round(FIRST_ROUND)

    async def stop(self) -> None:
        await self.peers.stop()
        await self.server.stop()

    def state(self) -> dict[str, Any]:
        """For people, to be written as JSON."""
        now = time.monotonic()
        return {
            "replica": f"{self.replica:016x}",
            "followers": self.news.followers,
            "peers": [
                {
                    "address": peer.address,
                    "replica": None if peer.replica is None else f"{peer.replica:016x}",
                    "connected": peer.connected,
                    "updateAgeSeconds": now - peer.updated,
                    "error": peer.error,
                }
                for peer in self.peers.all
            ],
        }


def is_one_of_many(settings: ReplicasSection) -> bool:
    """Whether there are to be other pickers."""
    return bool(settings.peers or settings.service)


def read_secret(settings: ReplicasSection) -> bytes:
    """What only the pickers of the pool know; empty where that is nothing.

    Raises:
        ValueError: the file cannot be used.
    """
    if not settings.secret:
        return b""
    path = Path(settings.secret)
    try:
        with path.open("rb") as file:
            secret = file.read(MOST_SECRET + 1).strip()
    except OSError as problem:
        raise ValueError(f"replicas.secret: {path}: {problem.strerror}") from problem
    if not LEAST_SECRET <= len(secret) <= MOST_SECRET:
        raise ValueError(f"replicas.secret: {path} must hold {LEAST_SECRET} to {MOST_SECRET} bytes")
    return secret
