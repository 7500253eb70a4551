"""The reference picker's scorers, and what tells them of prefixes, in our terms."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from picker.config import Section
from picker.reference.plugin import Data, Plugin, Refused, Role, ScorerPlugin

BYTES_PER_TOKEN = 4  # of the reference picker's blocks
LEAST_COMPARED = 256 << 10  # bytes of a prompt: a shorter look would take warm prompts for cold
CONTEXT_LABELS = ("llm-d.ai/context-length-range", "warmpath.io/context-length-range")
PRECISE = "precise-prefix-cache-producer"


class Queue(ScorerPlugin, frozen=True):
    def scorer(self) -> Data:
        return {"type": "queue"}


class KvCache(ScorerPlugin, frozen=True):
    def scorer(self) -> Data:
        return {"type": "kv"}


class RunningRequests(ScorerPlugin, frozen=True):
    def scorer(self) -> Data:
        return {"type": "running"}


class LoraAffinity(ScorerPlugin, frozen=True):
    def scorer(self) -> Data:
        return {"type": "lora"}


class TokenLoad(ScorerPlugin, frozen=True):
    queue_threshold_tokens: int = 4_194_304
    in_flight_load_producer_name: str = ""

    def scorer(self) -> Data:
        return {"type": "tokenLoad", "threshold": self.queue_threshold_tokens}


class LoadAware(ScorerPlugin, frozen=True):
    threshold: int = 128

    def scorer(self) -> Data:
        return {"type": "loadAware", "threshold": self.threshold}


class ActiveRequest(ScorerPlugin, frozen=True):
    request_timeout: Any = None
    idle_threshold: int = 0
    max_busy_score: float = 1.0
    in_flight_load_producer_name: str = ""

    def scorer(self) -> Data:
        busy = self.max_busy_score if 0 <= self.max_busy_score <= 1 else 1.0
        return {"type": "active", "idle": max(0, self.idle_threshold), "busy": busy}

    def notes(self) -> list[str]:
        if self.request_timeout is None:
            return []
        return ["requestTimeout is ignored: a request counts until it ends"]


class NoHitLru(ScorerPlugin, frozen=True):
    lru_size: int = 1024
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""
    prefix_match_info_producer_name: str = ""

    def scorer(self) -> Data:
        return {"type": "noHitLru"}


class HeaderLabel(ScorerPlugin, frozen=True):
    header_name: str
    label_key: str
    stamp_response_header: bool = True

    def scorer(self) -> Data:
        return {"type": "label", "header": self.header_name, "label": self.label_key}

    def notes(self) -> list[str]:
        if not self.stamp_response_header:
            return []
        return ["the response does not get the header: set stampResponseHeader: false"]


class ContextLength(ScorerPlugin, frozen=True):
    label: str = CONTEXT_LABELS[0]
    enable_filtering: bool = False
    reusable_tokens_producer_name: str = ""

    def scorer(self) -> Data:
        if self.label not in CONTEXT_LABELS:
            raise Refused(f"label: only {' and '.join(CONTEXT_LABELS)} are read; label pods so")
        if self.enable_filtering:
            raise Refused(
                "enableFiltering: pods out of range are only scored; leave it out and raise the "
                "weight"
            )
        if self.reusable_tokens_producer_name:
            raise Refused("reusableTokensProducerName: caches are not shared here; leave it out")
        return {"type": "contextLength"}


class Blocks(Plugin, frozen=True):
    """Parameters of the approximate index."""

    roles: ClassVar = frozenset({Role.PRODUCER})
    auto_tune: bool = True
    block_size_tokens: int = 0
    block_size: int = 0  # characters, before it was told in tokens
    max_prefix_blocks_to_match: int = 0
    max_prefix_tokens_to_match: int = 0
    lru_capacity_per_server: int = 0

    def settings(self) -> Data:
        size = self.block_size or BYTES_PER_TOKEN * self.block_size_tokens
        if size and not 16 <= size <= 1 << 20:
            raise Refused("blockSizeTokens: must be from 4 to 262144")
        most = self.max_prefix_blocks_to_match
        if self.max_prefix_tokens_to_match:
            most = BYTES_PER_TOKEN * self.max_prefix_tokens_to_match // (size or 256)
        prefix: Data = {"blockBytes": size} if size else {}
        if size or most:
            least = LEAST_COMPARED // (size or 256)
            prefix["maxBlocks"] = max(1, min(max(least, most), 1 << 16))
        return {"prefix": prefix} if prefix else {}

    def notes(self) -> list[str]:
        if not self.lru_capacity_per_server:
            return []
        return ["lruCapacityPerServer is ignored: a pod's KV cache is taken as large as it tells"]


class PrefixCache(Blocks, frozen=True):
    """The scorer, which was once its own producer and has its parameters still."""

    roles: ClassVar = frozenset({Role.SCORER})
    prefix_match_info_producer_name: str = ""
    match_length_weight: float = 0.0
    prefix_length_weight: float = 0.0
    max_model_len: int = 0

    def scorer(self) -> Data:
        if self.match_length_weight or self.prefix_length_weight:
            raise Refused(
                "matchLengthWeight: only the share of a prompt is scored; leave it out, or use "
                "token-load-scorer, which counts tokens"
            )
        return {"type": "prefix"}


class PrecisePrefix(Plugin, frozen=True):
    """KV events. Its blocks are the engines', so none of its sizes has to be told."""

    roles: ClassVar = frozenset({Role.PRODUCER, Role.EXTRACTOR})
    token_processor_config: Any = None
    indexer_config: Any = None
    kv_events_config: Any = None
    speculative_indexing: bool = False
    speculative_ttl: Any = None
    replay_socket_port: int = 0

    def settings(self) -> Data:
        events: Data = {}
        told = self.kv_events_config if isinstance(self.kv_events_config, dict) else {}
        found = told.get("podDiscoveryConfig")
        port = found.get("socketPort") if isinstance(found, dict) else None
        if isinstance(port, int) and 0 < port < 65536:
            events["port"] = port
        replay = self.replay_socket_port or told.get("replaySocketPort")
        if isinstance(replay, int) and 0 < replay < 65536:
            events["replayPort"] = replay
        return {"prefix": {"mode": "events"} | ({"events": events} if events else {})}

    def notes(self) -> list[str]:
        told = self.kv_events_config if isinstance(self.kv_events_config, dict) else {}
        if told.get("zmqEndpoint"):
            return [
                "kvEventsConfig.zmqEndpoint is ignored: Warmpath connects to each pod, which must "
                "publish at a port of its own"
            ]
        return []


