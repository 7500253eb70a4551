"""Many events at once, as arrays."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import numpy as np

from picker.prefix.events import Removed, Stored, Tier
from picker.prefix.rows import Flags
from picker.prefix.table import Keys, Rows


def as_keys(names: Collection[int]) -> Keys:
    """Hashes as an array."""
    return np.frombuffer(array("Q", names), np.uint64) if names else np.empty(0, np.uint64)


def by_place(events: Iterable[Stored | Removed]) -> dict[tuple[Tier, int], list[int]]:
    """The hashes of events by tier and group, in order."""
    places: dict[tuple[Tier, int], list[int]] = {}
    for event in events:
        places.setdefault((event.tier, event.group), []).extend(event.hashes)
    return places


def repeated(values: Keys | Rows) -> Flags | None:
    """Which of these are equal to an earlier one; None: none."""
    ordered = np.sort(values)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    again = np.ones(len(values), np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again
