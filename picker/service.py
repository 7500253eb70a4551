"""The picker put together from a configuration: every part made, started and ended in order."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from picker.access_log import AccessLogService
from picker.admin import AdminServer, Views
from picker.config import Config, Prefix
from picker.director import Director
from picker.discovery import EndpointDiscovery
from picker.gate import Gate
from picker.health import Health, HealthServer
from picker.journal import Journal
from picker.lean import LeanServer
from picker.load import Load
from picker.metrics import PickerMetrics
from picker.pool import Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.prefix.match import PrefixProducer
from picker.quota.admin_server import QuotaAdminServer
from picker.quota.store import Store
from picker.quota.stores import open_store
from picker.replicas.known import Known
from picker.replicas.replicas import Replicas, check_settings, is_one_of_many, read_secret
from picker.rewrites import Rewrites
from picker.schedule import Scheduler
from picker.scrape import Scraper
from picker.server import ExtProcServer
from picker.sessions import Sessions

if TYPE_CHECKING:
    from picker.prefix.precise import EventsPrefix

log = logging.getLogger(__name__)

LAME_SECONDS = 1.0  # between "not ready" and closed doors: for probes to see it


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a service listens."""

    grpc: int
    http: int
    health: int
    admin: int
    quota: int | None  # where there is a service to administer quotas
    replica: int | None  # where there are other pickers


class Service:
    """One picker.

    `start`, `until_ready`, then serve; `reload` at any time; `drain` for an orderly end, and `stop`
    in every case.

    Raises:
        ValueError: the configuration names what there is not.
    """

    def __init__(self, config: Config) -> None:
        check_settings(config)
        self.config = config
        self._pool = Pool(config.pool.name)
        self._load = Load(self._pool, config.metrics.stale_after)
        self._events = _events_prefix(self._pool, config.prefix)
        if self._events is None:
            self._prompts = ApproximatePrefix(self._pool, config.prefix)
        else:
            self._prompts = self._events.approximate
        self._prefix: PrefixProducer = self._events or self._prompts
        self._scraper = Scraper(self._pool, self._load, config.metrics, self._prefix.resized)
        self._gate: Gate | None = None
        if config.quota.enabled or config.flow.enabled:
            self._gate = Gate(config, self._pool, self._load)
        self._metrics = PickerMetrics()
        self._pool.listen(self._metrics)
        self._journal = Journal()
        self._replicas: Replicas | None = None  # where there are other pickers
        scheduler = Scheduler(config.scheduling)
        self._sessions = Sessions(config.sessions, enabled=scheduler.uses_sessions)
        self.rewrites = Rewrites(config.rewrites, config.rewrite_headers)
        self.director = Director(
            pool=self._pool,
            load=self._load,
            prefix=self._prefix,
            scheduler=scheduler,
            sessions=self._sessions,
            metrics=self._metrics,
            journal=self._journal,
            models=frozenset(config.models),
            gate=self._gate,
            rewrites=self.rewrites,
        )
        self._pool.update(config.pool.endpoints)
        self._not_ready: str | None = "starting"
        self._servers: _Servers | None = None
        self._store: Store | None = None  # of quotas

    @property
    def not_ready(self) -> str | None:
        """Why requests are not welcome; None when they are."""
        return self._not_ready

    @property
    def num_endpoints(self) -> int:
        return len(self._pool.endpoints)

    @property
    def waiting(self) -> int:
        """Requests in the queue of flow control."""
        flow = None if self._gate is None else self._gate.flow
        return 0 if flow is None else flow.waiting

    async def start(self) -> Ports:
        """Listen and look at the pods. The service answers now, but is not ready yet, and its
        HTTP port is still closed.

        Raises:
            OSError: a port cannot be had. What has started is left for `stop`.
            ValueError: a file that the configuration names cannot be used.
        """
        if self._gate is not None:
            await self._gate.start(self._quota_store)  # before anybody can ask
        listen = self.config.listen
        self._servers = servers = _Servers(self.director, self.config, self._pool, self._views())
        ports = Ports(
            grpc=await _listen(servers.ext_proc, listen.host, listen.grpc, "grpc"),
            http=await _listen(servers.lean, listen.host, listen.http, "http"),
            health=await _listen(servers.health_server, listen.host, listen.health, "health"),
            admin=await _listen(servers.admin, listen.host, listen.admin, "admin"),
            quota=await self._start_quota_admin(servers),
            replica=await self._join(servers),
        )
        await self._prefix.start()
        if self._replicas is not None:
            await self._replicas.start()
        await self._scraper.start()
        return ports

    async def until_ready(self) -> None:
        """Wait until each pod has told its load, and what it holds, or failed to.

        From then on the service is ready.
        """
        await self._scraper.first_round()
        await self._prefix.first_round()
        if self._replicas is not None:
            await self._replicas.first_round()
        assert self._servers is not None, "started"
        await self._servers.lean.serve()
        self._not_ready = None
        self._servers.health.set_ready(True)

    async def drain(self) -> None:
        """No longer ready; then take nothing new, and wait for what runs, `config.drain` long."""
        assert self._servers is not None, "started"
        self._not_ready = "draining"
        self._servers.health.set_ready(False)
        self._servers.lean.ready = False
        await asyncio.sleep(min(LAME_SECONDS, self.config.drain))
        log.info("Draining, for at most %g s", self.config.drain)
        lean = asyncio.ensure_future(self._servers.lean.drain())
        await asyncio.gather(lean, self._servers.ext_proc.drain(lean))

    async def stop(self) -> None:
        """End everything now."""
        self._not_ready = "stopped"
        if self._replicas is not None:
            await self._replicas.stop()
        await self._scraper.stop()
        await self._prefix.stop()
        if self._servers is not None:
            await self._servers.stop()
        if self._gate is not None:
            await self._gate.stop()
        if self._store is not None:
            await self._store.close()

    def reload(self, config: Config) -> None:
        """Take over the endpoints of a configuration, which the pool checks; the rest is told.

        Raises:
            ValueError: endpoints that there cannot be; nothing has changed then.
        """
        endpoints = config.pool.endpoints
        before = set(self._pool.endpoints)
        self._pool.update(endpoints)
        after = set(self._pool.endpoints)
        if before != after:
            log.info(
                "The pool has %d endpoints: %d came, %d left",
                len(after),
                len(after - before),
                len(before - after),
            )
        pool = msgspec.structs.replace(self.config.pool, endpoints=endpoints)
        self.config = msgspec.structs.replace(self.config, pool=pool)
        if changed := _differing(self.config, config):
            log.warning(
                "Changed in the file, but only a restart applies it: %s", ", ".join(changed)
            )

    async def _start_quota_admin(self, servers: _Servers) -> int | None:
        """Let the configured administer quotas. Returns the port."""
        quota, listen = self.config.quota, self.config.listen
        if not quota.admin.tokens:
            return None
        servers.quota = QuotaAdminServer(self._quota_store(), quota, listen.host, listen.quota)
        return await _listen(servers.quota, listen.host, listen.quota, "quota")

    async def _join(self, servers: _Servers) -> int | None:
        """Let other pickers follow us, where there are any. Returns the port."""
        config = self.config
        if not is_one_of_many(config):
            return None
        secret = read_secret(config)
        naming = 0
        if self._events is not None and secret:
            from picker.prefix import keys

            naming = keys.share(secret)
        known = Known(
            self._pool,
            self._load,
            self._prompts,
            self._sessions,
            None if self._gate is None else self._gate.flow,
            None if self._events is None else self._events.index,
            naming,
        )
        self._replicas = replicas = Replicas(config, known, secret, servers.access_log.handed)
        servers.access_log.others = replicas.news
        servers.lean.owner = f"{replicas.replica:016x}"
        return await _listen(replicas.server, config.listen.host, config.listen.replica, "replica")

    def _quota_store(self) -> Store:
        """The one store: requests and administrators meet there."""
        if self._store is None:
            self._store = open_store(self.config.quota.store, float(self.config.quota.timeout))
        return self._store

    def _views(self) -> Views:
        return Views(
            pool=self._pool,
            load=self._load,
            prefix=self._prefix,
            events=self._events,
            journal=self._journal,
            metrics=self._metrics,
            config=lambda: self.config,
            not_ready=lambda: self._not_ready,
            replicas=lambda: self._replicas,
            gate=self._gate,
        )