class PrecisePrefixScorer(PrecisePrefix, frozen=True):
    """The scorer that was its own producer."""

    roles: ClassVar = frozenset({Role.SCORER, Role.EXTRACTOR})

    def scorer(self) -> Data:
        return {"type": "prefix"}


class _Header(Section, frozen=True):
    header: str = ""
    attribute: str = ""


class SessionIds(Section, frozen=True):
    sources: tuple[_Header, ...] = (_Header(header="x-session-id"),)
    eviction_ttl_seconds: float = 300.0
    eviction_sweep_seconds: float = 10.0


class Sessions(Plugin, frozen=True):
    """Parameters of both session plugins, as they are called now and were before."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    algorithm: str = ""
    header_name: str = "x-session-token"
    eviction_ttl_seconds: float = 600.0
    eviction_sweep_seconds: float = 30.0
    miss_threshold: int = 3
    profile_name: str = ""
    encoded_endpoint_header_config: Any = None
    session_id_config: SessionIds = SessionIds()

    def settings(self) -> Data:
        if self.algorithm == "session_id_header":
            return _sessions(self.header_name, self.eviction_ttl_seconds)
        if self.strategy != "session_id":
            raise Refused(
                "strategy encoded_endpoint_header: no response header is written here; set "
                "strategy: session_id and let clients send a session's id"
            )
        sources = self.session_id_config.sources
        if len(sources) != 1 or not sources[0].header:
            raise Refused("sessionIdConfig.sources: exactly one, and a header, is read")
        return _sessions(sources[0].header, self.session_id_config.eviction_ttl_seconds)


def _sessions(header: str, ttl: float) -> Data:
    if not 1 <= ttl <= 168 * 3600:
        raise Refused(f"evictionTtlSeconds: must be from 1 to 604800, not {ttl:g}")
    return {"sessions": {"header": header, "ttl": ttl}}


class SessionAffinity(Sessions, frozen=True):
    roles: ClassVar = frozenset({Role.SCORER})

    def scorer(self) -> Data:
        return {"type": "session"}


SCORERS: dict[str, type[Plugin]] = {
    "queue-scorer": Queue,
    "kv-cache-utilization-scorer": KvCache,
    "running-requests-size-scorer": RunningRequests,
    "lora-affinity-scorer": LoraAffinity,
    "token-load-scorer": TokenLoad,
    "load-aware-scorer": LoadAware,
    "active-request-scorer": ActiveRequest,
    "no-hit-lru-scorer": NoHitLru,
    "header-label-affinity-scorer": HeaderLabel,
    "context-length-aware": ContextLength,
    "prefix-cache-scorer": PrefixCache,
    "precise-prefix-cache-scorer": PrecisePrefixScorer,
    "session-affinity-scorer": SessionAffinity,
    "approx-prefix-cache-producer": Blocks,
    PRECISE: PrecisePrefix,
}
