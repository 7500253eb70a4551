"""Stores by their URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from picker.quota.model import QuotaError
from picker.quota.store import Store, StoreDown
from picker.quota.store_memory import MemoryStore
from picker.quota.store_sqlite import SQLiteStore


def open_store(url: str, timeout: float = 0.1, *, create: bool = True) -> Store:
    """The store at `memory:`, `sqlite:///DIRECTORY/FILE` or `redis://HOST:PORT/DB`.

    Args:
        url: a relative path has two slashes less: `sqlite:quota.db`.
        timeout: seconds until a store that does not answer is down.
        create: make a file that is not there.

    Raises:
        QuotaError: it is no store's URL, or the file cannot be opened.
        StoreDown: the file is not there.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return MemoryStore()
    if parts.scheme == "sqlite" and parts.path and not parts.netloc:
        path = Path(unquote(parts.path))
        if not create and not path.exists():
            raise StoreDown(
                f"there is no store at {path}: name another with --store, or make it with a write"
            )
        return SQLiteStore(path, timeout)
    if parts.scheme.partition("+")[0] in ("redis", "rediss") and parts.netloc:
        try:
            from picker.quota.store_redis import RedisStore
        except ImportError:
            raise QuotaError(
                f"{url!r} needs Redis' client: pip install 'warmpath[redis]'"
            ) from None
        return RedisStore(url, timeout)
    raise QuotaError(
        f"{url!r} is no store: write memory:, sqlite:///var/lib/warmpath/quota.db "
        "or redis://HOST:6379/0"
    )
