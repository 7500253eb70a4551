"""What the operator sees of the watch of Kubernetes: a part of /debug/state, and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from picker.exposition import Spec, write
from picker.kubernetes.follow import KubernetesPool
from picker.kubernetes.reflector import Phase, Reflector

MAX_SHOWN = 1000  # pods that are not used
_RESOURCE = ("resource",)

SYNCED = Spec(
    "gauge",
    "warmpath_kubernetes_synced",
    _RESOURCE,
    "1 once all objects of a kind were known; 0 also where the cluster has no such kind.",
)
OBJECTS = Spec("gauge", "warmpath_kubernetes_objects", _RESOURCE, "Objects that are known.")
FAILING = Spec(
    "gauge", "warmpath_kubernetes_failing", _RESOURCE, "1 while the API server does not serve us."
)
EVENT_AGE = Spec(
    "gauge",
    "warmpath_kubernetes_last_event_age_seconds",
    _RESOURCE,
    "Since anything was heard of them, bookmarks included.",
)
RESTARTS = Spec(
    "counter",
    "warmpath_kubernetes_watch_restarts_total",
    _RESOURCE,
    "Watches that were begun anew, as it is done every few minutes.",
)


class KubernetesView:
    """Shows it; keeps nothing."""

    def __init__(self, followed: KubernetesPool) -> None:
        self._followed = followed

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        followed = self._followed
        return {
            "server": None if followed.api is None else followed.api.server,
            "namespace": None if followed.api is None else followed.api.namespace,
            "synced": followed.synced,
            "waitingFor": followed.waiting_for or None,
            "resources": [_described(each) for each in followed.reflectors],
            "unusedPods": dict(sorted(followed.unused.items())[:MAX_SHOWN]),
        }

    def page(self) -> Iterator[str]:
        """Prometheus' text."""
        by_name = {str(each.resource): each for each in self._followed.reflectors}
        rows = [((name,), each) for name, each in by_name.items()]
        yield from write(SYNCED, [(row, int(each.phase is Phase.SYNCED)) for row, each in rows])
        yield from write(OBJECTS, [(row, len(each.objects)) for row, each in rows])
        yield from write(FAILING, [(row, int(_is_failing(each))) for row, each in rows])
        ages = [(row, _age(each)) for row, each in rows]
        yield from write(EVENT_AGE, [(row, age) for row, age in ages if age is not None])
        yield from write(RESTARTS, [(row, max(0, each.watches - 1)) for row, each in rows])


def _described(reflector: Reflector[Any]) -> dict[str, Any]:
    return {
        "resource": str(reflector.resource),
        "selection": reflector.selection,
        "phase": reflector.phase,
        "objects": len(reflector.objects),
        "resourceVersion": reflector.version or None,
        "lastEventAgeSeconds": _age(reflector),
        "error": reflector.error or None,
        "lists": reflector.lists,
        "watches": reflector.watches,
    }


def _is_failing(reflector: Reflector[Any]) -> bool:
    return bool(reflector.error) and reflector.phase is not Phase.ABSENT


def _age(reflector: Reflector[Any]) -> float | None:
    return None if reflector.heard is None else time.monotonic() - reflector.heard
