"""How urgent a request is, by its headers, and what its tenant weighs."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from picker.config import Flow as Settings
from picker.header_names import first_of, header_names

MOST = 100  # and -100 the least: priorities are few
MAX_DEADLINE_MS = 10**9
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6


class Objectives:
    """Priorities, deadlines and weights as they are set, and what else is told of objectives.

    Raises:
        ValueError: a priority or a tenant's weight is out of range.
    """

    def __init__(self, settings: Settings) -> None:
        self._told: Mapping[str, int] = {}
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> None:
        """Raises ValueError, as at first; nothing has changed then."""
        check_settings(settings)
        self._settings = settings
        self._objective_headers = header_names(settings.objective_header)
        self._priority_header = settings.priority_header.lower()
        self._deadline_headers = header_names(settings.deadline_header)
        self.update(self._told)

    def update(self, priorities: Mapping[str, int]) -> None:
        """Make these the objectives, by name, beside those set, which win."""
        self._told = priorities
        self._priorities: Mapping[str, int] = {**priorities, **self._settings.objectives}

    @property
    def headers(self) -> tuple[str, ...]:
        """Request headers that are read, in lower case: a gateway must send these."""
        used = [self._priority_header] if self._priority_header else []
        used += self._objective_headers if self._priorities else ()
        used += self._deadline_headers if self._settings.order == "deadline" else ()
        return tuple(used)

    def weight(self, tenant: str) -> float:
        """By which the tenant has a share."""
        return self._settings.weights.get(tenant, 1.0)

    def priority(self, headers: Mapping[str, str]) -> int:
        """Of a request; 0 unless it says otherwise in a way that is understood."""
        told = _whole(headers.get(self._priority_header, "")) if self._priority_header else None
        if told is not None:
            return max(-MOST, min(MOST, told))
        return self._priorities.get(first_of(headers, self._objective_headers), 0)

    def patience(self, headers: Mapping[str, str]) -> float:
        """Seconds from a request's arrival until it should go: as told, else its time to live."""
        if self._settings.order == "deadline":
            told = _whole(first_of(headers, self._deadline_headers))
            if told is not None and told >= 0:
                return min(told, MAX_DEADLINE_MS) / 1000
        return self._settings.ttl or inf


def _whole(text: str) -> int | None:
    """A whole number of a few digits."""
    digits = text.strip()
    if len(digits) > 12 or not digits.lstrip("-").isdecimal() or not digits.isascii():
        return None
    try:
        return int(digits)
    except ValueError:  # `--1`
        return None


def check_settings(settings: Settings) -> None:
    """Raises ValueError: a priority or a tenant's weight is out of range."""
    for name, priority in settings.objectives.items():
        if not -MOST <= priority <= MOST:
            raise ValueError(
                f"flow.objectives: {name!r} must be between -{MOST} and {MOST}, not {priority}"
            )
    for tenant, weight in settings.weights.items():
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(
                f"flow.weights: {tenant!r} must be between {LEAST_WEIGHT:g} and "
                f"{MOST_WEIGHT:g}, not {weight:g}"
            )
