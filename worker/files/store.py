"""The models on this machine: pulled once by name, kept in a cache directory, found again.

A pull is made in a hidden directory and renamed into place when it is whole, under a lock: so an
interrupted pull shows nothing, and two at once do the work once.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from text.models import StoreError, cache_directory, home_of, is_name, resolve
from worker.files.pull import BUNDLED, PullProgress, pull_bundled, pull_from_hub
from worker.files.report import ModelReport, files_of, report, sha256

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


def pull(name: str, progress: PullProgress, *, force: bool = False) -> Pulled:
    """Fetches a model unless it is here already; StoreError if it cannot be had.

    Names are those of `BUNDLED`, or of a repository of the Hugging Face hub, `org/name`.
    """
    if not is_name(name) or (name not in BUNDLED and "/" not in name):
        known = ", ".join(BUNDLED)
        raise StoreError(
            f"{name[:100]!r} is no model to pull: give {known}, or org/name for one of "
            "the Hugging Face hub"
        )
    home = home_of(name)
    with _clear_about_the_disk(), _locked(home) as partial:
        if home.is_dir() and not force:
            _check_bundled(name, home)
            return Pulled(home, fresh=False)
        if name in BUNDLED:
            ready = pull_bundled(BUNDLED[name], partial, progress)
        else:
            ready = pull_from_hub(name, partial, progress)
        _put_in_place(ready, home)
        shutil.rmtree(partial, ignore_errors=True)
    return Pulled(home, fresh=True)


def list_models() -> list[ModelEntry]:
    """Every pulled model, by name."""
    root = cache_directory()
    homes = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return [
        ModelEntry(
            home.name.replace("--", "/", 1),
            home,
            sum(file.stat().st_size for file in files_of(home)),
        )
        for home in sorted(homes)
        if home.name[0] != "."
    ]


def inspect(name_or_path: str) -> ModelReport:
    """What a model is; StoreError or ModelError if it is not here or not usable."""
    return report(resolve(name_or_path))


def _put_in_place(ready: Path, home: Path) -> None:
    """Renames a finished directory; one that it replaces goes aside first, then away."""
    old = ready.with_name("old")
    shutil.rmtree(old, ignore_errors=True)
    if home.exists():
        home.rename(old)
    ready.rename(home)


@contextmanager
def _locked(home: Path) -> Iterator[Path]:
    """One pull of a model at a time; gives the directory to make it in.

    The lock is the operating system's and goes with its process, however that ends.
    """
    from filelock import FileLock

    partial = home.parent / _PARTIAL / home.name
    partial.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(partial.with_name(f"{home.name}.lock")):
        partial.mkdir(exist_ok=True)
        yield partial


@contextmanager
def _clear_about_the_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or cache_directory()
        reason = error.strerror or error
        raise StoreError(f"the model cache cannot be written: {where}: {reason}") from error


def _check_bundled(name: str, home: Path) -> None:
    """Raise StoreError if a model whose checksum we know has another by now."""
    known = BUNDLED.get(name)
    if known is None:
        return
    file = home / Path(known.member).name
    if not file.is_file() or sha256(file) != known.sha256:
        raise StoreError(f"{home} is damaged: `warmpath model pull --force {name}` repairs it")
