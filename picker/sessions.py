"""Sessions: which endpoint served a session last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import xxhash

from picker import config

if TYPE_CHECKING:
    from picker.pool import Endpoint

MOST = 100_000  # sessions remembered; beyond that the longest unused one is forgotten


class Sessions:
    """Session ids to endpoints, for `ttl` seconds after their last use.

    An id is kept as a hash of 16 bytes, so that a client cannot fill the memory with long ones.

    Args:
        enabled: False remembers nothing, for when no scorer asks.
    """

    def __init__(
        self,
        settings: config.Sessions,
        *,
        enabled: bool = True,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._header = settings.header.lower() if enabled else ""
        self._ttl = settings.ttl
        self._most = most
        self._clock = clock
        self._homes: OrderedDict[bytes, tuple[Endpoint, float]] = OrderedDict()  # oldest use first

    def reconfigure(self, settings: config.Sessions, *, enabled: bool) -> None:
        """Another header names sessions from now on, or they live for another time."""
        self._header = settings.header.lower() if enabled else ""
        self._ttl = settings.ttl

    def __len__(self) -> int:
        return len(self._homes)

    def key(self, headers: Mapping[str, str]) -> bytes:
        """The name of a request's session; empty for one without."""
        if not self._header:
            return b""
        value = headers.get(self._header)
        return xxhash.xxh3_128_digest(value.encode("utf-8", "surrogatepass")) if value else b""

    def find(self, key: bytes) -> Endpoint | None:
        """The endpoint of a session, while it lives."""
        home = self._homes.get(key)
        if home is None:
            return None
        endpoint, expires = home
        if not endpoint.alive or expires <= self._clock():
            del self._homes[key]
            return None
        return endpoint

    def keep(self, key: bytes, endpoint: Endpoint) -> None:
        """The session lives on `endpoint` from now on."""
        if not key:
            return
        now = self._clock()
        homes = self._homes
        homes[key] = endpoint, now + self._ttl
        homes.move_to_end(key)
        while len(homes) > self._most or next(iter(homes.values()))[1] <= now:
            homes.popitem(last=False)
