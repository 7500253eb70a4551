"""Two pickers in processes of their own, each behind an Envoy, that share quotas in real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import CHAT, DEADLINE, JSON, chat, until
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

    async def owed(self) -> int:
        """Ended requests that the pickers have yet to tell the store."""
        return sum([(await self._quota(site))["owed"] for site in self.sites])

    async def caught_up(self, number: int) -> bool:
        """Whether a picker has told the store of all that ended but just now."""
        quota = await self._quota(self.sites[number])
        return bool(quota["storeUp"] and quota["owed"] < PARALLEL / 2)

    @staticmethod
    async def _quota(site: Site) -> dict[str, Any]:
        url = f"http://127.0.0.1:{site.picker.listen.admin}/debug/state"
        async with site.http.get(url) as page:
            return dict((await page.json())["gate"]["quota"])

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


class Crowd:
    """Clients of one site, who ask again as soon as they are answered."""

    def __init__(self, fleet: Fleet, number: int, tenant: str) -> None:
        self.statuses: Counter[int] = Counter()  # 0: no whole answer
        self._fleet = fleet
        self._number = number
        self._tenant = tenant
        self._answered = asyncio.Condition()
        self._going_on = True
        self._clients = [asyncio.create_task(self._client()) for _ in range(PARALLEL // 2)]

    async def _client(self) -> None:
        while self._going_on:
            try:
                status = await self._fleet.ask(self._number, self._tenant, max_tokens=100)
            except aiohttp.ClientError:
                status = 0
            async with self._answered:
                self.statuses[status] += 1
                self._answered.notify_all()
            await asyncio.sleep(0)

    async def answered(self, more: int) -> None:
        """Wait for so many more answers, whatever they say."""
        until = self.statuses.total() + more
        async with asyncio.timeout(DEADLINE), self._answered:
            await self._answered.wait_for(lambda: self.statuses.total() >= until)

    async def leave(self) -> None:
        self._going_on = False
        await asyncio.gather(*self._clients)


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


@pytest.mark.parametrize("profile", ["standard", "lean"])
async def test_the_ledger_balances_after_redis_and_a_picker_were_killed_under_load(
    tmp_path: Path, profile: Profile
) -> None:
    used, day = USAGE["completion_tokens"], "output-tokens/day"
    with running("--appendonly", "yes", "--appendfsync", "always") as redis:
        async with running_fleet(redis, tmp_path, profile, ttl=8) as fleet:
            admin = fleet.admin
            await admin.limit("dies", "output-tokens=1M/day", parent="org/all")
            await admin.limit("lives", "output-tokens=1M/day", parent="org/all")
            await admin.limit_of("org/all", "output-tokens=2M/day", "concurrency=1k")
            dying, living = Crowd(fleet, 0, "dies"), Crowd(fleet, 1, "lives")
            await living.answered(PARALLEL)
            redis.kill()
            await living.answered(PARALLEL)
            redis.start()
            await living.answered(PARALLEL)
            await until(lambda: fleet.caught_up(0), True)
            await fleet.sites[0].picker.kill()
            await living.answered(PARALLEL)
            redis.kill()
            redis.start()
            await fleet.sites[0].picker.start()
            await dying.answered(PARALLEL)
            await living.answered(PARALLEL)
            await asyncio.gather(dying.leave(), living.leave())
            assert set(living.statuses) == {200}

            await until(fleet.owed, 0)
            assert await admin.store.verify() == []
            answers = living.statuses[200]
            await until(lambda: admin.used("lives", day), (answers * used, 0))
            of_dying, held = await admin.used("dies", day)
            lost = dying.statuses[200] - of_dying / used
            assert 0 <= lost <= 2 * PARALLEL, "what it had not told when it was killed, twice never"
            assert await admin.used("dies", day, "org/all") == (answers * used + of_dying, held)
            await until(lambda: open_of(admin), 0)
            assert await admin.used("dies", day, "org/all") == (answers * used + of_dying, 0)
            assert await admin.store.verify() == []


async def test_the_ledger_balances_when_redis_comes_back_empty_under_load(tmp_path: Path) -> None:
    used, day = USAGE["completion_tokens"], "output-tokens/day"
    with running() as redis:
        async with running_fleet(redis, tmp_path, "standard") as fleet:
            admin = fleet.admin
            await admin.limit("one", "output-tokens=1M/day")
            await admin.limit("two", "output-tokens=1M/day")
            crowds = [Crowd(fleet, 0, "one"), Crowd(fleet, 1, "two")]
            for crowd in crowds:
                await crowd.answered(PARALLEL)
            redis.kill()
            before = [crowd.statuses[200] for crowd in crowds]
            redis.start()
            for crowd in crowds:
                await crowd.answered(PARALLEL)
            await asyncio.gather(*(crowd.leave() for crowd in crowds))
            await until(fleet.owed, 0)
            assert await admin.store.verify() == []
            assert await open_of(admin) == 0
            for crowd, answers, tenant in zip(crowds, before, ("one", "two"), strict=True):
                assert set(crowd.statuses) == {200}
                settled, _ = await admin.used(tenant, day)
                # What ended before is lost with Redis, and nothing that came after.
                least = (crowd.statuses[200] - answers - PARALLEL) * used
                assert least <= settled <= crowd.statuses[200] * used
            assert "restore" in {entry.action for entry in await admin.store.audit()}


async def open_of(admin: Admin) -> int:
    """Reservations."""
    return len(await admin.store.reservations())
