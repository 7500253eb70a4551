"""The store of many pickers: one Redis, or one slot of a Redis cluster.

Each admission is one call of a script (`lua/`), which sees and changes everything at once and goes
by Redis' own clock. All keys of a store have one hash tag, its name. What Redis loses, by a crash
without an append-only file or by failing over to a replica, is lost: an end whose reservation is
gone is charged all the same, and a store that is empty is told by its version.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

import hiredis
import msgspec
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError

from picker.quota.bucket import Counter
from picker.quota.ledger import LATE_SECONDS, Denial, Reservation, Use, UseKey
from picker.quota.plan import (
    DAY,
    NO_RATE,
    Amounts,
    Denied,
    Granted,
    Line,
    Plan,
    Spent,
    Standing,
    line_of,
)
from picker.quota.policy import Policy, Record
from picker.quota.reader import Reader
from picker.quota.redis_url import RedisURL, parse
from picker.quota.redis_values import (
    counter_of,
    entry_of,
    entry_texts,
    flat_lines,
    packed_counter,
    packed_reservation,
    record_of,
    reservation_of,
)
from picker.quota.store import (
    KEPT_DAYS,
    MAX_AUDIT,
    PAGE,
    Change,
    Changes,
    Conflict,
    Correction,
    Count,
    Dump,
    End,
    Entry,
    Fault,
    Stale,
    StoreDown,
    count,
    faults,
)
from picker.quota.wire import Wire

MAX_CONNECTIONS = 64
FIRST_COUNTER = 3  # among a reservation's keys; before them are the version and itself
SHARED = {  # what stands before a script
    "reserve": ("common",),
    "settle": ("common", "ends"),
    "shrink": ("common", "ends"),
    "renew": ("common", "ends"),
    "expire": ("common", "ends"),
    "counts": ("common", "ends"),
    "correct": ("common", "ends", "records"),
    "write": ("common", "records"),
    "changes": ("common", "records"),
}
MAX_ROUNDS = 5  # of asking again, by another clock or when room was made
MAX_PACKED = 10_000  # plans whose checks are kept as bytes
ERRORS = (RedisError, hiredis.HiredisError, OSError, TimeoutError)
LOOKS = 3  # at a store that others use, before a fault is believed

_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode


class _Granted(msgspec.Struct, array_like=True, tag="granted"):
    now: float
    standings: tuple[Standing, ...]
    shadowed: tuple[int, ...]


class _Denied(msgspec.Struct, array_like=True, tag="denied"):
    now: float
    check: int
    wait: float  # negative: never
    amount: int
    standings: tuple[Standing, ...]


class _Stale(msgspec.Struct, array_like=True, tag="stale"):
    """The plan's version is not the store's."""


class _Due(msgspec.Struct, array_like=True, tag="due"):
    """Some reservations have expired."""


class _Clock(msgspec.Struct, array_like=True, tag="clock"):
    """A calendar window of the plan is not that of Redis' time."""

    now: float


class _Conflict(msgspec.Struct, array_like=True, tag="conflict"):
    name: str
    expected: int
    found: int


class _Written(msgspec.Struct, array_like=True, tag="written"):
    version: str


_RESERVED = msgspec.msgpack.Decoder(_Granted | _Denied | _Stale | _Due | _Clock)
_WRITTEN = msgspec.msgpack.Decoder(_Written | _Conflict)


class _Packed(msgspec.Struct):
    """A plan as the script takes it, while its calendar windows last."""

    start: float
    end: float
    keys: list[bytes]  # of counters and grants
    checks: bytes
    lines: str


