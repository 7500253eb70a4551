"""Whether pods can take more: from what they told, and from what we sent since.

A pod's queue is what it told and all that went there after it was asked, so that no burst gets
past between two scrapes; or what we have there beyond what it told to run, if that is more, for
what is on its way when it is asked. Room is added up pod by pod: a mean would hide a full one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from picker.config import Saturation as Settings
from picker.load import Load
from picker.pool import Pool
from scorers.pods import Column, Pods


class Saturation:
    """The room of one pool's pods. All of it costs O(pods)."""

    def __init__(self, pool: Pool, load: Load, settings: Settings) -> None:
        self._pool = pool
        self._load = load
        self.settings = settings  # another one may be put here
        self._nothing = np.zeros(0, np.float32)  # matched tokens, which do not matter here

    @property
    def num_pods(self) -> int:
        return len(self._pool.endpoints)

    def room(self) -> int:
        """How many requests the pods can take now, before their queues are as long as allowed."""
        return int(self._rooms(self._pool.slots).sum()) if self._pool.endpoints else 0

    def with_room(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of the pods in these slots that can take a request; all of them if none can.

        What was let through because one pod had room must not go to another.
        """
        rooms = self._rooms(slots) > 0
        return slots[rooms] if rooms.any() and not rooms.all() else slots

    @property
    def level(self) -> float:
        """How busy the pods are, on average: 1 is saturated. One that does not tell counts as 1."""
        if not self._pool.endpoints:
            return 1.0
        pods = self._pods(self._pool.slots)
        settings = self.settings
        level = np.fmax(_queued(pods) / settings.waiting, pods.kv_usage / settings.kv)
        if settings.inflight:
            level = np.fmax(level, pods.inflight / settings.inflight)
        return float(np.where(pods.fresh, level, 1.0).mean())

    def _rooms(self, slots: NDArray[np.intp]) -> Column:
        """Requests that each pod can take. It is asked before each pick: few steps, usually."""
        pods = self._pods(slots)
        settings = self.settings
        room: Column = settings.waiting - _queued(pods)
        full = pods.kv_usage >= settings.kv
        if full.any():
            # A pod with nothing to do has room, whatever of its memory the past takes.
            idle = (room >= settings.waiting) & (pods.inflight == 0) & ~(pods.running > 0)
            room[full] = np.where(idle[full], 1, 0)
        if settings.inflight:
            room = np.fmin(room, settings.inflight - pods.inflight)
        room[~pods.fresh] = 0
        return np.ceil(np.maximum(room, 0))

    def _pods(self, slots: NDArray[np.intp]) -> Pods:
        if len(self._nothing) != self._pool.capacity:
            self._nothing = np.zeros(self._pool.capacity, np.float32)
        return self._load.pods(slots, self._nothing, None)


def _queued(pods: Pods) -> Column:
    """Requests in each pod's queue, as far as we know. Of a pod that does not tell: all of ours."""
    queued: Column = np.fmax(pods.waiting, pods.inflight - pods.running)
    untold = np.isnan(queued)
    if untold.any():
        queued[untold] = pods.inflight[untold]
    return np.maximum(queued, 0)
