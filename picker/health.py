"""gRPC health: whether this picker lives, and whether it should be asked.

`liveness` is always SERVING; `inference-extension` since the pool is known, until the end, for the
reference picker's chart asks it for both liveness and readiness, and what drains must not be
killed; the others follow `set_ready`. A name that is none of these is, as the
health protocol has it, the error NOT_FOUND to a Check and the status SERVICE_UNKNOWN to a Watch,
which goes on: the reference picker answers a Check by that status, too, which its protocol keeps
for Watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from picker import grpc_port
from picker.names import EXT_PROC

LIVENESS = "liveness"
SYNCED = "inference-extension"
READINESS = ("", "readiness", EXT_PROC)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """The health service. It can join several servers."""

    def __init__(
        self,
        still: Callable[[], bool] = lambda: True,
        synced: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            still: asked with each check: what was ready may be so no more, and not know yet.
            synced: whether it is known which pods there are, or was once.
        """
        self._still = still
        self._synced = synced
        self._ready = False
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    @property
    def ready(self) -> bool:
        return self._ready and self._still()

    def set_ready(self, ready: bool) -> None:
        """Tell probes and watchers."""
        self._ready = ready
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name is watched")
        return HealthCheckResponse(status=status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        services = (LIVENESS, SYNCED, *READINESS)
        return health_pb2.HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in services}
        )

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Writes the status now and whenever it changes."""
        told = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                await context.write(HealthCheckResponse(status=status))
                told = status
            await changed.wait()

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            serving = True
        elif service == SYNCED:
            serving = self._synced()
        elif service in READINESS:
            serving = self.ready
        else:
            return int(HealthCheckResponse.SERVICE_UNKNOWN)
        return int(HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)


class HealthServer:
    """gRPC health on a port of its own."""

    def __init__(self, health: Health, host: str, port: int) -> None:
        """`port` 0 means any free one."""
        self._host = host
        self._port = port
        self._server = grpc_port.new_server()
        health.add_to(self._server)

    async def start(self) -> int:
        """Listen. Returns the port. Raises OSError."""
        return await grpc_port.start(self._server, self._host, self._port)

    async def stop(self) -> None:
        await self._server.stop(None)
