"""Two pickers in processes of their own, each behind an Envoy, that share quotas in real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.gateway import CHAT, JSON, chat, until
from tests.e2e.picker_process import Profile, Site, running_site
from tests.e2e.pods import ACT, USAGE
from tests.e2e.test_quota import TENANT, Admin
from tests.picker.quota.redis_server import RedisServer, running

PARALLEL = 50
TTL = 20  # seconds of a reservation: longer than any request here that ends, on a busy machine


@dataclass
class Fleet:
    """Both, and who administers their quotas."""

    sites: list[Site]
    admin: Admin

    async def ask(self, number: int, tenant: str, **fields: object) -> int:
        """The status of a request through one or the other."""
        site = self.sites[number % len(self.sites)]
        told = JSON | {TENANT: tenant}
        async with site.http.post(CHAT, data=chat(**fields), headers=told) as answer:  # type: ignore[arg-type]
            await answer.read()
            return answer.status

    async def burst(self, tenant: str, **fields: object) -> Counter[int]:
        asked = (self.ask(number, tenant, **fields) for number in range(PARALLEL))
        return Counter(await asyncio.gather(*asked))

    async def hold(self, number: int, tenant: str) -> aiohttp.ClientResponse:
        """A request that does not end."""
        told = JSON | {TENANT: tenant, ACT: "stream"}
        return await self.sites[number].http.post(
            CHAT, data=chat(stream=True, max_tokens=100), headers=told
        )


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running() as server:
        yield server


@asynccontextmanager
async def running_fleet(
    redis: RedisServer, folder: Path, profile: Profile, ttl: int = TTL
) -> AsyncIterator[Fleet]:
    url = f"{redis.url}?name={folder.name}"
    more = (
        f"identity: {{header: {TENANT}}}\n"
        f"quota: {{enabled: true, store: '{url}', timeout: 10s, reservationTtl: {ttl}s}}\n"
    )
    async with AsyncExitStack() as stack:
        admin = Admin(url)
        stack.push_async_callback(admin.store.close)
        sites = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            site = running_site(profile, folder / name, more=more)
            sites.append(await stack.enter_async_context(site))
        yield Fleet(sites, admin)


@pytest.mark.parametrize("profile", ["standard", "lean"])
async def test_requests_in_parallel_never_pass_a_limit_that_pickers_share(
    redis: RedisServer, tmp_path: Path, profile: Profile
) -> None:
    async with running_fleet(redis, tmp_path, profile) as fleet:
        await fleet.admin.limit("many", "requests=20/day")
        assert await fleet.burst("many") == {200: 20, 429: 30}

        await fleet.admin.limit("tokens", "output-tokens=1000/day")
        statuses = await fleet.burst("tokens", max_tokens=100)
        passed = statuses[200]
        assert passed + statuses[429] == PARALLEL
        assert passed >= 10, "what was reserved fits ten times, and what is settled makes room"
        await until(
            lambda: fleet.admin.used("tokens", "output-tokens/day"),
            (passed * USAGE["completion_tokens"], 0),
        )
        assert await fleet.admin.store.verify() == []


async def test_the_ledger_balances_after_a_picker_was_killed(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with running_fleet(redis, tmp_path, "standard", ttl=8) as fleet:
        admin, day = fleet.admin, "output-tokens/day"
        for tenant in ("dies", "lives"):
            await admin.limit(tenant, "output-tokens=1000/day")

        async def open_of(tenant: str) -> int:
            return len(await admin.store.reservations(f"tenant/{tenant}"))

        late = await fleet.hold(1, "lives")
        for _ in range(3):
            await fleet.hold(0, "dies")
        assert await open_of("dies") == 3
        assert await fleet.ask(1, "lives", max_tokens=100) == 200
        await fleet.sites[0].picker.kill()
        assert await admin.store.verify() == []

        await until(lambda: open_of("dies"), 0)
        assert await admin.used("dies", day) == (0, 0)
        await until(lambda: open_of("lives"), 0)
        assert await admin.store.verify() == []

        assert await fleet.ask(1, "dies", max_tokens=1000) == 200
        used = USAGE["completion_tokens"]
        await until(lambda: admin.used("dies", day), (used, 0))
        for pod in fleet.sites[1].pods:  # what outlived its reservation is not lost
            pod.go.release()
        await late.content.readuntil(b"\n\n")
        for pod in fleet.sites[1].pods:
            pod.stop()
        await late.read()
        await until(lambda: admin.used("lives", day), (used + 1, 0))
        assert await admin.store.verify() == []
