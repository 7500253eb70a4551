"""Stores by their URL, and the settings of quotas as a whole."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from picker.config import Quota
from picker.quota import redis_url
from picker.quota.model import QuotaError
from picker.quota.store import Store, StoreDown
from picker.quota.store_memory import MemoryStore
from picker.quota.store_sqlite import SQLiteStore
from picker.quota.windows import load_zone

REDIS_SECONDS = 0.1  # until it is down: a request waits no longer for what others can do without
SQLITE_SECONDS = 2.0  # a file does not go away; while its disk is slow, nothing else would be right


def open_store(url: str, timeout: float = 0.0, *, create: bool = True) -> Store:
    """The store at `memory:`, `sqlite:///DIRECTORY/FILE` or `redis://HOST:PORT/DB`.

    Args:
        url: a relative path has two slashes less: `sqlite:quota.db`; for Redis see redis_url.py.
        timeout: seconds until a store that does not answer is down; 0: REDIS_SECONDS, or
            SQLITE_SECONDS.
        create: make a file that is not there.

    Raises:
        QuotaError: it is no store's URL, or the file cannot be opened.
        StoreDown: the file is not there.
    """
    kind = _kind(url)
    if kind == "memory":
        return MemoryStore()
    if kind == "sqlite":
        path = Path(unquote(urlsplit(url).path))
        if not create and not path.exists():
            raise StoreDown(
                f"there is no store at {path}: name another with --store, or make it with a write"
            )
        return SQLiteStore(path, timeout or SQLITE_SECONDS)
    try:
        from picker.quota.store_redis import RedisStore
    except ImportError:
        raise QuotaError("Redis needs a client: pip install 'warmpath[redis]'") from None
    return RedisStore(url, timeout or REDIS_SECONDS)


def without_password(url: str) -> str:
    """A store's URL, for people."""
    scheme, slashes, rest = url.partition("://")
    _, at, place = rest.rpartition("@")
    return f"{scheme}{slashes}***@{place}" if at else url


def check_settings(settings: Quota) -> None:
    """Whether quotas can be had with these settings; the store is not opened.

    Raises:
        QuotaError: naming the key.
    """
    try:
        _kind(settings.store)
    except QuotaError as problem:
        raise QuotaError(f"quota.store: {problem}") from None
    try:
        load_zone(settings.zone)
    except QuotaError as problem:
        raise QuotaError(f"quota.zone: {problem}") from None


def _kind(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme == "memory":
        return "memory"
    if parts.scheme == "sqlite" and parts.path and not parts.netloc:
        return "sqlite"
    if parts.scheme.startswith("redis"):
        redis_url.parse(url)
        return "redis"
    raise QuotaError(
        f"{without_password(url)!r} is no store: write memory:, "
        "sqlite:///var/lib/warmpath/quota.db or redis://HOST:6379/0"
    )
