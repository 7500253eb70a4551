"""Objects of Kubernetes for tests, checked as its API server would: CRDs by their schemas."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Object = dict[str, Any]

CRDS = Path(__file__).parent / "data" / "crds"
POOL_GROUP = "inference.networking.k8s.io"
X_GROUP = "inference.networking.x-k8s.io"
LLM_D = "llm-d.ai"
_TEXTS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 262144}}
_LABEL = {"type": "string", "maxLength": 63}


class Invalid(ValueError):
    """An object that the API server refuses, and why."""


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


METADATA = _object(
    name={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"},
    namespace={"type": "string", "maxLength": 63},
    labels={"type": "object", "additionalProperties": _LABEL},
    annotations=_TEXTS,
    uid={"type": "string"},
    resourceVersion={"type": "string"},
    creationTimestamp={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    deletionTimestamp={"type": "string"},
    generation={"type": "integer"},
    managedFields={"type": "array"},
) | {"required": ["name"]}
POD = _object(
    apiVersion={"const": "v1"},
    kind={"const": "Pod"},
    metadata={"type": "object"},
    spec={"type": "object"},
    status=_object(
        phase={"enum": ["Pending", "Running", "Succeeded", "Failed", "Unknown"]},
        podIP={"type": "string"},
        conditions={
            "type": "array",
            "items": _object(type={"type": "string"}, status={"enum": ["True", "False", "Unknown"]})
            | {"required": ["type", "status"]},
        },
    ),
)
LEASE = _object(
    apiVersion={"const": "coordination.k8s.io/v1"},
    kind={"const": "Lease"},
    metadata={"type": "object"},
    spec=_object(
        holderIdentity={"type": ["string", "null"]},
        leaseDurationSeconds={"type": "integer", "minimum": 1},
        leaseTransitions={"type": "integer"},
        acquireTime={"type": ["string", "null"], "pattern": r"T.*\.\d{6}Z$"},
        renewTime={"type": ["string", "null"], "pattern": r"T.*\.\d{6}Z$"},
    ),
)


# InferencePool before v1. Its CRD is not published any more, so this is only what is read of it.
X_POOL = _object(
    apiVersion={"const": f"{X_GROUP}/v1alpha2"},
    kind={"const": "InferencePool"},
    metadata={"type": "object"},
    spec=_object(
        selector={"type": "object", "additionalProperties": _LABEL, "minProperties": 1},
        targetPortNumber={"type": "integer", "minimum": 1, "maximum": 65535},
    )
    | {"required": ["selector", "targetPortNumber"]},
)


class Kind:
    """A kind of objects that the API server knows."""

    def __init__(self, group: str, version: str, plural: str, name: str, schema: Any) -> None:
        self.group, self.version, self.plural, self.name = group, version, plural, name
        self.schema = schema
        self._validator = Draft202012Validator(schema)
        self._metadata = Draft202012Validator(METADATA)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def admitted(self, thing: Object) -> Object:
        """An object with its defaults, as it is stored.

        Raises:
            Invalid: the API server would answer 422.
        """
        if (thing.get("apiVersion"), thing.get("kind")) != (self.api_version, self.name):
            raise Invalid(f"this is no {self.api_version} {self.name}")
        whole = copy.deepcopy(thing)
        _fill(self.schema, whole, "")
        for validator, value in ((self._validator, whole), (self._metadata, whole["metadata"])):
            for problem in validator.iter_errors(value):
                raise Invalid(f"{problem.json_path}: {problem.message}")
        return whole


def _fill(schema: Any, value: Any, place: str) -> None:
    """Set defaults; a field that the schema does not know is an error, as with `kubectl`."""
    if isinstance(value, dict) and "properties" in schema:
        for key, inner in schema["properties"].items():
            if key not in value and "default" in inner and key != "conditions":
                value[key] = copy.deepcopy(inner["default"])
        for key, each in value.items():
            if key not in schema["properties"]:
                raise Invalid(f'unknown field "{place}.{key}"')
            _fill(schema["properties"][key], each, f"{place}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for i, each in enumerate(value):
            _fill(schema["items"], each, f"{place}[{i}]")


@cache
def custom_kinds() -> Mapping[str, Kind]:
    """Those of the CRDs, by `plural.group`."""
    found = {}
    for path in sorted(CRDS.glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        (version,) = spec["versions"]
        kind = Kind(
            spec["group"],
            version["name"],
            spec["names"]["plural"],
            spec["names"]["kind"],
            version["schema"]["openAPIV3Schema"],
        )
        found[f"{kind.plural}.{kind.group}"] = kind
    return found


def builtin_kinds() -> Mapping[str, Kind]:
    return {
        "pods": Kind("", "v1", "pods", "Pod", POD),
        f"inferencepools.{X_GROUP}": Kind(
            X_GROUP, "v1alpha2", "inferencepools", "InferencePool", X_POOL
        ),
        "leases.coordination.k8s.io": Kind("coordination.k8s.io", "v1", "leases", "Lease", LEASE),
    }


def metadata(name: str, namespace: str = "default", **more: Any) -> Object:
    return {"name": name, "namespace": namespace} | more


def pod(
    name: str,
    ip: str = "",
    labels: Mapping[str, str] | None = None,
    *,
    namespace: str = "default",
    ready: bool = True,
    phase: str = "Running",
    annotations: Mapping[str, str] | None = None,
    **more: Any,
) -> Object:
    """`more` is metadata: uid, deletionTimestamp, creationTimestamp."""
    about = metadata(name, namespace, labels=dict(labels or {"app": "llm"}), **more)
    if annotations is not None:
        about["annotations"] = dict(annotations)
    status: Object = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    if ip:
        status["podIP"] = ip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {}, "status": status}


def inference_pool(
    name: str = "demo",
    labels: Mapping[str, str] | None = None,
    ports: Iterable[int] = (8000,),
    *,
    namespace: str = "default",
    **more: Any,
) -> Object:
    return {
        "apiVersion": f"{POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": metadata(name, namespace, **more),
        "spec": {
            "selector": {"matchLabels": dict(labels or {"app": "llm"})},
            "targetPorts": [{"number": number} for number in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def x_pool(
    name: str = "demo",
    labels: Mapping[str, str] | None = None,
    port: int = 8000,
    *,
    namespace: str = "default",
) -> Object:
    return {
        "apiVersion": f"{X_GROUP}/v1alpha2",
        "kind": "InferencePool",
        "metadata": metadata(name, namespace),
        "spec": {"selector": dict(labels or {"app": "llm"}), "targetPortNumber": port},
    }


def objective(
    name: str,
    priority: int | None,
    *,
    pool: str = "demo",
    group: str = X_GROUP,
    pool_group: str = "",
    namespace: str = "default",
    **more: Any,
) -> Object:
    spec: Object = {"poolRef": {"name": pool}}
    if pool_group:
        spec["poolRef"]["group"] = pool_group
    if priority is not None:
        spec["priority"] = priority
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": metadata(name, namespace, **more),
        "spec": spec,
    }


def rewrite(
    name: str,
    rules: Sequence[tuple[Sequence[str], Sequence[tuple[str, int | None]]]],
    *,
    pool: str = "demo",
    group: str = X_GROUP,
    namespace: str = "default",
    **more: Any,
) -> Object:
    """Each rule: the models that it matches, and target models with their weights."""
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": metadata(name, namespace, **more),
        "spec": {"poolRef": {"name": pool}, "rules": [_rule(*rule) for rule in rules]},
    }


def _rule(models: Sequence[str], targets: Sequence[tuple[str, int | None]]) -> Object:
    rule: Object = {
        "targets": [
            {"modelRewrite": model} | ({} if weight is None else {"weight": weight})
            for model, weight in targets
        ]
    }
    if models:
        rule["matches"] = [{"model": {"value": model}} for model in models]
    return rule
