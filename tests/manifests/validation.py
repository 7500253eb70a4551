"""Objects by their schemas, as strictly as `kubectl apply --validate=strict`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator, ValidationError

Object = dict[str, Any]

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ("1.30", "1.34", "1.37")  # of Kubernetes: the oldest that we name, to the newest known


def validate(thing: Object) -> None:
    """Raises ValidationError where the API server would refuse an object."""
    specs = _specs()
    key = thing["apiVersion"], thing["kind"]
    if key in specs:
        assert set(thing) <= {"apiVersion", "kind", "metadata", "spec"}, thing["metadata"]
        specs[key].validate(thing["spec"])
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except ValidationError as problem:
            name = f"{thing['kind']} {thing['metadata']['name']}"
            raise AssertionError(f"{name}: {problem.message}") from problem


@cache
def _specs() -> dict[tuple[str, str], Draft202012Validator]:
    """Of custom resources, by apiVersion and kind."""
    found = {}
    for path in DATA.glob("crds/*.yaml"):
        for definition in yaml.safe_load_all(path.read_text()):
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                found[key] = Draft202012Validator(_strict(schema))
    for path in DATA.glob("schemas/*.json"):
        group, version, kind = path.stem.rsplit("_", 2)
        key = f"{group}/{version}", KINDS[kind]
        found[key] = Draft202012Validator(_strict(json.loads(path.read_text())))
    return found


KINDS = {
    name.lower(): name
    for name in (
        "Certificate",
        "DestinationRule",
        "GCPBackendPolicy",
        "Gateway",
        "GatewayClass",
        "HTTPRoute",
        "HealthCheckPolicy",
        "Issuer",
        "PodMonitor",
        "ScaledObject",
    )
}


def _strict(schema: Any) -> Any:
    """A schema that refuses the fields which Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(part) for key, part in schema.items()}
    open_ended = {"additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(schema)
    if schema.get("type") == "object" and "properties" in schema and not open_ended:
        strict["additionalProperties"] = False
    return strict
