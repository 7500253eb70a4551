"""The lean profile's face: Envoy's ext_authz asks over HTTP/1.1, one request and one answer.

Envoy posts the client's method, path, some of its headers and its body under `/pick`. The answer
is 200 with the endpoint in a header; or a refusal. One of 4xx is the client's answer. A 503
Envoy would replace, so it is a 200 too, with what to say in headers that a route of Envoy's
answers with. An answer of 500 itself means that the picker failed, and Envoy fails open or closed.
"""

from __future__ import annotations

import asyncio
import logging

from picker.config import Config
from picker.director import Director
from picker.lean_connection import Connection
from picker.tickets import Tickets

log = logging.getLogger(__name__)

BACKLOG = 1024  # connections that wait to be taken: a busy Envoy opens many at once
SWEEP_SECONDS = 0.5  # as often as Envoy tells of running requests


class LeanServer:
    """Answers Envoy on `listen.http`. `tickets` are for the access log to settle."""

    def __init__(self, director: Director, config: Config) -> None:
        self.director = director
        self.max_body = config.max_body
        self.reads_usage = config.usage
        self.tickets = Tickets()
        self.owner = ""  # in names of requests: who picked, where there are several pickers
        self.connections: set[Connection] = set()
        self.held = 0  # bytes of unfinished bodies
        self.ready = False  # as told at READY_PATH
        self.draining = False
        self._config = config
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()

    def reconfigure(self, config: Config) -> None:
        """Drain by this; ports and limits stay."""
        self._config = config

    async def start(self) -> int:
        """Take a port, and return it. Connections to it are refused until `serve`.

        Raises:
            OSError: the port is in use, or the host is none of this machine.
        """
        listen = self._config.listen
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self),
            listen.host.strip("[]"),
            listen.http,
            backlog=BACKLOG,
            start_serving=False,
        )
        self._sweep_on()
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self) -> None:
        """Take connections. Envoy does not ask this port whether the picker is ready."""
        assert self._server is not None, "started"
        await self._server.start_serving()

    async def drain(self) -> None:
        """Let Envoy go elsewhere: take no connection, and close those that are idle.

        Returns when the others have had their answers and the access log has told how the picked
        requests ended, at the latest after `drain` seconds.
        """
        assert self._server is not None
        self.draining = True
        self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        self._look_whether_drained()
        try:
            async with asyncio.timeout(self._config.drain):
                await self._drained.wait()
        except TimeoutError:
            unfinished = len(self.connections) + len(self.tickets)
            log.warning("%d requests had not ended after %gs", unfinished, self._config.drain)

    def _look_whether_drained(self) -> None:
        if self.draining and not self.connections and not self.tickets:
            self._drained.set()

    async def stop(self) -> None:
        """Close all, and end every open pick as aborted."""
        if self._server is not None:
            self._server.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self.connections):
            connection.close()
        self.tickets.abandon()

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._look_whether_drained()

    def sweep(self) -> None:
        """Give up what does not end: picks without news, requests that are sent too slowly."""
        self.tickets.sweep()
        for connection in list(self.connections):
            connection.sweep()
        self._look_whether_drained()

    def _sweep_on(self) -> None:
        self.sweep()
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_on)
