"""EndpointPickerConfig v1alpha1 as types, of inference.networking.x-k8s.io and of llm-d.ai.

What one group has and the other has not is read for both. Plugins' parameters are in `plugins.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from picker.config import Section
from picker.reference.quantity import GoDuration, Quantity

GIE, LLM_D = "inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1"
KIND = "EndpointPickerConfig"


class PluginSpec(Section, frozen=True):
    type: str
    name: str = ""  # empty: the type
    parameters: Any = None


class Ref(Section, frozen=True):
    plugin_ref: str


class ProfilePlugin(Section, frozen=True):
    plugin_ref: str
    weight: float = 1.0


class Profile(Section, frozen=True):
    name: str
    plugins: tuple[ProfilePlugin, ...] = ()


class Detector(Section, frozen=True):
    """A plugin, or, before there were plugins for it, the numbers themselves."""

    plugin_ref: str = ""
    queue_depth_threshold: Any = None
    kv_cache_util_threshold: Any = None
    metrics_staleness_threshold: Any = None


class Source(Section, frozen=True):
    plugin_ref: str
    extractors: tuple[Ref, ...] = ()


class DataLayer(Section, frozen=True):
    sources: tuple[Source, ...] = ()
    inject_defaults: bool = True
    discovery: Any = None
    peer_discovery: Any = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: Any = None


class Band(Section, frozen=True):
    priority: int = 0
    max_bytes: Quantity = Quantity(0)
    max_requests: Quantity = Quantity(0)
    fairness_policy_ref: str = ""
    ordering_policy_ref: str = ""


class FlowControl(Section, frozen=True):
    max_bytes: Quantity = Quantity(0)
    max_requests: Quantity = Quantity(0)
    default_request_ttl: GoDuration = msgspec.field(
        name="defaultRequestTTL", default=GoDuration(-1)
    )  # below 0: left out
    no_endpoint_request_ttl: GoDuration = msgspec.field(
        name="noEndpointRequestTTL", default=GoDuration(-1)
    )
    default_priority_band: Band = Band()
    default_negative_priority_band: Band = Band()
    priority_bands: tuple[Band, ...] = ()
    usage_limit_policy_plugin_ref: str = ""
    saturation_detector: Detector = Detector()
    enable_eviction: bool = False


class RequestHandler(Section, frozen=True):
    parsers: tuple[Ref, ...] = ()


class File(Section, frozen=True):
    api_version: str
    kind: str
    feature_gates: tuple[str, ...] = ()
    plugins: tuple[PluginSpec, ...] = ()
    scheduling_profiles: tuple[Profile, ...] = ()
    saturation_detector: Detector = Detector()
    data_layer: DataLayer = DataLayer()
    data: DataLayer = DataLayer()  # what dataLayer was called
    flow_control: FlowControl = FlowControl()
    parser: Ref = Ref(plugin_ref="")
    request_handler: RequestHandler = RequestHandler()
