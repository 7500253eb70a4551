"""The models on this machine, by path or by the name they were pulled as."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(f"{_PART}(/{_PART})?")


class StoreError(ValueError):
    """A model that is not here and cannot be fetched; the message is one line."""


def cache_directory() -> Path:
    """Where pulled models are: in $WARMPATH_CACHE, else in the user's cache directory."""
    override = os.environ.get("WARMPATH_CACHE")
    if override:
        return Path(override).expanduser() / "models"
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("warmpath", appauthor=False)) / "models"


def resolve(name_or_path: str) -> Path:
    """The file or directory of a model, given by path or by the name it was pulled as."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if not is_name(name_or_path):
        raise StoreError(f"there is no model at {name_or_path!r}")
    home = home_of(name_or_path)
    if not home.is_dir():
        raise StoreError(
            f"there is no model {name_or_path!r} here: pull it with "
            f"`warmpath model pull {name_or_path}`, or give the path of a model"
        )
    return home


def is_name(text: str) -> bool:
    """Whether this can be a model's name: never a path out of the cache."""
    return _NAME.fullmatch(text) is not None and "--" not in text


def home_of(name: str) -> Path:
    """Where a model of this name is, once it was pulled."""
    return cache_directory() / name.replace("/", "--")
