"""Two pickers, real processes, behind one real Envoy and before simulated workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from picker.config import Config, EndpointSpec, PickerAddress, PoolSection
from picker.config import Envoy as EnvoySection
from picker.envoy.bootstrap import bootstrap
from tests.e2e.gateway import DEADLINE, until
from tests.e2e.picker_process import PickerProcess, Profile
from tests.e2e.workers import running_workers
from tests.envoy_process import Envoy, running_envoy

COMPLETIONS = "/v1/completions"
PROFILES: list[Profile] = ["standard", "lean"]


@dataclass(frozen=True, slots=True)
class Site:
    """What runs, and clients of it."""

    pickers: Sequence[PickerProcess]
    admins: Sequence[aiohttp.ClientSession]
    envoy: Envoy
    http: aiohttp.ClientSession

    async def state(self, picker: int) -> Any:
        async with self.admins[picker].get("/debug/state") as response:
            return await response.json()

    async def decision(self, picker: int, request_id: str) -> Any:
        """What a picker remembers of a request; None: it was not asked."""
        found = self.admins[picker].get("/debug/decisions", params={"request_id": request_id})
        async with found as response:
            return (await response.json())["decisions"][0] if response.status == 200 else None

    async def decisions(self, picker: int) -> list[Any]:
        async with self.admins[picker].get("/debug/decisions") as response:
            return list((await response.json())["decisions"])

    async def counted(self, picker: int) -> float:
        """Requests and tokens on all pods, its own and others', as a picker counts them."""
        names = ("inflightRequests", "inflightTokens", "elsewhereRequests", "elsewhereTokens")
        pods = (await self.state(picker))["pool"]["pods"]
        return sum(pod[name] for pod in pods for name in names)

    async def complete(self, prompt: str, request_id: str, tokens: int = 8) -> tuple[int, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens}
        headers = {"x-request-id": request_id}
        async with self.http.post(COMPLETIONS, json=body, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def running_site(
    profile: Profile, pickers: int, folder: Path, addresses: Sequence[str], more: str = ""
) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        processes = [PickerProcess(addresses, folder, more) for _ in range(pickers)]
        peers = [f'"127.0.0.1:{each.listen.replica}"' for each in processes]
        for process in processes:
            stack.push_async_callback(process.kill)
            if pickers > 1:
                process.configure(f"replicas: {{peers: [{', '.join(peers)}]}}\n")
        await asyncio.gather(*(process.start() for process in processes))
        config = Config(
            listen=processes[0].listen,
            pool=PoolSection(endpoints=[EndpointSpec(address=address) for address in addresses]),
            envoy=EnvoySection(
                profile=profile,
                pickers=[
                    PickerAddress(grpc=each.listen.grpc, http=each.listen.http)
                    for each in processes
                ],
            ),
        )
        envoy = await stack.enter_async_context(running_envoy(bootstrap(config, discover=True)))
        await envoy.wait_for_stat("cluster.pods.membership_total", len(addresses))
        for cluster in ["picker-grpc", *(["picker-http"] if profile == "lean" else [])]:
            await envoy.wait_for_stat(f"cluster.{cluster}.membership_healthy", pickers)
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(envoy.url, connector=connector)
        )
        admins = [
            await stack.enter_async_context(
                aiohttp.ClientSession(f"http://127.0.0.1:{process.listen.admin}")
            )
            for process in processes
        ]
        site = Site(processes, admins, envoy, http)
        for picker in range(pickers):
            await until(lambda picker=picker: followed(site, picker), pickers - 1)
        yield site


async def followed(site: Site, picker: int) -> int:
    replicas = (await site.state(picker))["replicas"]
    return 0 if replicas is None else sum(peer["connected"] for peer in replicas["peers"])


def system(number: int) -> str:
    return f"You are assistant {number} of {'many, ' * 200} and you answer briefly. "


