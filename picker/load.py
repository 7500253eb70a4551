"""How busy each pod is: what its metrics page told, and the requests that are on it now.

These are our own, and those of other pickers of the pool as far as they tell.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from picker.elsewhere import Elsewhere, Share
from picker.engines import LoadReport
from picker.pool import Endpoint, Pool
from scorers.pods import Adapters, Column, Pods

log = logging.getLogger(__name__)

MAX_PICKS = 4096  # of one pod, whose times are kept until a scrape has seen them

_NO_ADAPTERS = Adapters()
_WAITING, _RUNNING, _KV_USAGE, _INFLIGHT, _TOKENS = range(5)  # rows of the table
_ADDRESSES, _LABELS, _ADAPTERS = range(3)  # rows of the objects


@dataclass(frozen=True, slots=True)
class PodLoad:
    """The load of one pod, for people. NaN where it does not tell."""

    fresh: bool
    age: float  # seconds since the page behind these numbers was asked for; inf before the first
    error: str | None  # why the last scrape failed, if it did
    waiting: float  # as told, with our picks since that were not answered
    running: float
    kv_usage: float
    inflight: int
    inflight_tokens: int
    kv_tokens: int | None  # size of its KV cache
    adapters: Adapters
    elsewhere: Share  # what other pickers have there


class SlotLoad(NamedTuple):
    """The load of one slot, for who asks before each pick. NaN where its pod does not tell."""

    fresh: bool
    waiting: float  # as told, with our picks since that were not answered
    running: float
    kv_usage: float
    inflight: float


@dataclass(slots=True)
class _Pod:
    """What is known of one endpoint beside its columns."""

    inflight: int = 0
    tokens: int = 0  # exact: float32 cannot add and take away large sums without a rest
    picks: deque[float] = field(default_factory=deque)  # times of picks that no scrape has seen
    sent: int = 0  # picks ever
    elsewhere: Elsewhere | None = None  # what other pickers have there
    began: float = -inf  # of the scrape that the columns are from
    error: str | None = None
    missed: set[str] = field(default_factory=set)  # metrics it was found not to tell
    kv_tokens: int | None = None
    adapters: Adapters = _NO_ADAPTERS


@dataclass(frozen=True, slots=True)
class _Rows:
    """A choice of slots, and what is kept by row of it."""

    slots: NDArray[np.intp]
    addresses: list[str]
    labels: list[Mapping[str, str]]
    adapters: list[Adapters]
    nowhere: NDArray[np.bool_]
    # Views of the columns where the slots are 0, 1, 2 ..., made once; else a request copies them.
    columns: tuple[NDArray[Any], ...] | None
    revision: int  # of the pool


class Load:
    """Columns of load by slot, and `Pods` made of them.

    A listener of its pool. What is told of an endpoint that is no longer alive is ignored, so a
    request that outlives its pod changes nothing for the next owner of the slot.
    """

    def __init__(
        self,
        pool: Pool,
        stale_after: float = 2.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stale_after`: seconds that a pod may leave us without an answer."""
        self.on_pick: Callable[[Endpoint], None] = _nobody  # told of each pick: wakes the scraper
        # Told of each page, once the columns are from it.
        self.on_report: Callable[[Endpoint, LoadReport], None] = _nobody_reads
        # Told of each change of what we have on a pod ourselves, where somebody wants to know.
        self.on_change: Callable[[Endpoint], None] | None = None
        self.clock = clock
        # Slots whose load is another than when their only reader last cleared this.
        self.changed: set[int] = set()
        self._pool = pool
        self.stale_after = stale_after  # another one may be put here
        self._table = np.zeros((5, 0), np.float32)
        self._trusted_until = np.zeros(0)
        self._cold_at = np.zeros(0)
        self._pods: list[_Pod] = []  # by slot
        self._objects = np.zeros((3, 0), object)  # addresses, labels, adapters
        pool.listen(self)
        self._all = self._every_row()

    def pods(
        self, slots: NDArray[np.intp], matched_tokens: Column, session: Endpoint | None
    ) -> Pods:
        """The candidates in these slots of the pool, which are ascending and each named once.

        `matched_tokens` is a column by slot. Columns may be cut from ours: they are right until
        the next event, and nobody may write to them.
        """
        rows = self._all
        if rows.revision != self._pool.revision:
            rows = self._all = self._every_row()
        if len(slots) != len(rows.slots):
            rows = self._rows(slots)
        dense = rows.columns is not None
        columns = rows.columns or self._columns(rows.slots)
        trusted_until, cold_at, waiting, running, kv_usage, inflight, tokens = columns
        home = session is not None and session.alive
        return Pods(
            rows.addresses,
            rows.labels,
            rows.adapters,
            trusted_until >= self.clock(),
            waiting,
            running,
            kv_usage,
            inflight,
            tokens,
            matched_tokens[: len(rows.slots)] if dense else matched_tokens[rows.slots],
            cold_at,
            rows.slots == session.slot if home and session is not None else rows.nowhere,
        )

    def at(self, slot: int) -> SlotLoad:
        """The load of one slot now."""
        waiting, running, kv_usage, inflight, _ = self._table[:, slot].tolist()
        fresh = bool(self._trusted_until[slot] >= self.clock())
        return SlotLoad(fresh, waiting, running, kv_usage, inflight)

    def fresh_until(self) -> float:
        """When one that is fresh now is the first not to be, unless it answers until then.

        By `clock`. Those that are asked later are trusted for `stale_after` from then on, so that
        nothing new is missed by whoever looks again that often.
        """
        now = self.clock()
        ends = self._trusted_until[self._trusted_until >= now]
        return min(float(ends.min(initial=inf)), now + self.stale_after)

    def _columns(self, chosen: NDArray[np.intp] | slice) -> tuple[NDArray[Any], ...]:
        """Until when pods are trusted, their last cold picks, and the table's rows."""
        return (self._trusted_until[chosen], self._cold_at[chosen], *self._table[:, chosen])

    # What our own requests do

    def credit(self, endpoint: Endpoint, tokens: int) -> None:
        """A request goes to an endpoint, which must compute this many tokens of its prompt."""
        self._change(endpoint, 1, tokens)

    def release_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        """The prompt of a credited request is computed: its first token came."""
        self._change(endpoint, 0, -tokens)

    def release(self, endpoint: Endpoint, tokens: int) -> None:
        """A credited request is over; `tokens` are those not released before."""
        self._change(endpoint, -1, -tokens)

    def _change(self, endpoint: Endpoint, requests: int, tokens: int) -> None:
        if not endpoint.alive:
            return
        slot = endpoint.slot
        pod = self._pods[slot]
        pod.inflight = max(0, pod.inflight + requests)
        pod.tokens = max(0, pod.tokens + tokens)
        self._show(slot, pod)
        if self.on_change is not None:
            self.on_change(endpoint)

    def _show(self, slot: int, pod: _Pod) -> None:
        self.changed.add(slot)
        if pod.elsewhere is None:
            self._table[_INFLIGHT, slot] = pod.inflight
            self._table[_TOKENS, slot] = pod.tokens
        else:
            self._table[_INFLIGHT, slot] = pod.inflight + pod.elsewhere.requests
            self._table[_TOKENS, slot] = pod.tokens + pod.elsewhere.tokens

    def picked(self, endpoint: Endpoint, cold: bool) -> float:
        """A request was sent to an endpoint; `cold`: no pod held any of its prompt.

        It counts as waiting there until a scrape that began later tells what became of it, or we
        know ourselves: see `waits_no_more`. Returns the time, by which it is known.
        """
        if not endpoint.alive:
            return -inf
        now, slot = self.clock(), endpoint.slot
        pod = self._pods[slot]
        pod.sent += 1
        pod.picks.append(now)
        if len(pod.picks) > MAX_PICKS:
            pod.picks.popleft()
        self.changed.add(slot)
        self._table[_WAITING, slot] += 1.0
        if cold:
            self._cold_at[slot] = now
        self.on_pick(endpoint)
        return now

    def waits_no_more(self, endpoint: Endpoint, picked_at: float) -> None:
        """A request that was sent there is computed, over, or gone elsewhere.

        If no scrape has told so yet, it counts as waiting no longer: a slow scrape must not make a
        queue of requests that have long been answered.
        """
        if not endpoint.alive:
            return
        picks = self._pods[endpoint.slot].picks
        if picks and picked_at >= picks[0] and picked_at in picks:
            picks.remove(picked_at)
            self.changed.add(endpoint.slot)
            self._table[_WAITING, endpoint.slot] -= 1.0

    def moved(self, picked: Endpoint, served: Endpoint, picked_at: float) -> None:
        """A request that was sent to one endpoint has reached another, which is answering it."""
        self.waits_no_more(picked, picked_at)
        if served.alive:
            self.on_pick(served)

    # What other pickers do

    def share(self, endpoint: Endpoint) -> Share:
        """What we have on an endpoint ourselves, for others to know."""
        if not endpoint.alive:
            return Share()
        pod = self._pods[endpoint.slot]
        age = self.clock() - pod.picks[-1] if pod.picks else inf
        return Share(pod.inflight, pod.tokens, pod.sent, len(pod.picks), age)

    def told_elsewhere(self, endpoint: Endpoint, replica: int, share: Share | None) -> None:
        """Another picker has this on an endpoint; None: it is gone."""
        if not endpoint.alive:
            return
        slot = endpoint.slot
        pod = self._pods[slot]
        if pod.elsewhere is None:
            pod.elsewhere = Elsewhere()
        waiting = pod.elsewhere.waiting
        sent = pod.elsewhere.told(replica, share, self.clock(), pod.began)
        self._table[_WAITING, slot] += pod.elsewhere.waiting - waiting
        self._show(slot, pod)
        if sent:
            self.on_pick(endpoint)

    # What the scraper sees

    def asked(self, endpoint: Endpoint) -> None:
        """A pod is being asked for its page.

        Its numbers are trusted for `stale_after` from the first time that it does not answer. That
        they are old says nothing: an idle pod is seldom asked, and who waits a whole pause to be
        asked and is slow once must not lose its prefixes to a cold pod.
        """
        if endpoint.alive and self._trusted_until[endpoint.slot] == inf:
            self._trusted_until[endpoint.slot] = self.clock() + self.stale_after

    def report(self, endpoint: Endpoint, report: LoadReport, began: float) -> None:
        """A pod answered a scrape that began at `began`, by `clock`."""
        if not endpoint.alive:
            return
        slot = endpoint.slot
        pod = self._pods[slot]
        while pod.picks and pod.picks[0] <= began:
            pod.picks.popleft()
        self.changed.add(slot)
        waiting = len(pod.picks)
        if pod.elsewhere is not None:
            pod.elsewhere.seen(began)
            waiting += pod.elsewhere.waiting
        self._table[_WAITING, slot] = _told(report.waiting) + waiting
        self._table[_RUNNING, slot] = _told(report.running)
        self._table[_KV_USAGE, slot] = _told(report.kv_usage)
        self._trusted_until[slot] = inf  # until it is asked again
        pod.began = began
        if report.kv_tokens is not None:
            pod.kv_tokens = report.kv_tokens
        adapters = report.adapters or _NO_ADAPTERS
        if adapters != pod.adapters:
            pod.adapters = adapters
            self._objects[_ADAPTERS, slot] = adapters
            if self._all.revision == self._pool.revision:
                self._all.adapters[int(np.searchsorted(self._all.slots, slot))] = adapters
        if pod.error is not None:
            pod.error = None
            log.info("pod %s tells its load again", endpoint.address)
        for metric in ("waiting", "running", "kv_usage"):
            if getattr(report, metric) is None and metric not in pod.missed:
                pod.missed.add(metric)
                log.warning("pod %s does not tell %s on its metrics page", endpoint.address, metric)
        self.on_report(endpoint, report)

    def failed(self, endpoint: Endpoint, why: str, *, unreachable: bool = False) -> None:
        """A scrape failed. The old numbers stay; for how long they are trusted, `asked` says.

        `unreachable`: nobody listens there, so they are not trusted from now on.
        """
        if not endpoint.alive:
            return
        pod = self._pods[endpoint.slot]
        if pod.error is None:
            log.warning("pod %s does not tell its load: %s", endpoint.address, why)
        pod.error = why
        if unreachable:
            self.changed.add(endpoint.slot)
            self._trusted_until[endpoint.slot] = -inf

    def busy(self, endpoint: Endpoint) -> bool:
        """Whether the pod has work: as far as it told, or because we sent it some."""
        slot = endpoint.slot
        waiting, running = self._table[_WAITING, slot], self._table[_RUNNING, slot]
        return bool(waiting > 0 or running > 0 or self._table[_INFLIGHT, slot] > 0)

    # What people see

    def age(self, endpoint: Endpoint) -> float:
        """Seconds since the pod was asked for what is known of it; infinite before the first."""
        return self.clock() - self._pods[endpoint.slot].began if endpoint.alive else inf

    def describe(self, endpoint: Endpoint) -> PodLoad:
        """The load of an endpoint that is alive."""
        slot = endpoint.slot
        pod = self._pods[slot]
        return PodLoad(
            fresh=bool(self._trusted_until[slot] >= self.clock()),
            age=self.age(endpoint),
            error=pod.error,
            waiting=float(self._table[_WAITING, slot]),
            running=float(self._table[_RUNNING, slot]),
            kv_usage=float(self._table[_KV_USAGE, slot]),
            inflight=pod.inflight,
            inflight_tokens=pod.tokens,
            kv_tokens=pod.kv_tokens,
            adapters=pod.adapters,
            elsewhere=Share()
            if pod.elsewhere is None
            else Share(pod.elsewhere.requests, pod.elsewhere.tokens, 0, pod.elsewhere.waiting),
        )

    # The pool's listener

    def added(self, endpoint: Endpoint) -> None:
        more = self._pool.capacity - len(self._pods)
        if more > 0:
            self._table = np.pad(self._table, ((0, 0), (0, more)))
            self._trusted_until = np.pad(self._trusted_until, (0, more))
            self._cold_at = np.pad(self._cold_at, (0, more))
            self._objects = np.pad(self._objects, ((0, 0), (0, more)))
            self._pods += [_Pod() for _ in range(more)]
        self._clear(endpoint)
        if self.on_change is not None:
            self.on_change(endpoint)

    def removed(self, endpoint: Endpoint) -> None:
        self._clear(endpoint)
        if self.on_change is not None:
            self.on_change(endpoint)

    def _clear(self, endpoint: Endpoint) -> None:
        slot = endpoint.slot
        self._pods[slot] = _Pod()
        self._objects[_ADAPTERS, slot] = _NO_ADAPTERS
        self._table[:, slot] = 0.0
        self._table[: _KV_USAGE + 1, slot] = nan
        self._trusted_until[slot] = -inf
        self._cold_at[slot] = 0.0

    # Rows of Pods

    def _every_row(self) -> _Rows:
        """The rows of all endpoints, with the labels that they have now."""
        for endpoint in self._pool.endpoints.values():
            self._objects[_ADDRESSES, endpoint.slot] = endpoint.address
            self._objects[_LABELS, endpoint.slot] = endpoint.labels
        return self._rows(self._pool.slots)

    def _rows(self, slots: NDArray[np.intp]) -> _Rows:
        addresses, labels, adapters = self._objects[:, slots].tolist()
        count = len(slots)
        dense = count == 0 or int(slots[-1]) == count - 1
        return _Rows(
            slots,
            addresses,
            labels,
            adapters,
            np.zeros(count, np.bool_),
            self._columns(slice(count)) if dense else None,
            self._pool.revision,
        )


def _told(value: float | None) -> float:
    return nan if value is None else value


def _nobody(endpoint: Endpoint) -> None:
    """Hears of a pick when no scraper does."""


def _nobody_reads(endpoint: Endpoint, report: LoadReport) -> None:
    """Hears of a page when no flow control does."""