class RedisStore:
    """Counters, reservations, records, audit and books in Redis.

    Args:
        url: see picker.quota.redis_url.
        timeout: seconds for a connection and for each answer.

    Raises:
        QuotaError: the URL cannot be used. That nobody answers there is found out later.
    """

    def __init__(self, url: str, timeout: float = 0.1) -> None:
        told = parse(url)
        self._prefix = f"{{warmpath:{told.name}}}"
        self._client = _client(told)
        self._wire = None if told.kind == "cluster" else Wire(told, timeout)
        self._timeout = timeout
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._shown = told.shown
        self._version_key = self._key("version")
        self._packed: dict[Plan, _Packed] = {}  # plans of one version
        self._version = ""
        self._offset = 0.0  # of Redis' clock to ours
        self._keep_at = 0.0  # when to renew the time to live of records

    def wall(self) -> float:
        return time.time() + self._offset

    async def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float
    ) -> Granted | Denied | Stale:
        head = _pack((id, plan.subject, model, ttl, amounts))
        for _ in range(MAX_ROUNDS):
            packed = self._pack_plan(plan)
            keys = (self._key(f"r:{id}"), *packed.keys)
            raw = await self._run("reserve", keys, plan.version, head, packed.checks, packed.lines)
            answer = _RESERVED.decode(raw)
            if isinstance(answer, _Stale):
                return Stale()
            if isinstance(answer, _Due):
                await self._run("expire", [])
                continue
            self._offset = answer.now - time.time()
            if isinstance(answer, _Granted):
                return Granted(answer.standings, answer.shadowed)
            if isinstance(answer, _Denied):
                wait = None if answer.wait < 0 else answer.wait
                return Denied(answer.check, wait, answer.amount, answer.standings)
        raise StoreDown(f"{self._shown}: its clock runs away, or too many reservations expire")

    async def settle(self, id: str, spent: Spent) -> bool | None:
        answer = await self._run("settle", [], _pack((id, *spent)))
        return None if answer == b"unknown" else bool(answer == b"settled")

    async def settle_all(self, ends: Sequence[End]) -> list[bool | None]:
        return await asyncio.gather(*(self.settle(id, spent) for id, spent in ends))

    async def charge(
        self, id: str, subject: str, model: str, lines: Sequence[Line], spent: Spent
    ) -> bool:
        elsewhere = _pack((subject, model, flat_lines(lines)))
        answer = await self._run("settle", [], _pack((id, *spent)), elsewhere)
        return bool(answer == b"settled")

    async def shrink(self, id: str, amounts: Amounts, ttl: float) -> bool:
        answer = await self._run("shrink", [], _pack((id, amounts, ttl)))
        return bool(answer == b"shrunk")

    async def renew(self, ids: Sequence[str], ttl: float) -> None:
        await self._run("renew", [], _pack((ids, ttl)))

    async def changes(self, version: str, after: str = "") -> Changes:
        revision, _, name = after.partition(" ")
        told = await self._run("changes", [], version, revision, name, str(PAGE))
        now, how, names, records, last = told
        pairs = zip(names, records, strict=True)
        found = {name.decode(): record_of(raw) for name, raw in pairs}
        following = f"{last.decode()} {names[-1].decode()}" if len(names) == PAGE else ""
        return Changes(now.decode(), found, how == b"whole", following)

    async def write(self, changes: Sequence[Change], entries: Sequence[Entry]) -> str:
        packed = [
            (name, expected, "" if subject is None else msgspec.json.encode(subject).decode())
            for name, expected, subject in changes
        ]
        tag = secrets.token_hex(4)
        raw = await self._run("write", [], tag, _pack(packed), _pack(entry_texts(entries)))
        answer = _WRITTEN.decode(raw)
        if isinstance(answer, _Conflict):
            raise Conflict(answer.name, answer.expected, answer.found)
        return answer.version

    async def correct(self, corrections: Sequence[Correction], entries: Sequence[Entry]) -> None:
        packed = [
            (key, False if amount is None else amount, rate, until)
            for key, amount, rate, until in corrections
        ]
        await self._run("correct", [], _pack(packed), _pack(entry_texts(entries)))

    async def counts(self, keys: Sequence[str]) -> list[Count]:
        if not keys:
            return []
        now, found = await self._run("counts", [self._counter_key(key) for key in keys])
        return [count(counter_of(raw), float(now)) for raw in found]

    async def reservations(self, subject: str = "") -> list[Reservation]:
        await self._run("expire", [])
        return [
            held
            for held in await self._all_reservations()
            if not held.expired and subject in ("", held.subject)
        ]

    async def uses(self, since: int) -> dict[UseKey, Use]:
        today = int(self.wall() // DAY)
        days = range(max(since, today - KEPT_DAYS), today + 2)  # their clock may be ahead
        uses: dict[UseKey, Use] = {}
        async with self._pipeline() as pipeline:
            for day in days:
                pipeline.hgetall(self._key(f"use:{day}"))
            pages = await pipeline.execute()
        for day, page in zip(days, pages, strict=True):
            for field, raw in page.items():
                subject, model = field.decode().split("\t")
                uses[day, subject, model] = Use(*_unpack(raw))
        return uses

    async def denials(self) -> list[Denial]:
        async with self._answers():
            found = await self._client.lrange(self._key("denials"), 0, -1)
        denials = [_unpack(raw, type=Denial) for raw in found]
        return [each._replace(wait=None) if each.wait == -1 else each for each in denials]

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]:
        async with self._answers():
            found = await self._client.lrange(self._key("audit"), 0, -1 if subject else limit - 1)
        entries = (entry_of(raw) for raw in found)
        return [entry for entry in entries if subject in ("", entry.subject)][:limit]

    async def verify(self) -> list[Fault]:
        believed: set[Fault] | None = None
        for _ in range(LOOKS):
            counters = await self._all_counters()
            found = set(faults(counters, await self._all_reservations()))
            believed = found if believed is None else believed & found
            if not believed:
                break
        return sorted(believed or ())

    async def dump(self) -> Dump:
        return Dump(
            await self._all_records(),
            await self._all_counters(),
            await self._all_reservations(),
            await self.uses(0),
            (await self.audit(limit=MAX_AUDIT))[::-1],
            (await self.denials())[::-1],
        )

    async def restore(self, dump: Dump) -> str:
        for name, record in (await self._all_records()).items():
            raise Conflict(name, 0, record.revision)
        now = self.wall()
        async with self._pipeline() as pipeline:
            for key, counter in dump.counters.items():
                held = max(counter.until, now + KEPT_DAYS * DAY if counter.open else 0.0)
                lasts = max(held, now) + 60
                raw = _pack(packed_counter(counter, lasts))
                pipeline.set(self._counter_key(key), raw, px=int((lasts - now) * 1000))
            for reservation in dump.reservations:
                held_key = self._key(f"r:{reservation.id}")
                lives = int((reservation.expires - now + LATE_SECONDS) * 1000) + 60_000
                pipeline.set(held_key, _pack(packed_reservation(reservation)), px=lives)
                pipeline.zadd(self._key("due"), {reservation.id: reservation.expires})
                pipeline.expire(self._key("due"), KEPT_DAYS * DAY)
            for (day, subject, model), use in dump.uses.items():
                page = self._key(f"use:{day}")
                pipeline.hset(page, f"{subject}\t{model}", _pack(astuple(use)))
                pipeline.expireat(page, (day + 1 + KEPT_DAYS) * DAY)
            for entry in dump.audit:
                text = f"{entry.revision}:{msgspec.json.encode(entry).decode()}"
                pipeline.lpush(self._key("audit"), text)
            for denial in dump.denials:
                wait = -1 if denial.wait is None else denial.wait
                pipeline.lpush(self._key("denials"), _pack(denial._replace(wait=wait)))
            pipeline.expire(self._key("denials"), KEPT_DAYS * DAY)
            await pipeline.execute()
        changes = [Change(name, 0, record.subject) for name, record in dump.records.items()]
        return await self.write(changes, [])

    async def status(self) -> dict[str, str | int | float]:
        started = time.perf_counter()
        version = (await self.changes("")).version
        seconds = time.perf_counter() - started
        records = await self._all_records()
        async with self._answers():
            held = await self._client.zcard(self._key("due"))
            info = await self._client.info()
        nodes = [info] if "redis_version" in info else list(info.values())
        return {
            "store": "redis",
            "at": self._shown,
            "version": version,
            "subjects": len(records),
            "reservations": held,
            "redis": nodes[0]["redis_version"],
            "maxmemory_policy": nodes[0]["maxmemory_policy"],
            "persistent": int(bool(nodes[0].get("aof_enabled"))),
            "milliseconds": round(seconds * 1000, 3),
        }

    async def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        await self._client.aclose()

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}:{name}".encode()

    def _counter_key(self, key: str) -> bytes:
        return self._key(f"c:{key}")

    def _pack_plan(self, plan: Plan) -> _Packed:
        packed = self._packed.get(plan)
        now = self.wall()
        if packed is None or not packed.start <= now < packed.end:
            if len(self._packed) >= MAX_PACKED or plan.version != self._version:
                self._packed.clear()
                self._version = plan.version
            packed = self._packed[plan] = self._packed_at(plan, now)
        return packed

    def _packed_at(self, plan: Plan, now: float) -> _Packed:
        start, end = 0.0, float("inf")
        keys: dict[bytes, int] = {}  # with their numbers among all keys, from 1

        def number(key: str) -> int:
            return keys.setdefault(self._counter_key(key), len(keys) + FIRST_COUNTER)

        checks: list[Any] = []
        lines: list[Line] = []
        for check in plan.checks:
            line = line_of(check, now)
            lines.append(line)
            span = (0, 0)
            if check.calendar is not None:
                span = check.calendar.span(now)
                start, end = max(start, span[0]), min(end, span[1])
            checks += (number(line.key), check.what, check.capacity, check.rate, *span)
            checks += (check.shadow, len(check.grants))
            for draw in check.grants:
                checks += (number(draw.key), draw.amount, draw.expires)
                until = draw.expires + DAY
                lines.append(Line(draw.key, 0, check.what, 0, True, NO_RATE, until))
        return _Packed(start, end, list(keys), _pack(checks), flat_lines(lines))

    async def _run(self, name: str, keys: Sequence[bytes], *values: bytes | str) -> Any:
        """Run a script, which the server may have to be told first.

        Raises:
            StoreDown: no answer, or not in time, or an error.
        """
        now = time.time()
        if now >= self._keep_at:
            self._keep_at = now + DAY
            await self._run("changes", [], "", "", "", "1")
        source, sha = self._script(name)
        names = (self._version_key, *keys)
        try:
            if self._wire is not None:
                call = self._wire.call
                try:
                    return await call(b"EVALSHA", sha, len(names), *names, *values)
                except hiredis.ReplyError as refused:
                    if not str(refused).startswith("NOSCRIPT"):
                        raise
                    return await call(b"EVAL", source, len(names), *names, *values)
            async with asyncio.timeout(self._timeout), self._room:
                try:
                    return await self._client.evalsha(sha, len(names), *names, *values)
                except NoScriptError:
                    return await self._client.eval(source, len(names), *names, *values)
        except ERRORS as problem:
            raise await self._down(problem) from None

    def _script(self, name: str) -> tuple[str, str]:
        """A script and its SHA-1."""
        return _script(name)

    @asynccontextmanager
    async def _answers(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout), self._room:
                yield
        except ERRORS as problem:
            raise await self._down(problem) from None

    async def _down(self, problem: Exception) -> StoreDown:
        if isinstance(problem, ReadOnlyError) or str(problem).startswith("READONLY"):
            if self._wire is not None:  # it is a replica now: look for the other
                self._wire.close()
            await self._client.aclose()
        return StoreDown(f"{self._shown}: {problem or type(problem).__name__}")

    @asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:
        async with self._answers(), self._client.pipeline(transaction=False) as pipeline:
            yield pipeline

    async def _all_records(self) -> dict[str, Record]:
        policy = Policy()
        await Reader(self, policy).read()
        return policy.records

    async def _all_reservations(self) -> list[Reservation]:
        async with self._answers():
            ids = await self._client.zrange(self._key("due"), 0, -1)
            keys = [self._key(f"r:{id.decode()}") for id in ids]
            found = await self._client.mget(keys) if keys else []
        pairs = zip(ids, found, strict=True)
        return [reservation_of(id.decode(), raw) for id, raw in pairs if raw]

    async def _all_counters(self) -> dict[str, Counter]:
        pattern = _escaped(self._counter_key("")) + b"*"
        skip = len(self._counter_key(""))
        async with self._answers():
            keys = [key async for key in self._client.scan_iter(match=pattern, count=1000)]
            found = await self._client.mget(keys) if keys else []
        pairs = zip(keys, found, strict=True)
        return {
            key[skip:].decode(): counter
            for key, raw in pairs
            if (counter := counter_of(raw)) is not None
        }


