"""Who the other pickers are: a list, or the addresses behind a name."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Collection

from picker.config import ReplicasSection
from picker.pool import parse_address
from picker.replicas.peer import Peer

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0  # between two looks at who is behind a name
MAX_PEERS = 64
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


def check_settings(settings: ReplicasSection) -> None:
    """Raises ValueError for settings that cannot be."""
    if settings.peers and settings.service:
        raise ValueError("replicas.service: name the pickers there or in replicas.peers, not both")
    if len(settings.peers) > MAX_PEERS:
        raise ValueError(f"replicas.peers: {MAX_PEERS} are the most")
    for peer in settings.peers:
        try:
            parse_address(peer)
        except ValueError as problem:
            raise ValueError(f"replicas.peers: {problem}".replace("endpoint ", "")) from None
    if settings.service:
        split_service(settings.service)


def split_service(service: str) -> tuple[str, int]:
    """Name and port of `name:port`. Raises ValueError."""
    name, _, port = service.rpartition(":")
    if not (_NAME.fullmatch(name) and port.isascii() and port.isdigit() and len(port) <= 5):
        raise ValueError(f"replicas.service: {service!r} is no name:port")
    if not 0 < int(port) < 65536:
        raise ValueError(f"replicas.service: {service!r}: the port must be 1 to 65535")
    return name, int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Peers:
    """Follows each of them for as long as it is one."""

    def __init__(self, settings: ReplicasSection, make: Callable[[str], Peer]) -> None:
        self._settings = settings
        self._make = make
        self._tasks: dict[str, tuple[Peer, asyncio.Task[None]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._unknown = False  # the name was not found when last looked up

    @property
    def all(self) -> list[Peer]:
        """Without ourselves."""
        return [peer for peer, _ in self._tasks.values() if not peer.is_self]

    async def start(self) -> None:
        if self._settings.service:
            self._looking = asyncio.create_task(self._look())
        else:
            self.set(self._settings.peers)
            self._looked.set()

    async def first_round(self, seconds: float) -> None:
        """Wait until each one has told what there is or cannot be had, but not longer than this."""
        try:
            async with asyncio.timeout(seconds):
                await self._looked.wait()
                for peer, _ in list(self._tasks.values()):
                    await peer.tried.wait()
        except TimeoutError:
            log.warning("Not all other pickers have told what they know within %g s", seconds)

    async def stop(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set(self, addresses: Collection[str]) -> None:
        """These are the peers from now on."""
        for address in [known for known in self._tasks if known not in addresses]:
            self._tasks.pop(address)[1].cancel()
        for address in addresses:
            if address not in self._tasks and len(self._tasks) < MAX_PEERS:
                peer = self._make(address)
                self._tasks[address] = peer, asyncio.create_task(peer.run())

    async def _look(self) -> None:
        name, port = split_service(self._settings.service)
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                self.set({_join(str(address[0]), port) for *_, address in found})
                self._unknown = False
            except (OSError, UnicodeError) as problem:  # those that were found last are kept
                if not self._unknown:
                    log.warning("replicas.service: %s is not found: %s", name, problem)
                self._unknown = True
            self._looked.set()
            await asyncio.sleep(LOOK_SECONDS)
