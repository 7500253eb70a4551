"""What other pickers told, added to what we know.

Updates may be lost, come twice, late, or in another order: values carry the number of the update
that told them, and older ones change nothing. What is told is bounded, and what cannot be is passed
over.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import isfinite
from typing import NamedTuple

import numpy as np

from picker.elsewhere import Share
from picker.objectives import MOST
from picker.pool import MAX_ENDPOINTS, Endpoint
from picker.replicas import replica_pb2 as pb
from picker.replicas.known import Known, same
from picker.replicas.news import News, keys_of
from picker.replicas.totals import MAX_TENANTS, Who
from picker.sessions import Stamp

log = logging.getLogger(__name__)

MAX_REPLICAS = 80  # that are remembered, of all that ever told something: more than there can be
MAX_CHAIN = 1 << 16  # blocks of a prompt
MAX_COUNT = 1 << 40  # of anything that is counted
MAX_SERVICE = 1e15  # virtual tokens
MAX_TENANT = 256  # characters
KEYS_AT_ONCE = 4096  # that are learnt without letting others go on, about a millisecond
SESSION_KEY = 16  # bytes
_KEY = 8  # bytes


class _Load(NamedTuple):
    number: int  # of the update
    incarnation: str
    share: Share


class _Service(NamedTuple):
    number: int
    life: int
    service: float
    requests: int


class _Replica:
    """What one picker told that has to be remembered."""

    def __init__(self) -> None:
        self.number = 0  # of its last update
        self.loads: dict[str, _Load] = {}  # by address
        self.services: OrderedDict[Who, _Service] = OrderedDict()
        self.begun = False
        self.joining = False  # it is older than us, and tells us what there was
        self.foreign = False  # it names blocks by other rules than we do


class Told:
    """Takes updates. A listener of the pool, after its load."""

    def __init__(self, known: Known, news: News, on_entry: Callable[[bytes], None]) -> None:
        """`on_entry`: takes entries of Envoy's access log about picks of ours."""
        self._known = known
        self._news = news
        self._on_entry = on_entry
        self._replicas: OrderedDict[int, _Replica] = OrderedDict()  # the longest silent first
        self._adopted: int | None = None  # whose counters of tenants we began with
        self.updates = 0
        self.received_bytes = 0
        self.foreign = 0  # prompts whose blocks are named by other rules than ours
        known.pool.listen(self)

    def apply(self, update: pb.Update) -> Iterator[None]:
        """Take over what an update tells. Others may do something at each step."""
        self.updates += 1
        replica = self._replicas.get(update.replica)
        if replica is None:
            replica = self._replicas[update.replica] = _Replica()
            if len(self._replicas) > MAX_REPLICAS:
                self._forget(*self._replicas.popitem(last=False))
        self._replicas.move_to_end(update.replica)
        replica.number = max(replica.number, update.number)
        self._take_loads(update, replica)
        self._take_services(update, replica)
        for session in update.sessions:
            self._take_session(session)
        for entry in update.entries:
            self._on_entry(entry)
        yield from self._take_learned(update, replica)
        yield from self._take_expected(update, replica)

    def gone(self, replica: int) -> None:
        """A picker has not been heard for too long: what it has on pods is forgotten."""
        if (found := self._replicas.get(replica)) is not None:
            self._forget(replica, found)

    def _forget(self, number: int, replica: _Replica) -> None:
        for address in replica.loads:
            if (endpoint := self._known.pool.endpoints.get(address)) is not None:
                self._known.load.told_elsewhere(endpoint, number, None)
        replica.loads.clear()

    # What pods have

    def _take_loads(self, update: pb.Update, replica: _Replica) -> None:
        number = update.number
        for load in update.loads:
            address = load.pod.address
            before = replica.loads.get(address)
            if before is None and len(replica.loads) >= MAX_ENDPOINTS:
                continue
            if before is None or before.number < number:
                share = Share(
                    load.requests,
                    min(load.tokens, MAX_COUNT),
                    min(load.sent, MAX_COUNT),
                    load.waiting,
                    load.age,
                )
                self._share(update.replica, replica, load.pod, _Load(number, "", share))
        if update.HasField("begin"):
            named = {load.pod.address for load in update.loads}
            for address, before in list(replica.loads.items()):
                if address not in named and before.number < number:
                    nothing = _Load(number, "", Share())
                    self._share(update.replica, replica, pb.Pod(address=address), nothing)

    def _share(self, number: int, replica: _Replica, pod: pb.Pod, load: _Load) -> None:
        replica.loads[pod.address] = load._replace(incarnation=pod.incarnation)
        if (endpoint := self._known.find(pod)) is not None:
            self._known.load.told_elsewhere(endpoint, number, load.share)

    def added(self, endpoint: Endpoint) -> None:
        for number, replica in self._replicas.items():
            load = replica.loads.get(endpoint.address)
            if load is not None and same(load.incarnation, endpoint.incarnation):
                self._known.load.told_elsewhere(endpoint, number, load.share)

    def removed(self, endpoint: Endpoint) -> None:
        """The load forgets it."""

    # What pods hold

    def _take_learned(self, update: pb.Update, replica: _Replica) -> Iterator[None]:
        prompts, keys = self._known.prompts, 0
        for learned in update.learned:
            endpoint = self._known.find(learned.pod)
            if endpoint is None or not self._ours(learned, prompts.naming, replica):
                continue
            for chain in learned.chains:
                if _is_chain(chain):
                    prompts.learn_elsewhere(endpoint, chain)
                    keys += len(chain) // _KEY
                    if keys > KEYS_AT_ONCE:
                        keys = 0
                        yield

    def _take_expected(self, update: pb.Update, replica: _Replica) -> Iterator[None]:
        index = self._known.index
        if index is None:
            return
        for expected in update.expected:
            endpoint = self._known.find(expected.pod)
            if endpoint is None or not self._ours(expected, self._known.index_naming, replica):
                continue
            for chains, tail in ((expected.chains, False), (expected.tails, True)):
                for chain in chains:
                    if _is_chain(chain) and endpoint.alive:
                        keys = keys_of(chain)
                        if len(np.unique(keys)) == len(keys):
                            index.expect_chain(endpoint.slot, keys, tail=tail)
                    yield

    def _ours(self, learned: pb.Learned, naming: int, replica: _Replica) -> bool:
        """Whether blocks are named as we name them."""
        if learned.naming == naming:
            return True
        self.foreign += len(learned.chains) + len(learned.tails)
        if not replica.foreign:
            replica.foreign = True
            log.warning(
                "Another picker tells of prompts in a way that is not ours: do `prefix`, `models` "
                "and `replicas.secret` agree?"
            )
        return False

    def _take_session(self, session: pb.Session) -> None:
        endpoint = self._known.find(session.pod)
        if endpoint is not None and len(session.key) == SESSION_KEY and isfinite(session.age):
            stamp = Stamp(min(session.version, MAX_COUNT), session.replica)
            self._known.sessions.kept_elsewhere(session.key, endpoint, stamp, session.age)

    # What tenants got

    def _take_services(self, update: pb.Update, replica: _Replica) -> None:
        flow = self._known.flow
        if flow is None:
            return
        if update.HasField("begin") and not replica.begun:
            replica.begun = True
            replica.joining = update.begin.running > self._news.running
            if self._adopted is None and not any(len(band.vtc) for band in flow.bands):
                self._adopted = update.replica
        if not replica.begun:
            return  # all that there is comes yet
        for service in update.services:
            who = (service.priority, service.tenant)
            if (
                abs(service.priority) <= MOST
                and len(service.tenant) <= MAX_TENANT
                and abs(service.service) <= MAX_SERVICE  # so neither of them is NaN
                and abs(service.value) <= MAX_SERVICE
            ):
                self._take_service(update, replica, who, service)
        if update.complete:
            replica.joining = False

    def _take_service(
        self, update: pb.Update, replica: _Replica, who: Who, service: pb.Service
    ) -> None:
        assert self._known.flow is not None
        before = replica.services.get(who)
        if before is not None and update.number <= before.number:
            return
        told = _Service(update.number, service.life, service.service, service.requests)
        replica.services[who] = told
        replica.services.move_to_end(who)
        if len(replica.services) > MAX_TENANTS:
            replica.services.popitem(last=False)
        counters = self._known.flow.counters(who[0])
        if before is None and replica.joining:  # it was before our time
            if self._adopted == update.replica:
                counters.adopt(who[1], service.value)
            return
        if before is None or before.life != told.life:
            before = _Service(0, told.life, 0.0, 0)
        more = told.service - before.service
        came = told.requests > before.requests
        if more or came:
            counters.charge_elsewhere(who[1], more, came=came)


def _is_chain(chain: bytes) -> bool:
    return 0 < len(chain) <= _KEY * MAX_CHAIN and len(chain) % _KEY == 0
