"""What becomes of requests while a picker or its Envoy goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from picker import tickets
from picker.names import STREAM
from tests.e2e import hanging_scorer
from tests.e2e.gateway import CHAT, DEADLINE, FORGED, JSON, Gateway, chat, refused, running_gateway
from tests.e2e.picker_process import Profile, Site, running_site
from tests.e2e.pods import ACT, Pod

PROFILES: list[Profile] = ["standard", "lean"]


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> Iterator[Profile]:
    yield request.param


# A picker process


def loaded(site: Site) -> AbstractAsyncContextManager[list[str]]:
    return loaded_client(site.http)


@asynccontextmanager
async def loaded_client(http: aiohttp.ClientSession, clients: int = 4) -> AsyncIterator[list[str]]:
    """Requests from several clients without a pause; how each ended."""
    results: list[str] = []

    async def client() -> None:
        while True:
            results.append(await once(http))

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        yield results
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def once(http: aiohttp.ClientSession) -> str:
    """`served` by the pod that the picker said, `unpicked`, `cut`, or why it was refused."""
    try:
        async with http.post(CHAT, data=chat(), headers=JSON) as response:
            if response.status != 200:
                assert int(response.headers["retry-after"]) >= 1
                return (await refused(response))[1]
            told = dict((await response.json())["headers"])
    except aiohttp.ClientPayloadError:
        return "cut"
    return "served" if "x-gateway-destination-endpoint" in told else "unpicked"


async def until_served(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(DEADLINE):
        while await once(http) != "served":
            pass


async def until_more(results: list[str], what: str, count: int) -> None:
    """Wait until so many more results are of a kind."""
    wanted = results.count(what) + count
    async with asyncio.timeout(DEADLINE):
        while results.count(what) < wanted:  # noqa: ASYNC110  # of other processes
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_crashes_under_load_is_back_when_it_is(
    tmp_path: Path, profile: Profile, fail_open: bool
) -> None:
    async with (
        running_site(profile, tmp_path, fail_open=fail_open) as site,
        loaded(site) as results,
    ):
        await until_more(results, "served", 50)
        await site.picker.kill()
        await until_more(results, "unpicked" if fail_open else "no_picker", 50)
        allowed = {"served", "unpicked"} if fail_open else {"served", "no_picker", "cut"}
        assert set(results) <= allowed
        await site.picker.start()
        await until_more(results, "served", 50)
        settled = len(results)
        await until_more(results, "served", 200)
        assert set(results[settled:]) == {"served"}


async def test_a_client_does_not_speak_for_a_picker_that_is_away(
    tmp_path: Path, profile: Profile
) -> None:
    async with running_site(profile, tmp_path, fail_open=True) as site:
        await site.picker.kill()
        for method, data in (("POST", chat()), ("GET", None)):
            headers = [*FORGED, *JSON.items()]
            async with site.http.request(method, CHAT, data=data, headers=headers) as response:
                assert response.status == 200
                told = (await response.json())["headers"]
        names = [name for name, _ in told]
        assert len(set(names)) == len(names)
        forged = {name.lower() for name, _ in FORGED} & set(names)
        assert forged <= {STREAM}  # made by Envoy
        assert "192.0.2.99" not in str(told)


async def test_what_a_running_response_does_without_its_picker(
    tmp_path: Path, profile: Profile
) -> None:
    async with running_site(profile, tmp_path) as site:
        headers = JSON | {ACT: "stream"}
        running = asyncio.create_task(site.http.post(CHAT, data=chat(), headers=headers))
        for pod in site.pods:
            pod.go.release()
        async with await running as stream:
            assert await stream.content.readuntil(b"\n\n") == b"data: 0\n\n"
            await site.picker.kill()
            async with asyncio.timeout(DEADLINE):
                if profile == "standard":  # whose bytes go through the picker
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await stream.content.read()
                else:
                    for pod in site.pods:
                        pod.go.release()
                    assert await stream.content.readuntil(b"\n\n") == b"data: 1\n\n"
                    for pod in site.pods:
                        pod.stop()
                    assert await stream.content.read() == b""


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_stands_still(
    tmp_path: Path, profile: Profile, fail_open: bool
) -> None:
    async with running_site(profile, tmp_path, fail_open=fail_open) as site:
        assert await once(site.http) == "served"
        site.picker.stand_still()
        async with asyncio.timeout(DEADLINE):
            ends = await asyncio.gather(*(once(site.http) for _ in range(4)))
        assert set(ends) == {"unpicked" if fail_open else "no_picker"}
        site.picker.go_on()
        await until_served(site.http)


HANGS = f"scheduling: {{scorers: {{'{hanging_scorer.__name__}:Hang': 1, kv: 1}}}}\n"


async def test_a_picker_whose_event_loop_hangs(tmp_path: Path) -> None:
    """gRPC's threads answer Envoy's pings all the while."""
    async with running_site("standard", tmp_path, more=HANGS) as site:
        assert await once(site.http) == "served"
        go_on = tmp_path / "go on"
        headers = JSON | {hanging_scorer.UNTIL: str(go_on)}
        hanging = asyncio.create_task(site.http.post(CHAT, data=chat(), headers=headers))
        await site.envoy.wait_for_stat("cluster.picker-grpc.membership_healthy", 0)
        assert not hanging.done()
        assert await once(site.http) == "no_picker"
        go_on.touch()
        async with asyncio.timeout(DEADLINE), await hanging as response:
            assert response.status == 200
        await until_served(site.http)


# A picker or an Envoy that ends


@asynccontextmanager
async def streaming(gateway: Gateway, pod: Pod) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream of events after its first."""
    headers = JSON | {ACT: "stream", "x-request-id": "streams"}
    pod.go.release()
    async with gateway.http.post(CHAT, data=chat(), headers=headers) as stream:
        assert await stream.content.readuntil(b"\n\n") == b"data: 0\n\n"
        yield stream


async def test_a_draining_picker_finishes_its_streams_and_refuses_others(profile: Profile) -> None:
    async with running_gateway(pods=1, profile=profile) as gateway:
        (pod,) = gateway.pods
        async with streaming(gateway, pod) as stream:
            draining = asyncio.create_task(gateway.service.drain())
            async with asyncio.timeout(DEADLINE):
                while await once(gateway.http) != "no_picker":
                    pass
            pod.go.release()
            assert await stream.content.readuntil(b"\n\n") == b"data: 1\n\n"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(draining), 1)
            pod.stop()
            assert await stream.content.read() == b""
        async with asyncio.timeout(DEADLINE):
            await draining
        assert (await gateway.decision("streams"))["outcome"] == "completed"


async def test_an_envoy_that_dies_leaves_nothing_in_flight(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(pods=1, profile=profile) as gateway:
        (pod,) = gateway.pods
        async with streaming(gateway, pod) as stream:
            assert await gateway.inflight() >= 1
            gateway.envoy.process.kill()
            monkeypatch.setattr(tickets, "LEASE", 1)  # not before: a slow Envoy renews it late
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.content.read()
        await gateway.idle()
        assert (await gateway.decision("streams"))["outcome"] == "aborted"
