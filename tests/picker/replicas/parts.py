"""A picker's shared parts without servers, on clocks that tests move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from picker.config import (
    Config,
    EndpointSpec,
    Flow,
    Listen,
    Prefix,
    ReplicasSection,
)
from picker.config import Sessions as SessionSettings
from picker.flow import Flow as FlowControl
from picker.load import Load
from picker.pool import Endpoint, Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.replicas import replica_pb2 as pb
from picker.replicas.known import Known
from picker.replicas.news import News
from picker.replicas.outbox import Outbox
from picker.replicas.replicas import Replicas
from picker.replicas.told import Told
from picker.sessions import Sessions
from picker.waiting import Visit

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
BLOCK = 256


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Room:
    num_pods = 3

    def room(self) -> int:
        return 1 << 30


class Picker:
    """One of several, by a number from 1. It is told of nothing unless a test does it."""

    def __init__(self, number: int, clock: Clock | None = None, pool: str = "test") -> None:
        clock = clock or Clock()
        self.number = number
        self.pool = Pool(pool)
        self.load = Load(self.pool, clock=clock)
        self.prompts = ApproximatePrefix(self.pool, Prefix())
        self.sessions = Sessions(SessionSettings(), clock=clock)
        self.flow = FlowControl(Flow(), Room())
        self.set_pool(ADDRESSES)
        self.known = Known(self.pool, self.load, self.prompts, self.sessions, self.flow)
        self.news = News(self.known, number)
        self.entries: list[bytes] = []
        self.told = Told(self.known, self.news, self.entries.append)

    def set_pool(self, addresses: Sequence[str]) -> None:
        self.pool.update([EndpointSpec(address=address) for address in addresses])

    def __getitem__(self, address: str) -> Endpoint:
        return self.pool.endpoints[address]

    # What happens at it

    def pick(self, address: str, tokens: int) -> None:
        self.load.credit(self[address], tokens)
        self.load.picked(self[address], cold=False)

    def end(self, address: str, tokens: int) -> None:
        self.load.release(self[address], tokens)

    def learn(self, address: str, keys: Sequence[int]) -> None:
        self.prompts._learn(list(keys), self[address])  # as `learn` does once a prompt is matched

    def serve(self, tenant: str, tokens: int, priority: int = 0) -> None:
        """A request comes, goes and ends."""
        visit = Visit(tenant, priority, prompt_tokens=tokens)
        assert self.flow.wait(visit) is None
        self.flow.picked(visit)
        self.flow.left(visit, tokens, 0)

    # What is known of it

    def loads(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens on each pod, of all pickers."""
        found = {}
        for address, endpoint in self.pool.endpoints.items():
            load = self.load.describe(endpoint)
            requests, tokens, *_ = load.elsewhere
            found[address] = (load.inflight + requests, load.inflight_tokens + tokens)
        return found

    def holds(self, keys: Sequence[int]) -> dict[str, int]:
        """Leading blocks on each pod."""
        depths = self.prompts._index.match(list(keys))
        return {address: int(depths[self[address].slot]) for address in ADDRESSES}

    def service(self) -> dict[tuple[int, str], float]:
        """What each tenant got of all pickers."""
        return {
            (band.priority, counter.tenant): counter.service
            for band in self.flow.bands
            for counter in band.vtc
        }

    def homes(self) -> dict[bytes, str]:
        found = {}
        for key in self.sessions.keys():  # noqa: SIM118
            endpoint = self.sessions.find(key)
            if endpoint is not None:
                found[key] = endpoint.address
        return found

    # What is told

    def hear(self, message: bytes) -> None:
        for _ in self.told.apply(pb.Update.FromString(message)):
            pass

    def snapshot(self) -> list[bytes]:
        self.news.flush()
        return list(self.news.snapshot())


def sent(outbox: Outbox) -> list[bytes]:
    """All updates that wait for a follower, which has lost none."""
    found = []
    while outbox._waiting:
        found.append(outbox._waiting.popleft())
    return found


class Node:
    """A picker that follows others over gRPC, and is followed."""

    def __init__(
        self,
        port: int,
        peers: Sequence[int],
        *,
        pool: str = "test",
        secret: bytes = b"",
        service: str = "",
    ) -> None:
        """`port`, `peers`: of listen.replica."""
        self.picker = Picker(0, pool=pool)
        config = Config(
            listen=Listen(replica=port),
            replicas=ReplicasSection(
                peers=[f"127.0.0.1:{peer}" for peer in peers], service=service
            ),
        )
        self.replicas = Replicas(config, self.picker.known, secret, self.picker.entries.append)

    async def __aenter__(self) -> Node:
        await self.replicas.server.start()
        await self.replicas.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.replicas.stop()

    @property
    def connected(self) -> list[bool]:
        return [peer.connected for peer in self.replicas.peers.all]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # of other sockets
            await asyncio.sleep(0.005)
