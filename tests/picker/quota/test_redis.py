"""The Redis store's own promises: shared, cluster-safe, and honest about what Redis forgets."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack

import pytest
from redis.asyncio import Redis

from picker.quota.model import Subject
from picker.quota.plan import FREE, Denied, Granted, line_of
from picker.quota.store import Correction, Entry, Stale, StoreDown
from picker.quota.store_redis import RedisStore
from picker.quota.stores import open_store
from tests.picker.quota.customers import balanced, customer, killed_after, prepare, rest
from tests.picker.quota.kit import Clock, Desk, limits, spent, tokens
from tests.picker.quota.redis_server import DEADLINE, RedisServer, back, running

ALICE = "tenant/alice"


async def opened(server: RedisServer, name: str = "test") -> Desk:
    store = RedisStore(f"{server.url}?name={name}", DEADLINE)
    return Desk(store, Clock(time.time()))


async def test_two_pickers_share_a_limit_to_the_token() -> None:
    with running() as server:
        desks = [await opened(server) for _ in range(2)]
        await desks[0].write(
            {ALICE: Subject(limits=limits("total-tokens=1k/month", "concurrency=30"))}
        )
        await desks[1].read()
        answers = await asyncio.gather(
            *(
                desks[number % 2].store.reserve(
                    f"r{number}", desks[number % 2].plan(ALICE), tokens(90), "", 600.0
                )
                for number in range(50)
            )
        )
        assert sum(isinstance(answer, Granted) for answer in answers) == 11
        assert sum(isinstance(answer, Denied) for answer in answers) == 39
        for number, answer in enumerate(answers):
            if isinstance(answer, Granted):  # settled by the other one
                assert await desks[(number + 1) % 2].store.settle(f"r{number}", spent(100))
        for desk in desks:
            assert await desk.used(ALICE) == [1100, 0]
            assert await desk.store.verify() == []
            await desk.store.close()


async def test_the_wait_that_redis_tells_is_true() -> None:
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "requests=10/second")
        for _ in range(10):
            await desk.granted(ALICE, tokens(1))
        _, answer = await desk.ask(ALICE, tokens(1))
        if isinstance(answer, Denied):  # a slow machine may have let one flow back
            assert answer.wait is not None and 0 < answer.wait <= 0.1
            await asyncio.sleep(answer.wait)
            await desk.granted(ALICE, tokens(1))
        await desk.store.close()


async def test_every_key_has_a_time_to_live() -> None:
    with running() as server:
        desk = await opened(server)
        await desk.write(
            {
                "org/acme": Subject(limits=limits("total-tokens=1M/month", "concurrency=9")),
                ALICE: Subject("org/acme", limits("requests=2/hour", "output-tokens=5/day")),
            }
        )
        ids = [await desk.granted(ALICE, tokens(100)) for _ in range(2)]
        await desk.denied(ALICE, tokens(100))
        await desk.store.settle(ids[0], spent(10, 5))
        await desk.store.shrink(ids[1], (1, 5, 0, 5, 1), 60.0)
        entry = Entry(0.0, "root", "adjust", ALICE, "", "")
        await desk.store.correct([Correction("a key", 5), Correction("other", None)], [entry])
        await desk.store.charge("elsewhere", ALICE, "m", [], spent(5))
        with server.client() as client:
            lives = {key: client.pttl(key) for key in client.scan_iter()}
        assert len(lives) >= 12
        assert {key for key, life in lives.items() if life <= 0} == set()
        assert all(key.startswith(b"{warmpath:test}:") for key in lives)
        await desk.store.close()


async def test_steady_traffic_does_not_keep_what_was_used_alive() -> None:
    """LiteLLM's issue 14204: a time to live that each request renewed."""
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "total-tokens=100/second")
        served = 0
        began = time.monotonic()
        while served < 400:
            id, answer = await desk.ask(ALICE, tokens(10))
            if isinstance(answer, Granted):
                served += 10
                await desk.store.settle(id, spent(10))
            else:
                await asyncio.sleep(answer.wait or 0.0)
        assert time.monotonic() - began >= 2.9
        await desk.store.close()


async def test_scripts_are_told_again_to_a_server_that_forgot_them() -> None:
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "requests=2/day")
        await desk.granted(ALICE, tokens(1))
        with server.client() as client:
            client.script_flush()
        await desk.granted(ALICE, tokens(1))
        await desk.denied(ALICE, tokens(1))
        await desk.store.close()


@pytest.mark.parametrize("answers", [40, 333])
async def test_the_ledger_balances_after_kill_9_of_a_picker_and_of_redis(answers: int) -> None:
    with running("--appendonly", "yes", "--appendfsync", "always") as server:
        url = f"{server.url}?name=test"
        desk = await opened(server)
        await prepare(desk.store)
        processes = [await customer(url, name) for name in ("a", "b")]
        told = await killed_after(processes[0], answers)
        server.kill()
        told += await rest(processes[1])  # which fails, having lost its store
        server.start()
        await back(desk.store)
        await balanced(desk.store, told)
        await desk.store.close()


