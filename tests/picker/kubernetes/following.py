"""A pool that follows the API server of the tests."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from picker.config import Config, Kubernetes, PoolSection, Rewrite
from picker.kubernetes.follow import KubernetesPool
from picker.kubernetes.pace import Pace
from picker.pool import Endpoint, Pool
from tests.kubernetes_api import KubernetesApi, kubeconfig

DEADLINE = 30.0  # seconds, on a busy machine
QUICK = Pace(
    first_pause=0.002,
    longest_pause=0.05,
    silence=5.0,
    watch=60.0,
    absent_pause=0.02,
    absent_after=0.0,
    gather=0.0,
)


@dataclass
class Followed:
    """What came of it."""

    pool: Pool
    kubernetes: KubernetesPool
    priorities: dict[str, int] = field(default_factory=dict)
    rules: Sequence[Rewrite] = ()
    seen: list[frozenset[str]] = field(default_factory=list)  # each state of the pool, by name
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def addresses(self) -> set[str]:
        return set(self.pool.endpoints)

    @property
    def names(self) -> dict[str, str]:
        """Addresses by name."""
        return {each.name: each.address for each in self.pool.endpoints.values()}

    def added(self, _: Endpoint) -> None:
        self._saw()

    def removed(self, _: Endpoint) -> None:
        self._saw()

    def take_priorities(self, priorities: dict[str, int]) -> None:
        self.priorities = priorities
        self.changed.set()

    def take_rules(self, rules: Sequence[Rewrite]) -> None:
        self.rules = rules
        self.changed.set()

    def _saw(self) -> None:
        self.seen.append(frozenset(self.pool.endpoints))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a change of the pool, or of what is known, brings about."""
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self.changed.clear()
                try:  # what is not told by the pool is looked at now and then
                    await asyncio.wait_for(self.changed.wait(), 0.01)
                except TimeoutError:
                    continue


def event(what: str, thing: object) -> bytes:
    """A line of a watch."""
    return json.dumps({"type": what, "object": thing}).encode() + b"\n"


def config_of(api: KubernetesApi, settings: Mapping[str, Any], **more: Any) -> Config:
    """`more`: further sections."""
    path = kubeconfig(api, Path(tempfile.mkdtemp(dir=api.folder)))
    kubernetes = msgspec.convert({"kubeconfig": str(path), **settings}, Kubernetes)
    return Config(pool=PoolSection(kubernetes=kubernetes), **more)


@asynccontextmanager
async def following(
    api: KubernetesApi,
    settings: Mapping[str, Any] | None = None,
    *,
    pace: Pace = QUICK,
    wait: bool = True,
    **more: Any,
) -> AsyncIterator[Followed]:
    """By default InferencePool `demo`; with `wait`, once the first round is over."""
    pool = Pool("demo")
    config = config_of(api, {"pool": "demo"} if settings is None else settings, **more)
    followed: Followed
    kubernetes = KubernetesPool(
        config,
        pool,
        on_priorities=lambda each: followed.take_priorities(each),
        on_rules=lambda each: followed.take_rules(each),
        pace=pace,
    )
    followed = Followed(pool, kubernetes)
    pool.listen(followed)
    try:
        await kubernetes.start()
        if wait:
            await asyncio.wait_for(kubernetes.first_round(), DEADLINE)
        yield followed
    finally:
        await kubernetes.stop()
