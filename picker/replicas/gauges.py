"""How pickers of one pool hear each other, as metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

from picker.exposition import Spec, write
from picker.replicas.replicas import Replicas

_PEER = ("peer",)
_WAY = ("direction",)

PEERS = Spec(
    "gauge", "warmpath_replica_connected", _PEER, "1 for another picker that we hear, else 0."
)
AGE = Spec(
    "gauge",
    "warmpath_replica_update_age_seconds",
    _PEER,
    "Since another picker was heard last.",
)
FOLLOWERS = Spec("gauge", "warmpath_replica_followers", (), "Other pickers that hear us.")
UPDATES = Spec(
    "counter", "warmpath_replica_updates_total", _WAY, "Updates to, and from, other pickers."
)
BYTES = Spec("counter", "warmpath_replica_bytes_total", _WAY, "The same in bytes.")
SNAPSHOTS = Spec(
    "counter",
    "warmpath_replica_snapshots_total",
    (),
    "Times that a picker was told all that there is, as it came or had fallen behind.",
)
DROPPED = Spec(
    "counter",
    "warmpath_replica_dropped_entries_total",
    (),
    "Entries of access logs whose picker is not there.",
)
FOREIGN = Spec(
    "counter",
    "warmpath_replica_foreign_prompts_total",
    (),
    "Prompts that other pickers told of, and that say nothing here: their settings are others.",
)


class ReplicaGauges:
    """Writes them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def page(self) -> Iterator[str]:
        """All of it as Prometheus' text."""
        news, told, peers = self._replicas.news, self._replicas.told, self._replicas.peers.all
        now = time.monotonic()
        yield from write(PEERS, [((peer.address,), int(peer.connected)) for peer in peers])
        yield from write(AGE, [((peer.address,), now - peer.updated) for peer in peers])
        yield from write(FOLLOWERS, [((), news.followers)])
        yield from write(UPDATES, [(("out",), news.updates), (("in",), told.updates)])
        yield from write(BYTES, [(("out",), news.sent_bytes), (("in",), told.received_bytes)])
        yield from write(SNAPSHOTS, [((), news.snapshots)])
        yield from write(DROPPED, [((), news.dropped_entries)])
        yield from write(FOREIGN, [((), told.foreign)])
