"""The pods that a pool selects, never mixed with those that it selected before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from picker.kubernetes.client import Api
from picker.kubernetes.endpoints import Group
from picker.kubernetes.objects import Pod
from picker.kubernetes.pace import Pace
from picker.kubernetes.reflector import Phase, Reflector
from picker.kubernetes.resource import pods


@dataclass(slots=True)
class _Selected:
    group: Group
    reflector: Reflector[Pod]


class Selection:
    """Follows the pods of the group that is wanted.

    While another group's pods are being listed, those of the one before are still given: the
    requests of a pool that changes have somewhere to go.
    """

    def __init__(self, api: Api, on_change: Callable[[], None], pace: Pace) -> None:
        self._api = api
        self._on_change = on_change
        self._pace = pace
        self._current: _Selected | None = None
        self._next: _Selected | None = None  # whose pods are not listed yet
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def reflectors(self) -> list[Reflector[Pod]]:
        """Of the present pods, and of those to come."""
        return [each.reflector for each in (self._current, self._next) if each is not None]

    def want(self, group: Group | None) -> None:
        """Follow the pods of a group from now on; None: there is none, and so no pod."""
        current, following = self._current, self._next
        if group is None:
            self._current = self._next = None
            self._end(current)
            self._end(following)
        elif current is not None and current.group.labels == group.labels:
            current.group, self._next = group, None
            self._end(following)
        elif following is not None and following.group.labels == group.labels:
            following.group = group
        else:
            self._end(following)
            self._next = self._begin(group)

    def pods(self) -> tuple[Group, Mapping[str, Pod]] | None:
        """A group and all its pods, by name; None as long as there is none."""
        if self._next is not None and self._next.reflector.phase is Phase.SYNCED:
            self._end(self._current)
            self._current, self._next = self._next, None
        if self._current is None or self._current.reflector.phase is not Phase.SYNCED:
            return None
        return self._current.group, self._current.reflector.objects

    async def stop(self) -> None:
        self.want(None)
        await asyncio.gather(*self._leaving)

    def _begin(self, group: Group) -> _Selected:
        reflector = Reflector(
            self._api,
            pods(self._api.namespace),
            Pod,
            self._on_change,
            self._pace,
            labels=group.labels,
        )
        reflector.start()
        return _Selected(group, reflector)

    def _end(self, selected: _Selected | None) -> None:
        if selected is not None:
            task = asyncio.create_task(selected.reflector.stop())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
