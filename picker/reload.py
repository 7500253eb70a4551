"""A configuration that changes while it is in force: what is taken over, and how it went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from picker.config import Config
from picker.exposition import Spec, write

LIVE = {  # sections and keys that need no restart
    "pool.endpoints",
    "pool.ignoreSubset",
    "models",
    "metrics",
    "scheduling",
    "sessions",
    *(f"identity.{key}" for key in ("keys", "claim", "payload", "header", "default")),
    *(
        f"flow.{key}"
        for key in (
            "ttl",
            "maxRequests",
            "maxBytes",
            "tenantRequests",
            "tenantBytes",
            "sheddable",
            "scaleFromZero",
            "deadlineHeader",
            "objectiveHeader",
            "objectives",
            "priorityHeader",
            "weights",
            "saturation",
        )
    ),
    "quota.expectedOutput",
    "rewrites",
    "drainDelay",
    "drain",
}
SUCCESSFUL = Spec(
    "gauge",
    "warmpath_config_last_reload_successful",
    (),
    "1 unless the configuration file has changed since into what cannot be used.",
)
SUCCESS_TIME = Spec(
    "gauge",
    "warmpath_config_last_reload_success_timestamp_seconds",
    (),
    "When the configuration in force was taken over, in Unix seconds.",
)


def in_force(old: Config, new: Config) -> tuple[Config, list[str]]:
    """What holds once a new configuration is taken over, and keys of it that wait for a restart."""
    changes: dict[str, Any] = {}
    waiting: list[str] = []
    live = LIVE
    if new.pool.kubernetes != old.pool.kubernetes:
        # Who turns to Kubernetes lists no endpoints: that must not empty the pool meanwhile.
        live = LIVE - {"pool.endpoints"}
    for section in msgspec.structs.fields(old):
        before, after = getattr(old, section.name), getattr(new, section.name)
        if before == after:
            continue
        if section.encode_name in live:
            changes[section.name] = after
        elif not isinstance(before, msgspec.Struct):
            waiting.append(section.encode_name)
        else:
            parts: dict[str, Any] = {}
            for part in msgspec.structs.fields(before):
                value = getattr(after, part.name)
                if getattr(before, part.name) != value:
                    key = f"{section.encode_name}.{part.encode_name}"
                    if key in live:
                        parts[part.name] = value
                    else:
                        waiting.append(key)
            changes[section.name] = msgspec.structs.replace(before, **parts)
    return msgspec.structs.replace(old, **changes), waiting


@dataclass(slots=True)
class Reloads:
    """How it went, for people and for alerts."""

    succeeded_at: float = field(default_factory=time.time)  # Unix seconds
    error: str | None = None  # of the file as it is now, if it cannot be used
    failed_at: float | None = None
    waiting: list[str] = field(default_factory=list)  # keys of it that wait for a restart

    def succeeded(self, waiting: list[str]) -> None:
        self.succeeded_at, self.error, self.failed_at = time.time(), None, None
        self.waiting = waiting

    def failed(self, why: str) -> None:
        """The file cannot be used, and what was in force still is."""
        self.error, self.failed_at = why, time.time()

    def state(self) -> dict[str, Any]:
        """To be written as JSON."""
        return {
            "successful": self.error is None,
            "succeededAt": self.succeeded_at,
            "error": self.error,
            "failedAt": self.failed_at,
            "waitingForRestart": self.waiting,
        }

    def page(self) -> Iterator[str]:
        """As Prometheus' text."""
        yield from write(SUCCESSFUL, [((), int(self.error is None))])
        yield from write(SUCCESS_TIME, [((), self.succeeded_at)])