async def test_what_an_empty_redis_does_not_know_is_charged_once() -> None:
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "total-tokens=1k/month", "total-tokens=1k/hour")
        id, answer = await desk.ask(ALICE, tokens(300))
        assert isinstance(answer, Granted)
        server.kill()
        server.start()
        await back(desk.store)
        lines = [line_of(check, desk.clock.now) for check in desk.plan(ALICE).checks]
        changes = await desk.store.changes(desk.policy.version)
        assert changes.version == "" and changes.whole
        assert await desk.store.settle(id, spent(200, 50)) is None
        assert await desk.store.charge(id, ALICE, "m", lines, spent(200, 50))
        assert not await desk.store.charge(id, ALICE, "m", lines, spent(200, 50))
        assert await desk.store.settle(id, spent(200, 50)) is False
        counts = await desk.store.counts([line.key for line in lines])
        assert [count.value for count in counts] == [250, 250]
        assert counts[1].level == pytest.approx(250, abs=25)
        assert await desk.store.verify() == []
        await desk.store.close()


async def test_an_expired_reservation_outlives_its_counters_and_holds_nothing_then() -> None:
    """Their time to live may be over before anybody asks again, who then gives it back."""
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "total-tokens=1k/month", "total-tokens=1k/hour", "concurrency=5")
        late = await desk.granted(ALICE, tokens(300), ttl=0.001)
        with server.client() as client:
            for key in client.scan_iter(match="{warmpath:test}:c:*"):
                client.delete(key)
        assert await desk.store.reservations() == []
        assert await desk.store.verify() == []
        assert await desk.store.settle(late, spent(100))
        assert await desk.store.verify() == []
        used = await desk.used(ALICE)
        assert (used[0], used[2]) == (100, 0)
        await desk.store.close()


async def test_a_server_that_does_not_answer_is_down_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = open_store(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout=0.1)
        began = time.monotonic()
        with pytest.raises(StoreDown):
            await store.settle("r", spent(1))
        assert time.monotonic() - began < DEADLINE / 2
        await store.close()


async def test_a_server_that_is_gone_is_down_and_comes_back() -> None:
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "requests=9/day")
        server.kill()
        with pytest.raises(StoreDown, match=f"127.0.0.1:{server.port}"):
            await desk.ask(ALICE, tokens(1))
        server.start()
        await back(desk.store)
        await desk.read()
        await desk.granted(ALICE, tokens(1))
        await desk.store.close()


async def test_what_is_given_back_before_it_was_reserved_is_never_held() -> None:
    with running() as server:
        desk = await opened(server)
        await desk.limit(ALICE, "concurrency=5")
        plan = desk.plan(ALICE)
        assert await desk.store.settle("overtaken", FREE)
        assert isinstance(await desk.store.reserve("overtaken", plan, tokens(1), "", 600.0), Stale)
        assert await desk.used(ALICE) == [0]
        assert await desk.store.settle("overtaken", spent(5)) is False
        await desk.store.close()


async def test_all_of_it_works_in_a_cluster() -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(cluster=True)) for _ in range(3)]
        await joined(nodes)
        store = RedisStore(f"redis+cluster://127.0.0.1:{nodes[1].port}/0?name=pool-a", DEADLINE)
        desk = Desk(store, Clock(time.time()))
        await desk.write(
            {
                "org/acme": Subject(limits=limits("total-tokens=1k/month")),
                ALICE: Subject("org/acme", limits("requests=3/hour", "concurrency=2")),
            }
        )
        ids = [await desk.granted(ALICE, tokens(200), ttl=600.0) for _ in range(2)]
        await desk.denied(ALICE, tokens(200))
        assert await store.settle(ids[0], spent(100, 50))
        await desk.granted(ALICE, tokens(200), ttl=0.001)
        await asyncio.sleep(0.002)  # it expires, and the next call gives it back
        assert [held.id for held in await store.reservations()] == [ids[1]]
        assert await store.verify() == []
        await store.correct([Correction(f"{ALICE}\t\trequests/hour", None)], [])
        assert len(await store.denials()) == 1
        (use,) = [use for use in (await store.uses(0)).values() if use.requests]
        assert use.prompt_tokens == 100
        dump = await store.dump()
        assert len(dump.counters) == 3
        assert (await store.status())["subjects"] == 2
        holding = 0
        for node in nodes:
            with node.client() as client:
                holding += bool(client.dbsize())
        assert holding == 1  # one slot, so one node
        await store.close()


async def joined(nodes: list[RedisServer]) -> None:
    """Make a cluster of servers."""
    slots = [0, 5461, 10923, 16384]
    for number, node in enumerate(nodes):
        with node.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", slots[number], slots[number + 1] - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            first = nodes[0]
            if node is not first:
                client.execute_command("CLUSTER MEET", "127.0.0.1", first.port, first.bus_port)
    async with asyncio.timeout(DEADLINE):
        for node in nodes:
            async with Redis(port=node.port) as client:
                while True:
                    info = await client.execute_command("CLUSTER INFO")
                    if info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3":
                        break
                    await asyncio.sleep(0.05)
