"""Sessions: which endpoint served a session last, here or at another picker of the pool."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from picker import config

if TYPE_CHECKING:
    from picker.pool import Endpoint

MOST = 100_000  # sessions remembered; beyond that the longest unused one is forgotten


class Stamp(NamedTuple):
    """When a session was kept, without a clock: the greater counts, wherever it is compared."""

    version: int = 0  # one more than that of the one before, as far as its picker knew
    replica: int = 0  # that kept it


class Home(NamedTuple):
    """Where a session lives."""

    endpoint: Endpoint
    expires: float  # by the sessions' clock
    stamp: Stamp

    def lives(self, now: float) -> bool:
        return self.endpoint.alive and self.expires > now


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
        self._homes: OrderedDict[bytes, Home] = OrderedDict()  # oldest use first
        self.replica = 0  # our number among the pickers of the pool
        # Told of each session that is kept here, where somebody wants to know.
        self.on_keep: Callable[[bytes], None] | None = None

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
        return home.endpoint if home.lives(self._clock()) else None

    def keep(self, key: bytes, endpoint: Endpoint) -> None:
        """The session lives on `endpoint` from now on."""
        if not key:
            return
        now = self._clock()
        before = self._homes.get(key)
        stamp = Stamp(1 if before is None else before.stamp.version + 1, self.replica)
        self._keep(key, Home(endpoint, now + self._ttl, stamp), now)
        if self.on_keep is not None:
            self.on_keep(key)

    def kept_elsewhere(self, key: bytes, endpoint: Endpoint, stamp: Stamp, age: float) -> None:
        """Another picker kept a session on `endpoint`, `age` seconds ago."""
        now = self._clock()
        before = self._homes.get(key)
        expires = now + self._ttl - max(0.0, age)
        newer = before is None or not before.lives(now) or before.stamp < stamp
        if newer and expires > now and self._header:
            self._keep(key, Home(endpoint, expires, stamp), now)

    def told(self, key: bytes) -> tuple[Endpoint, Stamp, float] | None:
        """Where a session lives, its stamp, and seconds since it was kept: for others to know."""
        home = self._homes.get(key)
        if home is None:
            return None
        return home.endpoint, home.stamp, self._clock() + self._ttl - home.expires

    def keys(self) -> list[bytes]:
        """Of all sessions, the longest unused first."""
        return list(self._homes)

    def _keep(self, key: bytes, home: Home, now: float) -> None:
        homes = self._homes
        homes[key] = home
        homes.move_to_end(key)
        while len(homes) > self._most or next(iter(homes.values())).expires <= now:
            homes.popitem(last=False)
