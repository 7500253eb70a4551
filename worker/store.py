"""The models on this machine: pulled once by name, kept in a cache directory, found again.

A pull is made in a hidden directory and renamed into place when it is whole, under a lock: so an
interrupted pull shows nothing, and two at once do the work once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from worker.pull import BUNDLED, PullProgress, StoreError, pull_bundled, pull_from_hub

__all__ = ["ModelEntry", "StoreError", "cache_directory", "list_models", "pull", "resolve"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_PARTIAL = ".partial"


class ModelEntry(NamedTuple):
    """A pulled model."""

    name: str
    path: Path
    num_bytes: int  # on disk


class Pulled(NamedTuple):
    """What a pull did."""

    path: Path
    fresh: bool  # False: it was there already


def cache_directory() -> Path:
    """Where pulled models are: $WARMPATH_CACHE, else the user's cache directory."""
    override = os.environ.get("WARMPATH_CACHE")
    if override:
        return Path(override).expanduser() / "models"
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("warmpath", appauthor=False)) / "models"


def resolve(name_or_path: str) -> Path:
    """The file or directory of a model given by path or by the name it was pulled as."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if _NAME.fullmatch(name_or_path):
        pulled = _home(name_or_path)
        if pulled.is_dir():
            return pulled
        raise StoreError(
            f"there is no model {name_or_path!r} here: pull it with "
            f"`warmpath model pull {name_or_path}`, or give the path of a model"
        )
    raise StoreError(f"there is no model at {name_or_path!r}")


def pull(name: str, progress: PullProgress, *, force: bool = False) -> Pulled:
    """Fetches a model unless it is here already; StoreError if it cannot be had.

    Names are those of `BUNDLED`, or of a repository of the Hugging Face hub, `org/name`.
    """
    home = _home(checked_name(name))
    if name not in BUNDLED and "/" not in name:
        known = ", ".join(BUNDLED)
        raise StoreError(f"no model is called {name!r}: known are {known}, or org/name on the hub")
    with _no_space_is_an_error(), _locked(home):
        if home.is_dir() and not force:
            return Pulled(home, fresh=False)
        partial = home.parent / _PARTIAL / home.name
        partial.mkdir(parents=True, exist_ok=True)
        if name in BUNDLED:
            ready = pull_bundled(BUNDLED[name], partial, progress)
        else:
            ready = pull_from_hub(name, partial, progress)
        _replace(ready, home)
        shutil.rmtree(partial, ignore_errors=True)
    return Pulled(home, fresh=True)


def list_models() -> list[ModelEntry]:
    """Every pulled model, by name."""
    root = cache_directory()
    homes = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return [
        ModelEntry(home.name.replace("--", "/"), home, size_on_disk(home))
        for home in sorted(homes)
        if not home.name.startswith(".")
    ]


def checked_name(name: str) -> str:
    """The name, if it can be one: never a path out of the cache."""
    if not _NAME.fullmatch(name) or "--" in name:
        raise StoreError(f"{name[:100]!r} cannot be a model's name: use letters, digits and .-_")
    return name


def files_of(path: Path) -> list[Path]:
    """The files that make up a model."""
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(path).parts)
    )


def size_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def _home(name: str) -> Path:
    return cache_directory() / name.replace("/", "--")


def _replace(ready: Path, home: Path) -> None:
    """Puts a finished directory in place; a directory cannot be renamed over a full one."""
    old = ready.with_name(f"{ready.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if home.exists():
        home.rename(old)
    ready.rename(home)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One pull of a model at a time; the lock goes with its process, however that ends."""
    from filelock import FileLock

    directory = home.parent / _PARTIAL
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / f"{home.name}.lock"):
        yield


@contextmanager
def _no_space_is_an_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StoreError(
            f"the model cache {cache_directory()} cannot be written: {error.strerror}{where}"
        ) from error
