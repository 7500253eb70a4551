"""Whether pods can take more: from what they told, and from what we sent since.

A pod's queue is what it told and all that went there after it was asked, so that no burst gets
past between two scrapes; or what we have there beyond what it told to run, if that is more, for
what is on its way when it is asked. Room is added up pod by pod: a mean would hide a full one.

A request changes the load of one pod or two. Only those are looked at again, so that to ask for
room costs the same however many pods there are.
"""

from __future__ import annotations

from math import ceil, inf, isnan

import numpy as np
from numpy.typing import NDArray

from picker.config import Saturation as Settings
from picker.load import Load, SlotLoad
from picker.pool import Pool


class Saturation:
    """The room of one pool's pods. The only reader of `Load.changed`."""

    def __init__(self, pool: Pool, load: Load, settings: Settings) -> None:
        self._pool = pool
        self._load = load
        self.settings = settings
        self._rooms = np.zeros(0, np.int64)  # by slot
        self._room = 0  # of all pods
        self._full = 0  # pods without room
        self._revision = -1  # of the pool that they are of
        self._fresh_until = -inf  # by the load's clock: then a pod may have been silent too long

    def reconfigure(self, settings: Settings) -> None:
        """Pods are full by other numbers from now on."""
        self.settings = settings
        self._fresh_until = -inf  # all are looked at again

    @property
    def num_pods(self) -> int:
        return len(self._pool.endpoints)

    def room(self) -> int:
        """How many requests the pods can take now, before their queues are as long as allowed."""
        self._look()
        return self._room

    def with_room(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of the pods in these slots that can take a request; all of them if none can.

        What was let through because one pod had room must not go to another.
        """
        self._look()
        if not self._full:
            return slots
        found = slots[self._rooms[slots] > 0]
        return found if len(found) else slots

    @property
    def level(self) -> float:
        """How busy the pods are, on average: 1 is saturated. One that does not tell counts as 1.

        O(pods).
        """
        levels = [self._level(self._load.at(slot)) for slot in self._pool.slots.tolist()]
        return sum(levels) / len(levels) if levels else 1.0

    def _look(self) -> None:
        """Bring the rooms up to date."""
        load, changed = self._load, self._load.changed
        if self._pool.revision != self._revision or load.clock() >= self._fresh_until:
            self._revision = self._pool.revision
            self._fresh_until = load.fresh_until()
            self._rooms = np.zeros(self._pool.capacity, np.int64)
            self._room, self._full = 0, len(self._pool.endpoints)
            changed.update(self._pool.slots.tolist())
        for slot in changed:
            before, now = int(self._rooms[slot]), self._room_of(load.at(slot))
            if now != before:
                self._rooms[slot] = now
                self._room += now - before
                self._full += (not now) - (not before)
        changed.clear()

    def _room_of(self, pod: SlotLoad) -> int:
        """Requests that one pod can take."""
        if not pod.fresh:
            return 0
        settings = self.settings
        room = settings.waiting - _queued(pod)
        if pod.kv_usage >= settings.kv:
            # A pod with nothing to do has room, whatever of its memory the past takes.
            idle = room >= settings.waiting and not pod.inflight and not pod.running > 0
            room = 1.0 if idle else 0.0
        if settings.inflight:
            room = min(room, settings.inflight - pod.inflight)
        return ceil(max(room, 0.0))

    def _level(self, pod: SlotLoad) -> float:
        if not pod.fresh:
            return 1.0
        settings = self.settings
        levels = [_queued(pod) / settings.waiting]
        if not isnan(pod.kv_usage):
            levels.append(pod.kv_usage / settings.kv)
        if settings.inflight:
            levels.append(pod.inflight / settings.inflight)
        return max(levels)


def _queued(pod: SlotLoad) -> float:
    """Requests in a pod's queue, as far as we know. Of one that does not tell: all of ours."""
    if isnan(pod.waiting) and isnan(pod.running):
        return pod.inflight
    ours = 0.0 if isnan(pod.running) else pod.inflight - pod.running
    return max(0.0 if isnan(pod.waiting) else pod.waiting, ours, 0.0)