def _client(url: RedisURL) -> Any:
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        # Who waits has no time for another try; admission knows what to do instead.
        "retry": Retry(NoBackoff(), 0),
        # One timeout stands around each call, which is cheaper than one for each read and write.
        "socket_timeout": None,
        "socket_connect_timeout": None,
    }
    tls: dict[str, Any] = {}
    if url.tls:
        files = {"ssl_ca_certs": "ca", "ssl_certfile": "certificate", "ssl_keyfile": "key"}
        tls = {name: url.settings.get(key) for name, key in files.items()}
        tls |= {"ssl": True, "ssl_check_hostname": True}
    options |= tls
    options |= {"username": url.user or None, "password": url.password or None}
    if url.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in url.addresses]
        return RedisCluster(startup_nodes=nodes, **options)
    options["db"] = url.database
    if url.kind == "server":
        host, port = url.addresses[0]
        return Redis(host=host, port=port, **options)
    password = url.settings.get("sentinelPassword")
    sentinels: Any = Sentinel  # which has no types
    told = sentinels(url.addresses, sentinel_kwargs=tls | {"password": password}, **options)
    return told.master_for(url.service)


@cache
def _script(name: str) -> tuple[str, str]:
    """A script with what all share before it, and its SHA-1."""
    directory = files("picker.quota") / "lua"
    parts = (*SHARED[name], name)
    source = "\n".join((directory / f"{each}.lua").read_text() for each in parts)
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()


def _escaped(pattern: bytes) -> bytes:
    """What SCAN takes for this text, and nothing else."""
    return re.sub(rb"([\\*?\[\]^-])", rb"\\\1", pattern)