def _events_prefix(pool: Pool, settings: Prefix) -> EventsPrefix | None:
    """What tells which pod holds a prompt's prefix by KV events; None: that is not wanted."""
    if settings.mode != "events":
        return None
    try:
        from picker.prefix.precise import EventsPrefix  # its packages need not be installed
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"prefix.mode: events need the Python package {missing.name}: "
            "pip install 'warmpath[events]'"
        ) from missing
    return EventsPrefix(pool, settings)


class _Servers:
    """All that listens."""

    def __init__(self, director: Director, config: Config, pool: Pool, views: Views) -> None:
        self.ext_proc = ExtProcServer(director, config)
        self.lean = LeanServer(director, config)
        self.access_log = AccessLogService(self.lean.tickets)
        self.access_log.add_to(self.ext_proc.server)
        EndpointDiscovery(pool).add_to(self.ext_proc.server)
        self.health = Health()
        self.health.add_to(self.ext_proc.server)  # Envoy probes the port that it uses
        self.health_server = HealthServer(self.health, config.listen.host, config.listen.health)
        self.admin = AdminServer(views, config.listen.host, config.listen.admin)
        self.quota: QuotaAdminServer | None = None

    async def stop(self) -> None:
        """In the order in which nobody is asked who is gone; the admin pages last."""
        await self.lean.stop()
        await self.ext_proc.stop()
        await self.health_server.stop()
        if self.quota is not None:
            await self.quota.stop()
        await self.admin.stop()


class _Startable(Protocol):
    async def start(self) -> int: ...


async def _listen(server: _Startable, host: str, port: int, key: str) -> int:
    """Start a server; an error names the key that would move it elsewhere."""
    try:
        return await server.start()
    except OSError as problem:
        why = os.strerror(problem.errno) if problem.errno else "it is taken, or not this machine's"
        raise OSError(
            problem.errno, f"cannot listen on {host}, port {port} (listen.{key}): {why}"
        ) from problem


def check_config(config: Config) -> None:
    """Raises ValueError when no service can be made of a configuration."""
    Service(config)


def _differing(old: Config, new: Config) -> list[str]:
    """Keys whose values differ, as the file writes them; sections by their keys."""
    found: list[str] = []
    for field in msgspec.structs.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        if isinstance(before, msgspec.Struct):
            found += [
                f"{field.encode_name}.{inner.encode_name}"
                for inner in msgspec.structs.fields(before)
                if getattr(before, inner.name) != getattr(after, inner.name)
            ]
        else:
            found.append(field.encode_name)
    return found
