"""What is read of objects: a few fields of each, as Kubernetes' API and the CRDs have them.

Fields that are not named here are skipped while an object is decoded, so a pod takes a few hundred
bytes here and not ten thousand.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

POOL_GROUP = "inference.networking.k8s.io"
X_GROUP = "inference.networking.x-k8s.io"
LLM_D_GROUP = "llm-d.ai"
MAX_PORTS = 8  # of a pool
ACTIVE_PORTS = "inference.networking.k8s.io/active-ports"


class Part(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A part of an object."""


class Annotations(Part, frozen=True):
    active_ports: str | None = msgspec.field(name=ACTIVE_PORTS, default=None)


class Identity(Part, frozen=True):
    """What is needed of any object, and of one that is not understood."""

    name: str
    resource_version: str


class Meta(Identity, frozen=True):
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: Annotations | None = None
    creation_timestamp: str | None = None  # RFC 3339 in UTC: the older, the smaller
    deletion_timestamp: str | None = None


class Bare(Part, frozen=True):
    metadata: Identity


class Thing(Part, frozen=True):
    """Any object."""

    metadata: Meta


class Condition(Part, frozen=True):
    type: str
    status: str


class PodStatus(Part, frozen=True):
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[Condition] | None = None


class Pod(Thing, frozen=True):
    status: PodStatus = PodStatus()


class Selector(Part, frozen=True):
    match_labels: dict[str, str]


class TargetPort(Part, frozen=True):
    number: int


class PoolSpec(Part, frozen=True):
    selector: Selector
    target_ports: list[TargetPort]
    app_protocol: str = "http"


class InferencePool(Thing, frozen=True):
    """inference.networking.k8s.io/v1"""

    spec: PoolSpec

    @property
    def labels(self) -> Mapping[str, str]:
        """That its pods have."""
        return self.spec.selector.match_labels

    @property
    def ports(self) -> list[int]:
        """Of each of its pods."""
        return [port.number for port in self.spec.target_ports]

    @property
    def protocol(self) -> str:
        """That its pods speak: http or kubernetes.io/h2c."""
        return self.spec.app_protocol


class XPoolSpec(Part, frozen=True):
    selector: dict[str, str]
    target_port_number: int


class XInferencePool(Thing, frozen=True):
    """inference.networking.x-k8s.io/v1alpha2, from before v1. See InferencePool."""

    spec: XPoolSpec

    @property
    def labels(self) -> Mapping[str, str]:
        return self.spec.selector

    @property
    def ports(self) -> list[int]:
        return [self.spec.target_port_number]

    @property
    def protocol(self) -> str:
        return "http"


class PoolRef(Part, frozen=True):
    name: str
    group: str = POOL_GROUP
    kind: str = "InferencePool"


class ObjectiveSpec(Part, frozen=True):
    pool_ref: PoolRef
    priority: int | None = None


class InferenceObjective(Thing, frozen=True):
    """v1alpha2 of either group."""

    spec: ObjectiveSpec


class ModelMatch(Part, frozen=True):
    value: str
    type: str = "Exact"


class Match(Part, frozen=True):
    model: ModelMatch


class TargetModel(Part, frozen=True):
    model_rewrite: str
    weight: int | None = None


class RewriteRule(Part, frozen=True):
    targets: list[TargetModel]
    matches: list[Match] | None = None


class RewriteSpec(Part, frozen=True):
    pool_ref: PoolRef
    rules: list[RewriteRule]


class InferenceModelRewrite(Thing, frozen=True):
    """v1alpha2 of either group."""

    spec: RewriteSpec
