"""What is read of the precise index, at the moment when a metrics page is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from picker.exposition import Spec, write
from picker.prefix.view import CHANGES, EventsView, Pod

_POD = ("endpoint",)

SIZES = {  # by attribute of view.Index
    "blocks": Spec("gauge", "warmpath_index_blocks", (), "Different blocks in the precise index."),
    "max_blocks": Spec("gauge", "warmpath_index_max_blocks", (), "The most there may be."),
    "bytes": Spec("gauge", "warmpath_index_bytes", (), "Memory that the precise index takes."),
    "orphans": Spec(
        "gauge", "warmpath_index_orphan_blocks", (), "Blocks that wait for those before them."
    ),
}
CHANGED = Spec(
    "counter",
    "warmpath_index_changes_total",
    ("change",),
    "Blocks of KV events, and of the precise index, by what became of them.",
)
REFUSED = Spec(
    "counter",
    "warmpath_index_refused_blocks_total",
    ("reason",),
    "Blocks of KV events that cannot be true, or that there is no room for.",
)
MISSED = Spec(
    "counter",
    "warmpath_prefix_missed_tokens_total",
    ("reason",),
    "Prompts whose tokens could not be had.",
)
HELD = Spec(
    "gauge",
    "warmpath_pod_held_blocks",
    ("endpoint", "tier"),
    "Blocks that a pod holds, as it told by KV events.",
)
CONNECTED = Spec(
    "gauge",
    "warmpath_pod_events_connected",
    _POD,
    "1 for a pod whose KV events we hear, of all its ranks.",
)
AGE = Spec(
    "gauge",
    "warmpath_pod_events_age_seconds",
    _POD,
    "Since a pod's last batch of KV events came; missing where none did.",
)
COUNTS = {  # by attribute of view.Publisher
    "batches": Spec(
        "counter", "warmpath_pod_events_batches_total", _POD, "Batches of KV events that came."
    ),
    "events": Spec("counter", "warmpath_pod_events_total", _POD, "KV events that came."),
    "malformed": Spec(
        "counter",
        "warmpath_pod_events_malformed_total",
        _POD,
        "KV events, batches and messages that cannot be understood.",
    ),
    "unknown": Spec(
        "counter", "warmpath_pod_events_unknown_total", _POD, "KV events of unknown types."
    ),
    "gaps": Spec(
        "counter",
        "warmpath_pod_events_gaps_total",
        _POD,
        "Live batches that did not follow the one before.",
    ),
    "replays": Spec(
        "counter", "warmpath_pod_events_replays_total", _POD, "Replays that were asked for."
    ),
    "failed_replays": Spec(
        "counter", "warmpath_pod_events_failed_replays_total", _POD, "Those that did not come."
    ),
    "restarts": Spec(
        "counter",
        "warmpath_pod_events_restarts_total",
        _POD,
        "Times that a publisher was found to be another process.",
    ),
    "cleared": Spec(
        "counter",
        "warmpath_pod_events_cleared_total",
        _POD,
        "Times that all that a publisher holds was forgotten.",
    ),
}


class EventGauges:
    """Writes them; keeps nothing."""

    def __init__(self, view: EventsView) -> None:
        self._view = view

    def page(self) -> Iterator[str]:
        """All of it as Prometheus' text, in small pieces."""
        index = self._view.index()
        for attribute, spec in SIZES.items():
            yield from write(spec, [((), getattr(index, attribute))])
        changed = [((name,), getattr(index.changes, name)) for name in CHANGES]
        yield from write(CHANGED, changed)
        yield from write(REFUSED, [((reason,), n) for reason, n in index.refused.items()])
        yield from write(MISSED, [((why,), n) for why, n in self._view.missed_tokens().items()])
        pods = []
        for pod in self._view.pods():
            pods.append(pod)
            yield ""  # for the same reason
        yield from write(CONNECTED, [((pod.address,), int(pod.connected)) for pod in pods])
        ages = [((pod.address,), pod.age_seconds) for pod in pods]
        yield from write(AGE, [(labels, age) for labels, age in ages if age is not None])
        held = [((pod.address, tier), n) for pod in pods for tier, n in pod.held.items()]
        yield from write(HELD, held)
        for attribute, spec in COUNTS.items():
            yield from write(spec, [((pod.address,), _sum(pod, attribute)) for pod in pods])


def _sum(pod: Pod, attribute: str) -> int:
    return sum(getattr(publisher, attribute) for publisher in pod.publishers)
