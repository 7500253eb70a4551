"""Pods replaced one by one under load, as a Deployment does: nobody notices."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from picker.config import Kubernetes, PoolSection
from tests.e2e.gateway import CHAT, DEADLINE, JSON, Gateway, running_gateway, until
from tests.e2e.workers import WorkerProcess
from tests.kubernetes_api import KubernetesApi, kubeconfig, running_kubernetes
from tests.kubernetes_objects import inference_pool, pod
from tests.worker.process import free_ports

CLIENTS = 8
TOKENS = 40  # of an answer, which takes a quarter of a second


@dataclass
class Replica:
    """One pod: its objects, and the worker in it."""

    name: str
    ip: str
    worker: WorkerProcess

    @property
    def address(self) -> str:
        return self.worker.address

    def told(self, *, ready: bool, leaving: bool = False) -> dict[str, Any]:
        more = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {}
        return pod(self.name, self.ip, ready=ready, uid=f"uid-of-{self.name}", **more)


class Cluster:
    """A Deployment that is rolled by hand."""

    def __init__(self, api: KubernetesApi, port: int) -> None:
        self._api = api
        self._port = port
        self._numbers = count(1)
        api.apply(inference_pool(ports=[port]))

    def replica(self, ip: str = "") -> Replica:
        number = next(self._numbers)
        ip = ip or f"127.0.1.{number}"
        worker = WorkerProcess("--no-kv-events", host=ip, port=self._port)
        return Replica(f"llm-{number}", ip, worker)

    async def start(self, replica: Replica) -> None:
        self._api.apply(replica.told(ready=False))
        await replica.worker.start()
        self._api.apply(replica.told(ready=True))

    def terminate(self, replica: Replica) -> None:
        """Before its SIGTERM, for which a preStop hook waits."""
        self._api.apply(replica.told(ready=True, leaving=True))

    async def remove(self, replica: Replica) -> None:
        """SIGTERM, and what comes after it."""
        self._api.apply(replica.told(ready=False, leaving=True))
        assert await replica.worker.stop() == 0
        self._api.delete(pod(replica.name))


@dataclass
class Load:
    """Clients that ask one thing after the other until they are stopped."""

    gateway: Gateway
    answers: Counter[str] = field(default_factory=Counter)
    stopping: bool = False
    asked: int = 0

    async def client(self, number: int) -> None:
        while not self.stopping:
            self.asked += 1
            streams = self.asked % 2 == 0
            text = f"Client {number % 3} tells a long story. " * 20 + str(self.asked)
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": TOKENS,
                "stream": streams,
            }
            async with self.gateway.http.post(
                CHAT, data=json.dumps(body), headers=JSON
            ) as response:
                data = await response.read()
                self.answers[self.verdict(response.status, data, streams)] += 1

    @staticmethod
    def verdict(status: int, data: bytes, streams: bool) -> str:
        """`whole`, or what is wrong with an answer."""
        if status != 200:
            return f"{status} {data[:200]!r}"
        if not streams:
            answer = json.loads(data)
            whole = answer["usage"]["completion_tokens"] == TOKENS
        else:
            *chunks, done = (line for line in data.split(b"\n\n") if line)
            last = json.loads(chunks[-1].removeprefix(b"data: "))
            whole = done == b"data: [DONE]" and last["choices"][0]["finish_reason"] == "length"
        return "whole" if whole else f"not whole: {data[-200:]!r}"

    async def more(self, requests: int = CLIENTS) -> None:
        """Wait until so many requests that begin from now on have been answered."""
        wanted = self.asked + CLIENTS + requests
        async with asyncio.timeout(DEADLINE):
            while self.answers.total() < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def serving(gateway: Gateway) -> set[str]:
    """The addresses of the picker's endpoints that tell their load."""
    async with gateway.admin.get("/debug/state") as response:
        pods = (await response.json())["pool"]["pods"]
    return {each["address"] for each in pods if each["fresh"]}


@pytest.fixture(params=["standard", "lean"])
async def gateway_and_cluster(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Gateway, Cluster, list[Replica], list[Replica]]]:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_kubernetes())
        (port,) = free_ports(1)
        cluster = Cluster(api, port)
        old = [cluster.replica(), cluster.replica()]
        new = [cluster.replica(), cluster.replica(old[0].ip)]  # free again by then
        for replica in (*old, *new):
            stack.push_async_callback(replica.worker.kill)
        await asyncio.gather(*(cluster.start(replica) for replica in old))
        pool = PoolSection(
            kubernetes=Kubernetes(pool="demo", kubeconfig=str(kubeconfig(api, tmp_path)))
        )
        gateway = await stack.enter_async_context(
            running_gateway(pods=0, discover=True, pool=pool, profile=request.param)
        )
        yield gateway, cluster, old, new


async def test_nobody_notices_that_pods_are_replaced(
    gateway_and_cluster: tuple[Gateway, Cluster, list[Replica], list[Replica]],
) -> None:
    gateway, cluster, old, new = gateway_and_cluster
    load = Load(gateway)
    clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    await load.more()
    running = {replica.address for replica in old}
    for leaving, coming in zip(old, new, strict=True):
        await cluster.start(coming)
        running.add(coming.address)
        await until(lambda: serving(gateway), running)
        await load.more()
        cluster.terminate(leaving)
        running.remove(leaving.address)
        await until(lambda: serving(gateway), running)
        await load.more()  # whatever was sent to it before has arrived there
        await cluster.remove(leaving)
    await load.more()
    load.stopping = True
    await asyncio.gather(*clients)

    assert load.answers.keys() == {"whole"}
    await gateway.idle()
    assert await gateway.metric("inference_objective_request_error_total") == 0
    assert await gateway.metric("warmpath_refusals_total") == 0
    async with gateway.admin.get("/debug/decisions?limit=1024") as response:
        decisions = (await response.json())["decisions"]
    assert len(decisions) == load.asked
    assert {each["outcome"] for each in decisions} == {"completed"}
    served = {each["endpoint"] for each in decisions}
    assert served == {replica.address for replica in (*old, *new)}
    assert await serving(gateway) == {replica.address for replica in new} == running
