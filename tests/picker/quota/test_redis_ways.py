"""The ways to Redis: URLs, TLS, and Sentinels that name another master."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis

from picker.quota.model import QuotaError
from picker.quota.redis_url import parse
from picker.quota.store import StoreDown
from picker.quota.store_redis import RedisStore
from picker.quota.stores import open_store
from tests.picker.quota.kit import Clock, Desk, spent, tokens
from tests.picker.quota.redis_server import DEADLINE, RedisServer, back, free_port, running

ALICE = "tenant/alice"


def test_a_url_tells_all_there_is_to_know() -> None:
    found = parse("rediss+sentinel://ann:p%40ss@[::1],b:7/pool%2Fa/3?name=x&sentinelPassword=s")
    assert (found.kind, found.addresses, found.tls) == (
        "sentinel",
        (("::1", 26379), ("b", 7)),
        True,
    )
    assert (found.user, found.password) == ("ann", "p@ss")
    assert (found.service, found.database, found.name) == ("pool/a", 3, "x")
    assert "p@ss" not in found.shown and "p%40ss" not in found.shown
    plain = parse("redis://h")
    assert (plain.addresses, plain.database, plain.name) == ((("h", 6379),), 0, "default")
    assert parse("redis+cluster://a:1,b:2").addresses == (("a", 1), ("b", 2))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+proxy://h", "no such way"),
        ("redis://", "no host"),
        ("redis:x", "no host"),
        ("redis://h:x", "no host"),
        ("redis://h:99999", "no host"),
        ("redis://a,b", "redis+sentinel"),
        ("redis://h/x", "number of a database"),
        ("redis://h/0/1", "number of a database"),
        ("redis+cluster://h/1", "only database 0"),
        ("redis+sentinel://h", "name of the service"),
        ("redis+sentinel://h/0", "name of the service"),
        ("redis://h?nmae=x", "did you mean 'name'"),
        ("redis://:secret@h?ca=/x", "write rediss"),
        ("rediss://:secret@h?ca=/missing.pem", "/missing.pem cannot be used"),
    ],
)
def test_a_url_that_cannot_be_is_told_without_its_password(url: str, says: str) -> None:
    with pytest.raises(QuotaError) as caught:
        open_store(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    pem, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", pem]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return pem, key


async def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    server_pem, server_key = certificate(tmp_path, "server")
    ours_pem, ours_key = certificate(tmp_path, "ours")
    port = free_port()
    flags = ("--tls-port", str(port), "--tls-cert-file", str(server_pem))
    flags += ("--tls-key-file", str(server_key), "--tls-ca-cert-file", str(ours_pem))
    with running(*flags):
        url = f"rediss://127.0.0.1:{port}/0"
        ours = f"certificate={ours_pem}&key={ours_key}"
        good = f"{url}?name=test&ca={server_pem}&{ours}"
        desk = Desk(RedisStore(good, DEADLINE), Clock(time.time()))
        await desk.limit(ALICE, "requests=2/day")
        id = await desk.granted(ALICE, tokens(1))
        assert await desk.store.settle(id, spent(1))
        assert await desk.store.verify() == [], "also what is no script goes over TLS"
        assert (await desk.store.status())["subjects"] == 1
        await desk.store.close()
        for bad in (url, f"{url}?ca={ours_pem}&{ours}", f"{url}?ca={server_pem}"):
            store = RedisStore(bad, DEADLINE)
            with pytest.raises(StoreDown):
                await store.changes("")
            with pytest.raises(StoreDown):
                await store.denials()
            await store.close()
        words = ("quota", "--store", good, "get", ALICE, "-o", "name")
        told = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker.cli", *words), stdout=asyncio.subprocess.PIPE
        )
        assert (await told.communicate())[0] == b"tenant/alice\n"


@contextmanager
def sentinel(folder: Path, master: RedisServer, *more: str) -> Iterator[int]:
    """A real Sentinel that watches a server as `shop`; its port."""
    port = free_port()
    file = folder / "sentinel.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"sentinel monitor shop 127.0.0.1 {master.port} 1",
        "sentinel down-after-milliseconds shop 200",
        "sentinel failover-timeout shop 2000",
        *more,
    ]
    file.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["redis-server", file, "--sentinel", "--loglevel", "warning"])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def until(true: Callable[[], bool]) -> None:
    """Wait for what servers do; what they cannot tell yet is not true."""
    async with asyncio.timeout(DEADLINE):
        while True:
            with suppress(redis.RedisError):
                if await asyncio.to_thread(true):
                    return
            await asyncio.sleep(0.01)


async def test_another_master_is_found_by_sentinels_and_nothing_is_lost(tmp_path: Path) -> None:
    with ExitStack() as stack:
        auth = ("--requirepass", "pass", "--masterauth", "pass")
        at_once = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(running(*auth, *at_once, password="pass"))
        replica = stack.enter_context(
            running(*auth, "--replicaof", "127.0.0.1", str(master.port), password="pass")
        )
        with master.client() as client:
            await until(lambda: client.info("replication")["slave0"]["state"] == "online")
        lines = ("sentinel auth-pass shop pass", "requirepass guard")
        port = stack.enter_context(sentinel(tmp_path, master, *lines))
        with redis.Redis(port=port, password="guard") as client:
            await until(lambda: client.sentinel_master("shop")["num-slaves"] == 1)
        sentinels = f"127.0.0.1:{free_port()},127.0.0.1:{port}"  # the first one is not there
        url = f"redis+sentinel://:pass@{sentinels}/shop/0?name=test&sentinelPassword=guard"
        desk = Desk(RedisStore(url, DEADLINE), Clock(time.time()))
        await desk.limit(ALICE, "total-tokens=1k/month")
        first = await desk.granted(ALICE, tokens(300))
        second = await desk.granted(ALICE, tokens(300))
        assert await desk.store.settle(first, spent(100, 50))
        with master.client() as client:
            assert client.wait(1, int(DEADLINE * 1000)) == 1
        master.kill()
        await back(desk.store)
        with replica.client() as client:
            assert client.role()[0] == b"master"
        assert await desk.used(ALICE) == [450]
        assert await desk.store.settle(second, spent(10))
        await desk.granted(ALICE, tokens(800))
        await desk.denied(ALICE, tokens(100))
        assert await desk.used(ALICE) == [960]
        assert await desk.store.verify() == []
        assert len(await desk.store.denials()) == 1
        await desk.store.close()


async def test_a_service_that_no_sentinel_knows_is_down(tmp_path: Path) -> None:
    with running() as server, sentinel(tmp_path, server) as port:
        store = RedisStore(f"redis+sentinel://127.0.0.1:{port}/other", DEADLINE)
        with redis.Redis(port=port) as client:
            await until(client.ping)
        with pytest.raises(StoreDown, match="no Sentinel knows 'other'"):
            await store.changes("")
        await store.close()
