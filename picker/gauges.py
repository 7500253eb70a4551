"""What is read at the moment when a metrics page is asked for: the pool, its load, the index."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from math import isfinite
from statistics import fmean

from picker.exposition import Spec, write
from picker.load import Load
from picker.pool import Pool
from picker.prefix.match import PrefixProducer

_NAME = ("name",)
_POD = ("endpoint",)

AVERAGES = {  # by attribute of PodLoad; over the pods that tell
    "kv_usage": Spec(
        "gauge",
        "inference_pool_average_kv_cache_utilization",
        _NAME,
        "Share of KV blocks that running requests hold, 0 to 1.",
    ),
    "waiting": Spec(
        "gauge", "inference_pool_average_queue_size", _NAME, "Requests in a pod's queue."
    ),
    "running": Spec(
        "gauge", "inference_pool_average_running_requests", _NAME, "Requests in a pod's batch."
    ),
}
READY = Spec("gauge", "inference_pool_ready_pods", _NAME, "Pods that told their load lately.")
QUEUE = Spec(
    "gauge",
    "inference_pool_per_pod_queue_size",
    ("name", "model_server_pod"),
    "Requests in a pod's queue, with our picks since it told.",
)
PODS = {  # by attribute of PodLoad
    "fresh": Spec("gauge", "warmpath_pod_fresh", _POD, "1 for a pod that told its load lately."),
    "age": Spec(
        "gauge",
        "warmpath_pod_load_age_seconds",
        _POD,
        "Since a pod was asked for the load that is known of it.",
    ),
    "running": Spec("gauge", "warmpath_pod_running_requests", _POD, "Requests in its batch."),
    "kv_usage": Spec("gauge", "warmpath_pod_kv_usage_ratio", _POD, "Share of its KV blocks held."),
    "inflight": Spec(
        "gauge", "warmpath_pod_inflight_requests", _POD, "Our requests there that have not ended."
    ),
    "inflight_tokens": Spec(
        "gauge",
        "warmpath_pod_inflight_tokens",
        _POD,
        "Uncached prompt tokens of ours there whose first token has not come.",
    ),
}
SCRAPE_FAILING = Spec(
    "gauge", "warmpath_pod_scrape_failing", _POD, "1 for a pod whose last scrape failed."
)
INDEX_SIZE = Spec(
    "gauge", "inference_extension_prefix_indexer_size", (), "Blocks in the prefix index, all pods."
)
INFO = Spec("gauge", "inference_extension_info", ("commit", "build_ref"), "The running picker.")


class PoolGauges:
    """Writes them; keeps nothing."""

    def __init__(self, pool: Pool, load: Load, prefix: PrefixProducer) -> None:
        self._pool = pool
        self._load = load
        self._prefix = prefix

    def page(self) -> Iterator[str]:
        """All of it as Prometheus' text, in small pieces. What a pod does not tell is left out."""
        name = self._pool.name
        loads = {
            address: self._load.describe(endpoint)
            for address, endpoint in self._pool.endpoints.items()
        }
        for attribute, spec in AVERAGES.items():
            values = [float(getattr(load, attribute)) for load in loads.values() if load.fresh]
            told = [value for value in values if isfinite(value)]
            yield from write(spec, [((name,), fmean(told))] if told else [])
        yield from write(READY, [((name,), sum(load.fresh for load in loads.values()))])
        queues = [
            ((name, self._pool.endpoints[address].name), load.waiting)
            for address, load in loads.items()
        ]
        yield from write(QUEUE, [row for row in queues if isfinite(row[1])])
        for attribute, spec in PODS.items():
            rows = [
                ((address,), float(getattr(load, attribute))) for address, load in loads.items()
            ]
            yield from write(spec, [row for row in rows if isfinite(row[1])])
        failing = [((address,), int(load.error is not None)) for address, load in loads.items()]
        yield from write(SCRAPE_FAILING, failing)
        yield from write(INDEX_SIZE, [((), self._prefix.blocks)])
        yield from write(INFO, [(("", version("warmpath")), 1)])
