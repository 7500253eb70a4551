"""Where a store in Redis is, and how to get there: its URL.

    redis://[USER:PASSWORD@]HOST[:6379][/DB]                  one server
    redis+sentinel://...@HOST[:26379][,HOST...]/SERVICE[/DB]  the master that Sentinels name
    redis+cluster://...@HOST[:6379][,HOST...]                 a cluster
    rediss, rediss+sentinel, rediss+cluster                   the same over TLS

and after a `?`: `name` of one of several stores there; `ca`, `certificate` and `key`, PEM files for
TLS, where the system's certificates do not do or the server wants one of ours; `sentinelPassword`,
where Sentinels have one.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from picker.document import nearest
from picker.quota.model import QuotaError

SCHEMES = tuple(
    f"{plain}{way}" for plain in ("redis", "rediss") for way in ("", "+sentinel", "+cluster")
)
PORT, SENTINEL_PORT = 6379, 26379
KEYS = ("name", "ca", "certificate", "key", "sentinelPassword")

Address = tuple[str, int]
Kind = Literal["server", "sentinel", "cluster"]


@dataclass(frozen=True, slots=True)
class RedisURL:
    """What a URL says."""

    kind: Kind
    addresses: tuple[Address, ...]  # of the server, of Sentinels, or of some nodes
    service: str  # that Sentinels know the master by
    user: str
    password: str
    database: int
    tls: bool
    settings: Mapping[str, str]  # by KEYS

    @property
    def name(self) -> str:
        return self.settings.get("name", "default")

    @property
    def shown(self) -> str:
        """For people: without passwords."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        if self.kind == "sentinel":
            return f"redis {self.service} of the Sentinels at {hosts}"
        return f"redis at {hosts}"

    def context(self) -> ssl.SSLContext | None:
        """For connections; None without TLS.

        Raises:
            QuotaError: a file cannot be used.
        """
        if not self.tls:
            return None
        file = self.settings.get("ca")
        try:
            context = ssl.create_default_context(cafile=file)
            if file := self.settings.get("certificate"):
                context.load_cert_chain(file, self.settings.get("key"))
        except (OSError, ssl.SSLError) as problem:
            raise QuotaError(f"{self.shown}: {file} cannot be used for TLS: {problem}") from None
        return context


def parse(url: str) -> RedisURL:
    """What a URL says.

    Raises:
        QuotaError: it is none of a store in Redis.
    """
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # no password
    plain, _, way = parts.scheme.partition("+")
    if parts.scheme not in SCHEMES:
        raise QuotaError(f"{shown!r}: no such way to Redis; known: {', '.join(SCHEMES)}")
    kind: Kind = "server" if not way else "sentinel" if way == "sentinel" else "cluster"
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in settings:
        if key not in KEYS:
            raise QuotaError(f"{shown!r}: {key!r} is unknown; {nearest(key, KEYS)}")
    if plain == "redis" and (found := {"ca", "certificate", "key"} & settings.keys()):
        raise QuotaError(f"{shown!r}: {min(found)} is for TLS: write rediss://")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    default = SENTINEL_PORT if kind == "sentinel" else PORT
    addresses = tuple(_address(host, default, shown) for host in hosts.split(","))
    if kind == "server" and len(addresses) > 1:
        raise QuotaError(f"{shown!r}: one server, or write redis+sentinel:// or redis+cluster://")
    place = [unquote(part) for part in parts.path.strip("/").split("/") if part]
    service = place.pop(0) if kind == "sentinel" and place else ""
    if kind == "sentinel" and (not service or service.isdigit()):
        raise QuotaError(f"{shown!r}: write the name of the service after the Sentinels: /mymaster")
    database = place.pop(0) if place else "0"
    if place or not (database.isascii() and database.isdigit() and len(database) < 6):
        raise QuotaError(f"{shown!r}: write the number of a database after the host: /0")
    if kind == "cluster" and int(database):
        raise QuotaError(f"{shown!r}: a cluster has only database 0")
    return RedisURL(
        kind,
        addresses,
        service,
        unquote(user),
        unquote(password),
        int(database),
        plain == "rediss",
        settings,
    )


def _address(text: str, port: int, shown: str) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or port
    except ValueError:
        host = ""
    if not host:
        raise QuotaError(f"{shown!r}: {text!r} is no host: write HOST or HOST:PORT")
    return host, port