@dataclass(slots=True)
class Talk:
    """A conversation."""

    site: Site
    name: str
    text: str
    turns: int = 0
    prompt_tokens: int = 0  # of all turns
    cached_tokens: int = 0

    async def turn(self) -> None:
        self.turns += 1
        self.text += f"[{self.name}, turn {self.turns}] {'and what then? ' * 20}"
        status, answer = await self.site.complete(self.text, f"{self.name}-{self.turns}")
        assert status == 200, answer
        usage = answer["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.text += answer["choices"][0]["text"]


async def hit_ratio(site: Site) -> float:
    """Of conversations with three system prompts. They take turns, one request at a time.

    They are odd in number, so that pickers asked in turns meet each of them.
    """
    talks = [
        Talk(site, f"talk-{group}-{number}", system(group))
        for number in range(3)
        for group in range(3)
    ]
    for _ in range(4):
        for talk in talks:
            await talk.turn()
    return sum(talk.cached_tokens for talk in talks) / sum(talk.prompt_tokens for talk in talks)


@pytest.mark.parametrize("profile", PROFILES)
async def test_two_pickers_find_as_much_in_caches_as_one(profile: Profile, tmp_path: Path) -> None:
    flags = [()] * 4
    ratios = []
    for pickers in (1, 2):
        async with running_workers(*flags) as workers:
            addresses = [worker.address for worker in workers]
            async with running_site(profile, pickers, tmp_path, addresses) as site:
                ratios.append(await hit_ratio(site))
                for picker in range(pickers):
                    await until(lambda picker=picker: site.counted(picker), 0)
                # Whichever picker Envoy told the end of a request: it is known where it was picked.
                picks = [await site.decisions(picker) for picker in range(pickers)]
                assert all(picks)
                assert sum(map(len, picks)) == 36
                for pick in chain(*picks):
                    assert pick["outcome"] == "completed"
                    assert pick["usage"]["promptTokens"] > 0
    one, two = ratios
    assert one > 0.5
    assert two >= 0.97 * one


@dataclass(slots=True)
class Seen:
    """How one request went."""

    started: float
    ended: float = 0.0
    status: int = 0


@dataclass(slots=True)
class Load:
    """Requests one after the other from many clients, until told to stop."""

    site: Site
    seen: dict[str, Seen] = field(default_factory=dict)
    stop: bool = False

    async def client(self, number: int) -> None:
        count = 0
        while not self.stop:
            name = f"load-{number}-{count}"
            count += 1
            seen = self.seen[name] = Seen(time.monotonic())
            try:
                seen.status, _ = await self.site.complete(f"{name} {'x' * 600}", name, 4)
            except aiohttp.ClientError:
                seen.status = 599
            seen.ended = time.monotonic()

    @property
    def answered(self) -> int:
        return sum(seen.status == 200 for seen in self.seen.values())


@pytest.mark.parametrize("profile", PROFILES)
async def test_a_killed_picker_takes_nothing_along_but_what_it_was_asked_just_then(
    profile: Profile, tmp_path: Path
) -> None:
    async with (
        running_workers((), ()) as workers,
        running_site(profile, 2, tmp_path, [worker.address for worker in workers]) as site,
    ):
        prompts = {f"learnt-{number}": f"{number} {'warm path ' * 300}" for number in range(8)}
        first: dict[str, Any] = {}
        for name, prompt in prompts.items():
            assert (await site.complete(prompt, name))[0] == 200
            for picker in range(2):
                first[name] = first.get(name) or await site.decision(picker, name)
        load = Load(site)
        clients = [asyncio.create_task(load.client(number)) for number in range(12)]
        async with asyncio.timeout(DEADLINE):
            while load.answered < 100:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            killed = time.monotonic()
            await site.pickers[1].kill()
            before = load.answered
            while load.answered < before + 300:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            load.stop = True
            await asyncio.gather(*clients)
        failed = {name: seen for name, seen in load.seen.items() if seen.status != 200}
        if profile == "lean":
            assert not failed  # another picker is asked
        for name, seen in failed.items():
            assert seen.started <= killed <= seen.ended, (name, seen, killed)
            assert await site.decision(0, name) is None, name  # it was the other picker's
        # The survivor knows all prompts, whoever was asked for them.
        own = 0
        for name, prompt in prompts.items():
            own += await site.decision(0, name) is not None
            assert (await site.complete(prompt, f"{name}-again"))[0] == 200
            again = await site.decision(0, f"{name}-again")
            matched = {pod["endpoint"]: pod["matchedTokens"] for pod in again["candidates"]}
            assert matched[first[name]["endpoint"]] > 0.9 * again["promptTokens"]
        assert 0 < own < len(prompts)
        await until(lambda: site.counted(0), 0)  # also of what the killed one had there
