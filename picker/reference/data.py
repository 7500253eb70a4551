"""The reference picker's data layer: where pods' metrics are, and what they are called."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import msgspec

from picker.config import Section
from picker.reference.plugin import Data, Plugin, Refused, Role

BUILT_IN = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "trtllm"}
BUILT_IN |= {"triton-tensorrt-llm": "triton", "trtllm": "trtllm", "triton": "triton"}
ENGINE_LABEL = "inference.networking.k8s.io/engine-type"
ENGINE_LABELS = (ENGINE_LABEL, "llm-d.ai/engine-type")


class MetricsSource(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.SOURCE})
    scheme: Literal["http", "https"] = "http"
    path: str = "/metrics"
    insecure_skip_verify: bool = True

    def settings(self) -> Data:
        if not re.fullmatch(r"/[!-~]{0,1000}", self.path):
            raise Refused(f"path: {self.path[:100]!r} is no path, such as /metrics")
        metrics: Data = {} if self.path == "/metrics" else {"path": self.path}
        if self.scheme == "https":
            metrics |= {"scheme": "https", "insecureSkipVerify": self.insecure_skip_verify}
        return {"metrics": metrics} if metrics else {}


class EngineConfig(Section, frozen=True):
    name: str
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = msgspec.field(name="kvUsageSpec", default="")
    lora_spec: str = msgspec.field(name="loraSpec", default="")
    cache_info_spec: str = ""

    def engine(self) -> Data:
        """Its entry in `metrics.engines`."""
        return {
            "waiting": self.queued_requests_spec,
            "running": self.running_requests_spec,
            "kvUsage": self.kv_usage_spec,
            "adapters": self.lora_spec,
            "cacheInfo": self.cache_info_spec,
        }


class CoreMetrics(Plugin, frozen=True):
    roles: ClassVar = frozenset({Role.EXTRACTOR})
    engine_label_key: str = ""
    default_engine: str = "vllm"
    engine_configs: tuple[EngineConfig, ...] = ()

    def settings(self) -> Data:
        engines: Data = {}
        for told in self.engine_configs:
            if not told.name or told.name == "default":
                raise Refused(f"engineConfigs: {told.name!r} cannot be the name of an engine")
            if told.name in engines:
                raise Refused(f"engineConfigs: {told.name!r} is defined twice")
            engines[told.name] = told.engine()
        metrics: Data = {"engines": engines} if engines else {}
        default = self.default_engine or "vllm"
        if default not in engines:
            if default not in BUILT_IN:
                raise Refused(f"defaultEngine: {default!r} is not among engineConfigs")
            default = BUILT_IN[default]
        if default != "vllm":
            metrics["engine"] = default
        if self.engine_label_key and self.engine_label_key not in ENGINE_LABELS:
            metrics["engineLabel"] = self.engine_label_key
        return {"metrics": metrics} if metrics else {}


class Notifications(Plugin, frozen=True):
    """Of objects in Kubernetes, to extractors of the reference picker's own."""

    roles: ClassVar = frozenset({Role.SOURCE})
    group: str = ""
    version: str = ""
    kind: str = ""

    def notes(self) -> list[str]:
        return [
            "nobody listens to it here: pools, pods, objectives and rewrites are watched anyway"
        ]


class EndpointNotifications(Plugin, frozen=True):
    """Of pods that come and go, which all parts are told of anyway."""

    roles: ClassVar = frozenset({Role.SOURCE})


DATA: dict[str, type[Plugin]] = {
    "metrics-data-source": MetricsSource,
    "core-metrics-extractor": CoreMetrics,
    "model-server-protocol-metrics": CoreMetrics,
    "k8s-notification-source": Notifications,
    "endpoint-notification-source": EndpointNotifications,
}
