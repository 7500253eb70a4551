"""All that a picker listens with, put together, started and ended in order."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from picker.access_log import AccessLogService
from picker.admin import AdminServer, Views
from picker.config import Config
from picker.director import Director
from picker.discovery import EndpointDiscovery
from picker.health import Health, HealthServer
from picker.lean import LeanServer
from picker.pool import Pool
from picker.quota.admin_server import QuotaAdminServer
from picker.replicas.replicas import Replicas
from picker.server import ExtProcServer
from picker.tls import ServerTls


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a service listens."""

    grpc: int
    http: int
    health: int
    admin: int
    quota: int | None  # where there is a service to administer quotas
    replica: int | None  # where there are other pickers


class Servers:
    """One picker's."""

    def __init__(
        self,
        director: Director,
        config: Config,
        pool: Pool,
        views: Views,
        *,
        still: Callable[[], bool],
        synced: Callable[[], bool],
        tls: ServerTls | None,
        quota: QuotaAdminServer | None,
        replicas: Replicas | None,
    ) -> None:
        """
        Args:
            still: whether the service is ready, now.
            synced: whether it is known which pods there are.
            tls: of the gRPC port; None: without.
        """
        listen = config.listen
        self.ext_proc = ExtProcServer(director, config, None if tls is None else tls.credentials)
        self.lean = LeanServer(director, config)
        self.access_log = AccessLogService(self.lean.tickets)
        self.access_log.add_to(self.ext_proc.server)
        EndpointDiscovery(pool).add_to(self.ext_proc.server)
        self.health = Health(still, synced)
        self.health.add_to(self.ext_proc.server)  # Envoy probes the port that it uses
        self._health_server = HealthServer(self.health, listen.host, listen.health)
        self._admin = AdminServer(views, listen.host, listen.admin)
        self._quota = quota
        self._replica = None if replicas is None else replicas.server
        self._listen = listen
        if replicas is not None:
            self.access_log.others = replicas.news
            self.lean.owner = f"{replicas.replica:016x}"

    async def start(self) -> Ports:
        """Listen. Raises OSError: a port cannot be had."""
        return Ports(
            grpc=await self._start(self.ext_proc, "grpc"),
            http=await self._start(self.lean, "http"),
            health=await self._start(self._health_server, "health"),
            admin=await self._start(self._admin, "admin"),
            quota=None if self._quota is None else await self._start(self._quota, "quota"),
            replica=None if self._replica is None else await self._start(self._replica, "replica"),
        )

    async def _start(self, server: _Server, key: str) -> int:
        """An error names the key that would move it elsewhere."""
        try:
            return await server.start()
        except OSError as problem:
            why = "it is taken, or not this machine's"
            if problem.errno:
                why = os.strerror(problem.errno)
            host, port = self._listen.host, getattr(self._listen, key)
            raise OSError(
                problem.errno, f"cannot listen on {host}, port {port} (listen.{key}): {why}"
            ) from problem

    async def stop(self) -> None:
        """In the order in which nobody is asked who is gone; the admin pages last."""
        await self.lean.stop()
        await self.ext_proc.stop()
        await self._health_server.stop()
        if self._quota is not None:
            await self._quota.stop()
        await self._admin.stop()


class _Server(Protocol):
    async def start(self) -> int: ...
