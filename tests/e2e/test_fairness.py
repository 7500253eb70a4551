"""Fair shares of saturated pods, through real Envoy.

The workers are simulated: all of them is real but for the model. VTC's bounds (OSDI 2024) are
asserted in tokens, never in seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from picker.config import Flow, Identity, Saturation
from picker.cost import TokenCost
from tests.e2e.gateway import JSON, Gateway, running_gateway, until
from tests.e2e.workers import BLOCK, running_workers

TENANT = "x-gateway-inference-fairness-id"
PODS = 2
AT_ONCE = 4  # requests that run on a pod
QUEUE = 1  # that may wait there
PROMPT, OUTPUT = 64, 16  # tokens of each request; no two begin alike
BLOCKS = AT_ONCE * (PROMPT + OUTPUT) // BLOCK  # of a pod's KV cache
COST = TokenCost()  # the default: 1 for a prompt token, 2 for one of the answer
EACH = COST(PROMPT, OUTPUT)
ON_PODS = PODS * (AT_ONCE + QUEUE)  # requests, at most
EVEN, GREEDY = 60, 180  # requests
U = COST.most(PODS * (BLOCKS * BLOCK + QUEUE * PROMPT), ON_PODS)  # the paper's


class Range:
    """The least and the greatest of some numbers."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def add(self, number: float) -> None:
        self.seen.append(number)

    @property
    def width(self) -> float:
        return max(self.seen) - min(self.seen)


@dataclass
class Clients:
    """What clients of all tenants asked for and got."""

    gateway: Gateway
    http: aiohttp.ClientSession
    served: Counter[str] = field(default_factory=Counter)  # cost of the tokens that came
    started: Counter[str] = field(default_factory=Counter)  # answers
    leads: Range | None = None  # of the greedy over the even, while somebody wants to know
    came: asyncio.Event = field(default_factory=asyncio.Event)  # another answer has begun
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self, tenant: str) -> None:
        prompt = [self.chance.randrange(256) for _ in range(PROMPT)]
        body = {
            **{"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        headers = JSON | {TENANT: tenant}
        cost, url = 0.0, "/v1/completions"
        async with self.http.post(url, data=json.dumps(body), headers=headers) as answer:
            assert answer.status == 200
            self.started[tenant] += 1
            self.came.set()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    usage = json.loads(line.removeprefix(b"data: "))["usage"]
                    now = COST(usage["prompt_tokens"], usage["completion_tokens"])
                    self._got(tenant, now - cost)
                    cost = now
        assert cost == EACH

    def _got(self, tenant: str, more: float) -> None:
        self.served[tenant] += more  # type: ignore[assignment]
        if self.leads is not None:
            self.leads.add(self.served["greedy"] - self.served["even"])

    async def next_answer(self) -> None:
        """Wait until another one begins."""
        self.came.clear()
        await self.came.wait()

    async def tenants(self) -> dict[str, dict[str, Any]]:
        """What the picker counts of each, at the priority that all have."""
        async with self.gateway.admin.get("/debug/fairness") as page:
            (band,) = (await page.json())["priorities"]
        assert band["serviceBound"] == U
        return {each["tenant"]: each for each in band["tenants"]}

    async def picks(self) -> list[dict[str, Any]]:
        """All of them, the oldest first."""
        async with self.gateway.admin.get("/debug/decisions?limit=1024") as page:
            return list(reversed((await page.json())["decisions"]))


@pytest.fixture(params=["standard", "lean"])
async def clients(request: pytest.FixtureRequest) -> AsyncIterator[Clients]:
    flags = ("--max-num-seqs", str(AT_ONCE), "--num-blocks", str(BLOCKS))
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(running_workers(*[flags] * PODS))
        gateway = await stack.enter_async_context(
            running_gateway(
                profile=request.param,
                pods=0,
                addresses=[worker.address for worker in workers],
                identity=Identity(header=TENANT),
                flow=Flow(enabled=True, saturation=Saturation(waiting=QUEUE)),
            )
        )
        connections = aiohttp.TCPConnector(limit=0)
        http = aiohttp.ClientSession(gateway.envoy.url, connector=connections)
        yield Clients(gateway, await stack.enter_async_context(http))


async def test_who_sends_three_times_more_gets_no_more_and_who_sends_little_goes_next(
    clients: Clients,
) -> None:
    await clients.ask("modest")
    (alone,) = await clients.picks()
    assert alone["waitedSeconds"] == 0
    order = ["greedy"] * (GREEDY // EVEN) + ["even"]
    crowd = [asyncio.create_task(clients.ask(tenant)) for tenant in order * EVEN]

    async def many_wait() -> bool:
        return clients.gateway.service.waiting > len(crowd) / 2

    await until(many_wait, True)
    received = clients.leads = Range()
    counted = Range()
    modest = asyncio.create_task(clients.ask("modest"))
    while clients.started["even"] < EVEN - ON_PODS:  # some of its requests wait, whatever else
        tenants = await clients.tenants()
        assert tenants["even"]["waiting"] and tenants["greedy"]["waiting"]
        counted.add(tenants["greedy"]["service"] - tenants["even"]["service"])
        await clients.next_answer()
        if modest.done():
            await modest
            modest = asyncio.create_task(clients.ask("modest"))
    clients.leads = None
    assert received.width <= 2 * U, "theorem 4.4, by what clients got"
    assert counted.width <= 2 * U, "theorem 4.4, by what the picker counts"
    await asyncio.gather(modest, *crowd)
    await clients.gateway.idle()

    told = {name: each["service"] for name, each in (await clients.tenants()).items()}
    assert told == dict(clients.served), "in the end, both have the same to the token"
    _assert_modest_went_next(await clients.picks())


def _assert_modest_went_next(picks: Sequence[dict[str, Any]]) -> None:
    """A tenant under its share waits as alone, not at all, plus the bound (theorem 4.11)."""
    bound = 2 * (len({pick["tenant"] for pick in picks}) - 1) * U
    overtook = 0.0
    for number, pick in enumerate(picks):
        if pick["tenant"] != "modest":
            continue
        came = _came(pick)
        went_before = sum(EACH for other in picks[:number] if other["pickedAt"] > came)
        assert went_before <= bound
        overtook = max(overtook, sum(EACH for other in picks[number:] if _came(other) < came))
    assert overtook > bound, "in the order of their arrival it would have waited for longer"


def _came(pick: dict[str, Any]) -> float:
    """Unix seconds."""
    return float(pick["pickedAt"] - pick["waitedSeconds"])
