"""What all plugins of the reference picker have in common."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, ClassVar

from picker.config import Section

Data = dict[str, Any]
"""In the terms of warmpath.yaml."""


class Role(Enum):
    """Where a file may refer to a plugin."""

    FILTER = auto()
    SCORER = auto()
    PICKER = auto()
    HANDLER = auto()
    PRODUCER = auto()  # these need no reference
    SOURCE = auto()
    EXTRACTOR = auto()
    DETECTOR = auto()
    FAIRNESS = auto()
    ORDERING = auto()
    USAGE_LIMIT = auto()
    PARSER = auto()


class Refused(ValueError):
    """There is no equivalent; it says what to do."""


class Plugin(Section, frozen=True):
    """One plugin of a file. Fields are its parameters, camelCase there.

    Each method raises Refused where parameters ask for what there is not.
    """

    roles: ClassVar[frozenset[Role]]
    any_parameters: ClassVar[bool] = False  # they do not matter

    def scorer(self) -> Data:
        """Its type and parameters in `scheduling.scorers`, if it has that role."""
        raise NotImplementedError

    def filter(self) -> Data:
        """Its entry in `scheduling.filters`, the same."""
        raise NotImplementedError

    def picker(self) -> Data:
        """`scheduling.picker`, the same."""
        raise NotImplementedError

    def settings(self) -> Data:
        """What it sets besides its part in a profile."""
        return {}

    def notes(self) -> list[str]:
        """What of its parameters is ignored."""
        return []


class ScorerPlugin(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.SCORER})


class FilterPlugin(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.FILTER})
