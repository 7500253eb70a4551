"""What this picker does, told to those who follow it.

Changes are collected for a moment and sent to all at once: of what changes often, only the last
value is. One encoding serves all followers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from math import inf

import numpy as np

from picker.pool import Endpoint
from picker.prefix.table import Keys
from picker.replicas import replica_pb2 as pb
from picker.replicas.known import Known
from picker.replicas.outbox import Outbox
from picker.replicas.totals import Totals, Who

SOON_SECONDS = 0.002  # that changes are collected after a pause
BATCH_SECONDS = 0.02  # from one update to the next
BEAT_SECONDS = 1.0  # without any, after which followers are told that we live
BATCH_BYTES = 256 << 10  # of block keys, that are sent without further waiting
SNAPSHOT_BLOCKS = 1 << 18  # of all pods together: 2 MiB of keys
SNAPSHOT_PART = 2048  # sessions, or tenants, in one update


class News:
    """Hears what changes, for followers; where there are none, what need not be kept is not."""

    def __init__(self, known: Known, replica: int) -> None:
        """`replica`: our own number."""
        self.replica = replica
        self.started = time.monotonic()
        self.updates = 0  # that were sent, to all followers together
        self.sent_bytes = 0
        self.snapshots = 0
        self.dropped_entries = 0
        self._known = known
        self._number = 0
        self._outboxes: list[Outbox] = []
        self._timer: asyncio.TimerHandle | None = None  # of the next batch
        self._flushed = -inf  # the last one, by the loop's clock
        self._beat: asyncio.TimerHandle | None = None
        self._loads: dict[Endpoint, None] = {}
        self._chains: dict[Endpoint, list[bytes]] = {}
        self._tails: dict[tuple[Endpoint, bool], list[bytes]] = {}
        self._keys = 0  # bytes of both
        self._services: dict[Who, None] = {}
        self._sessions: dict[bytes, None] = {}
        self._totals = Totals()
        self._listen()

    def _listen(self) -> None:
        known = self._known
        known.load.on_change = self._load_changed
        known.prompts.on_learn = self._learnt
        known.sessions.replica = self.replica
        known.sessions.on_keep = self._session_kept
        if known.flow is not None:
            known.flow.on_charge = self._charged
        if known.index is not None and known.index_naming:
            known.index.on_expect = self._expected

    @property
    def followers(self) -> int:
        return len(self._outboxes)

    @property
    def running(self) -> float:
        """Seconds since we have started."""
        return time.monotonic() - self.started

    # Followers

    def follow(self, replica: int) -> Outbox:
        """Another picker wants to be told."""
        outbox = Outbox(replica)
        self._outboxes.append(outbox)
        if self._beat is None:
            self._beat = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._live)
        return outbox

    def unfollow(self, outbox: Outbox) -> None:
        self._outboxes.remove(outbox)
        if not self._outboxes:
            self.stop()
            self._forget()

    def stop(self) -> None:
        for timer in (self._timer, self._beat):
            if timer is not None:
                timer.cancel()
        self._timer = self._beat = None

    def hand(self, owner: int | None, entry: bytes) -> None:
        """An entry of Envoy's access log about a pick of another picker; None: of whichever."""
        found = False
        for outbox in reversed(self._outboxes):
            if owner is None or outbox.replica == owner:
                found = outbox.put_entry(entry) or found
                if owner is not None:
                    break
        if found:
            self._soon()
        else:
            self.dropped_entries += 1

    # What happens here

    def _load_changed(self, endpoint: Endpoint) -> None:
        if self._outboxes:
            self._loads[endpoint] = None
            if self._timer is None:
                self._soon()

    def _learnt(self, endpoint: Endpoint, keys: bytes) -> None:
        if self._outboxes:
            self._chains.setdefault(endpoint, []).append(keys)
            self._add_keys(len(keys))

    def _expected(self, slot: int, keys: Keys, tail: bool) -> None:
        if not self._outboxes:
            return
        for endpoint in self._known.pool.endpoints.values():
            if endpoint.slot == slot:
                chain = keys.astype("<u8").tobytes()
                self._tails.setdefault((endpoint, tail), []).append(chain)
                self._add_keys(len(chain))
                return

    def _add_keys(self, num_bytes: int) -> None:
        self._keys += num_bytes
        if self._keys > BATCH_BYTES:
            self.flush()
        else:
            self._soon()

    def _session_kept(self, key: bytes) -> None:
        if self._outboxes:
            self._sessions[key] = None
            self._soon()

    def _charged(self, priority: int, tenant: str, more: float, goes: bool) -> None:
        who = (priority, tenant)
        self._totals.charge(who, more, goes=goes)
        if self._outboxes:
            self._services[who] = None
            self._soon()

    def _soon(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            when = max(self._flushed + BATCH_SECONDS, loop.time() + SOON_SECONDS)
            self._timer = loop.call_at(when, self.flush)

    # Telling

    def flush(self) -> None:
        """Tell all followers what has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flushed = asyncio.get_running_loop().time()
        if self._loads or self._keys or self._services or self._sessions:
            self._tell_all(self._changes())
        for outbox in self._outboxes:
            if outbox.entries:
                update = self._update()
                update.entries.extend(outbox.entries)
                outbox.entries = []
                self._put(outbox, update.SerializeToString())

    def _live(self) -> None:
        self._tell_all(self._update())
        self._beat = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._live)

    def _tell_all(self, update: pb.Update) -> None:
        message = update.SerializeToString()
        for outbox in self._outboxes:
            self._put(outbox, message)

    def _put(self, outbox: Outbox, message: bytes) -> None:
        outbox.put(message)
        self.updates += 1
        self.sent_bytes += len(message)

    def _update(self) -> pb.Update:
        self._number += 1
        return pb.Update(replica=self.replica, number=self._number)

    def _changes(self) -> pb.Update:
        update = self._update()
        at = self._known.pool.endpoints
        for endpoint in self._loads:
            if at.get(endpoint.address, endpoint) is endpoint:  # else its successor tells
                self._add_load(update, endpoint)
        for endpoint, chains in self._chains.items():
            self._add_chains(update, endpoint, chains)
        for (endpoint, tail), chains in self._tails.items():
            expected = update.expected.add(naming=self._known.index_naming, pod=_pod(endpoint))
            (expected.tails if tail else expected.chains).extend(chains)
        for who in self._services:
            self._add_service(update, who)
        for key in self._sessions:
            self._add_session(update, key)
        self._forget()
        return update

    def _forget(self) -> None:
        """What has changed, once it is told."""
        self._loads.clear()
        self._chains.clear()
        self._tails.clear()
        self._keys = 0
        self._services.clear()
        self._sessions.clear()

    def snapshot(self) -> Iterator[bytes]:
        """All that there is, as updates. Things may change between two of them."""
        self.snapshots += 1
        update = self._update()
        update.begin.running = self.running
        load = self._known.load
        for endpoint in self._known.pool.endpoints.values():
            if load.share(endpoint).sent:
                self._add_load(update, endpoint)
        yield self._told(update)
        update = self._update()
        for number, who in enumerate(self._tenants(), 1):
            self._add_service(update, who, whole=True)
            if number % SNAPSHOT_PART == 0:
                yield self._told(update)
                update = self._update()
        for number, key in enumerate(self._known.sessions.keys(), 1):
            self._add_session(update, key)
            if number % SNAPSHOT_PART == 0:
                yield self._told(update)
                update = self._update()
        size = 0
        for endpoint, keys in self._known.prompts.recent(SNAPSHOT_BLOCKS):
            self._add_chains(update, endpoint, [keys])
            size += len(keys)
            if size > BATCH_BYTES // 8:  # about a millisecond's work
                yield self._told(update)
                update, size = self._update(), 0
        update.complete = True
        yield self._told(update)

    def _told(self, update: pb.Update) -> bytes:
        message: bytes = update.SerializeToString()
        self.updates += 1
        self.sent_bytes += len(message)
        return message

    def _tenants(self) -> list[Who]:
        flow = self._known.flow
        if flow is None:
            return []
        return [(band.priority, counter.tenant) for band in flow.bands for counter in band.vtc]

    def _add_load(self, update: pb.Update, endpoint: Endpoint) -> None:
        share = self._known.load.share(endpoint)
        update.loads.add(
            pod=_pod(endpoint),
            requests=share.requests,
            tokens=share.tokens,
            sent=share.sent,
            waiting=share.waiting,
            age=share.age,
        )

    def _add_chains(self, update: pb.Update, endpoint: Endpoint, chains: list[bytes]) -> None:
        if update.learned and update.learned[-1].pod.address == endpoint.address:
            update.learned[-1].chains.extend(chains)
        else:
            update.learned.add(naming=self._known.prompts.naming, pod=_pod(endpoint), chains=chains)

    def _add_service(self, update: pb.Update, who: Who, *, whole: bool = False) -> None:
        total = self._totals.find(who)
        if total is None and not whole:
            return
        service = update.services.add(priority=who[0], tenant=who[1])
        if total is not None:
            service.life, service.service = total.life, total.service
            service.requests = total.requests
        if whole and self._known.flow is not None:
            counter = self._known.flow.counters(who[0]).find(who[1])
            service.value = 0.0 if counter is None else counter.value

    def _add_session(self, update: pb.Update, key: bytes) -> None:
        told = self._known.sessions.told(key)
        if told is not None:
            endpoint, stamp, age = told
            update.sessions.add(
                key=key,
                pod=_pod(endpoint),
                version=stamp.version,
                replica=stamp.replica,
                age=age,
            )


def _pod(endpoint: Endpoint) -> pb.Pod:
    return pb.Pod(address=endpoint.address, incarnation=endpoint.incarnation)


def keys_of(chain: bytes) -> Keys:
    """The block keys of a chain."""
    return np.frombuffer(chain, "<u8").astype(np.uint64)
