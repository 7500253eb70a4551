"""Settings that name a header, or several with commas: the first that a request has tells."""

from __future__ import annotations

from collections.abc import Mapping


def header_names(setting: str) -> tuple[str, ...]:
    """In lower case; none of an empty setting."""
    return tuple(name.strip().lower() for name in setting.split(",") if name.strip())


def first_of(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The value of the first that is there; empty without any. Headers are in lower case."""
    for name in names:
        if value := headers.get(name):
            return value
    return ""
