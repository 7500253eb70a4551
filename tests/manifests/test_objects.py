"""Everything that a user can apply: valid, hardened, and its parts find each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import yaml

from picker.health import LIVENESS, READINESS
from tests.manifests.rendered import (
    BUILDS,
    FOLDER,
    NAMESPACE,
    OPTIONS,
    WORKERS,
    Object,
    charted,
    containers,
    each,
    kustomized,
    only,
)
from tests.manifests.validation import validate

ALL = {"leaderElection": {"enabled": True}, "listen": {"metricsAuth": "tokenReview"}}
PORTS = {"grpc": 7002, "health": 7003, "replica": 7006, "admin": 7090}
RENDERED = {
    **{folder: lambda folder=folder: kustomized(folder) for folder in (*BUILDS, *WORKERS)},
    **{
        f"options/{option}": lambda option=option: kustomized("gateways/base", option)
        for option in OPTIONS
    },
    "options/pod-monitor, metrics-auth": lambda: kustomized(
        "gateways/base", "pod-monitor", "metrics-auth"
    ),
    "chart": charted,
    "chart, standalone": lambda: charted(mode="standalone"),
    "chart, other ports": lambda: charted(config={"listen": PORTS}),
    "chart, standalone, other ports": lambda: charted(
        mode="standalone", config={"listen": PORTS, "envoy": {"listen": 7080}}
    ),
    "chart, istio": lambda: charted(gateway={"provider": "istio", "className": "istio"}),
    "chart, gke": lambda: charted(gateway={"provider": "gke"}, route={"create": True}),
    "chart, everything": lambda: charted(
        config=ALL,
        certificateSecret="mine",
        replicasSecret="mine",
        extraVolumes=[{"name": "more", "secret": {"secretName": "mine"}}],
        extraVolumeMounts=[{"name": "more", "mountPath": "/etc/more", "readOnly": True}],
        objectives={"batch": -1},
        podMonitor={
            "create": True,
            "labels": {"release": "prometheus"},
            "tokenSecret": "mine",
        },
        autoscaling={"type": "keda", "minReplicas": 0},
        podAnnotations={"a": "b"},
        podLabels={"team": "ml"},
        nodeSelector={"disk": "fast"},
        tolerations=[{"key": "a", "operator": "Exists"}],
        imagePullSecrets=[{"name": "registry"}],
        priorityClassName="high",
        affinity={"nodeAffinity": {}},
    ),
    "chart, hpa": lambda: charted(autoscaling={"type": "hpa"}),
}


@pytest.fixture(params=RENDERED)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    made: list[Object] = RENDERED[request.param]()
    return made


def test_objects_are_valid(objects: list[Object]) -> None:
    assert objects
    for thing in objects:
        validate(thing)
    keys = [(thing["kind"], thing["metadata"]["name"]) for thing in objects]
    assert len(keys) == len(set(keys))
    assert {thing["metadata"].get("namespace", NAMESPACE) for thing in objects} == {NAMESPACE}


def pods_of(objects: list[Object]) -> Iterator[Object]:
    """The templates of pods."""
    for thing in each(objects, "Deployment"):
        yield thing["spec"]["template"]


def test_pods_are_hardened(objects: list[Object]) -> None:
    for pod in pods_of(objects):
        spec = pod["spec"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        vllm = spec["containers"][0]["name"] == "vllm"  # whose image is root's, and writes
        if not vllm:
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] >= 10_000
        for one in containers(spec):
            security = one["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert vllm or security["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= set(one["resources"]["requests"])
            assert "memory" in one["resources"]["limits"]
            tag = one["image"].rpartition(":")[2]
            assert tag and "/" not in tag and tag != "latest", one["image"]
        token = spec["automountServiceAccountToken"]
        assert token is (spec.get("serviceAccountName") is not None)


def test_what_pods_mount_is_there(objects: list[Object]) -> None:
    for pod in pods_of(objects):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        used = {mount["name"] for one in containers(pod["spec"]) for mount in one["volumeMounts"]}
        assert used == set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert only(objects, "ConfigMap", volume["configMap"]["name"])
            elif "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"]
            elif not volume["secret"].get("optional"):
                made = {thing["metadata"]["name"] for thing in each(objects, "Secret")}
                issued = {thing["spec"]["secretName"] for thing in each(objects, "Certificate")}
                assert volume["secret"]["secretName"] in {*made, *issued, "mine"}
        account = pod["spec"].get("serviceAccountName")
        assert account is None or only(objects, "ServiceAccount", account)


def test_probes_ask_what_there_is(objects: list[Object]) -> None:
    for pod in pods_of(objects):
        for one in containers(pod["spec"]):
            ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = one.get(name, {})
                if "grpc" in probe:
                    assert probe["grpc"]["port"] == ports["health"]
                    asked = probe["grpc"]["service"]
                    assert asked in READINESS if name == "readinessProbe" else asked == LIVENESS
                elif probe:
                    (check,) = probe.keys() & {"httpGet", "tcpSocket"}
                    assert probe[check]["port"] in ports


def test_selectors_find_pods_and_their_ports(objects: list[Object]) -> None:
    pods = list(pods_of(objects))
    for thing in objects:
        kind, spec = thing["kind"], thing.get("spec", {})
        if kind == "Deployment":
            assert matches(spec["selector"]["matchLabels"], spec["template"])
        elif kind == "Service":
            (pod,) = (pod for pod in pods if matches(spec["selector"], pod))
            assert {port["targetPort"] for port in spec["ports"]} <= port_targets(pod)
        elif kind == "PodMonitor":
            (pod,) = (pod for pod in pods if matches(spec["selector"]["matchLabels"], pod))
            ports = ports_of(pod)  # the operator reads the names of sidecars', too
            assert {end["port"] for end in spec["podMetricsEndpoints"]} <= set(ports)
        elif kind == "PodDisruptionBudget":
            assert [pod for pod in pods if matches(spec["selector"]["matchLabels"], pod)]
        elif kind == "NetworkPolicy":
            (pod,) = (pod for pod in pods if matches(spec["podSelector"]["matchLabels"], pod))
            allowed = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            ports = ports_of(pod)
            assert allowed <= port_targets(pod)
            to_all = [rule["ports"] for rule in spec["ingress"] if "from" not in rule]
            served = ports["http"] if "http" in ports else ports["grpc"]
            assert to_all == [[{"port": served}, {"port": ports["health"]}]]


def matches(selector: dict[str, str], pod: Object) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def ports_of(pod: Object) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for one in containers(pod["spec"])
        for port in one.get("ports", [])
    }


def port_targets(pod: Object) -> set[str | int]:
    """What Services and policies may name: not the names of sidecars' ports, in all clusters."""
    usual = {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", [])}
    return {*usual, *ports_of(pod).values()}


def test_references_lead_somewhere(objects: list[Object]) -> None:
    for thing in objects:
        kind, spec = thing["kind"], thing.get("spec", {})
        if kind == "InferencePool":
            picker = spec["endpointPickerRef"]
            service = only(objects, "Service", picker["name"])
            (port,) = service["spec"]["ports"]
            assert port["port"] == picker["port"]["number"]
            assert port["appProtocol"] == "http2"
        elif kind == "HTTPRoute":
            for rule in spec["rules"]:
                for backend in rule["backendRefs"]:
                    pool = only(objects, backend["kind"], backend["name"])
                    assert pool["apiVersion"].startswith(backend["group"] + "/")
            gateways = {gateway["metadata"]["name"] for gateway in each(objects, "Gateway")}
            assert not gateways or {ref["name"] for ref in spec["parentRefs"]} == gateways
        elif kind == "InferenceObjective":
            assert only(objects, "InferencePool", spec["poolRef"]["name"])
        elif kind in ("RoleBinding", "ClusterRoleBinding"):
            assert only(objects, thing["roleRef"]["kind"], thing["roleRef"]["name"])
            for subject in thing["subjects"]:
                assert only(objects, subject["kind"], subject["name"])
        elif kind == "DestinationRule":
            assert only(objects, "Service", spec["host"])
        elif kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
            target = spec["targetRef"]
            pool = only(objects, target["kind"], target["name"])
            check = spec["default"].get("config", {}).get("httpHealthCheck", {})
            ports = {port["number"] for port in pool["spec"]["targetPorts"]}
            assert not check or check["port"] in ports


@pytest.mark.parametrize(
    ("made", "secret"),
    [
        (lambda: kustomized("gateways/base", "pod-monitor"), None),
        (
            lambda: kustomized("gateways/base", "pod-monitor", "metrics-auth"),
            "llama-picker-metrics",
        ),
        (lambda: charted(podMonitor={"create": True}), None),
        (
            lambda: charted(
                config={"listen": {"metricsAuth": "tokenReview"}},
                podMonitor={"create": True, "tokenSecret": "mine"},
            ),
            "mine",
        ),
    ],
)
def test_scrapes_show_a_token_where_pickers_ask_for_one(
    made: Callable[[], list[Object]], secret: str | None
) -> None:
    (scraped,) = only(made(), "PodMonitor")["spec"]["podMetricsEndpoints"]
    shown = {"credentials": {"name": secret, "key": "token"}} if secret else None
    assert scraped.get("authorization") == shown


def test_a_certificate_is_for_the_service_in_any_namespace_by_the_patch_that_is_shown() -> None:
    text = (FOLDER / "options/certificate/kustomization.yaml").read_text()
    _, _, shown = text.partition("#   patches:\n")
    shown, _, _ = shown.partition("apiVersion")
    patches = yaml.safe_load(re.sub("^# {3}", "", shown, flags=re.MULTILINE).replace("MINE", "ai"))
    for namespace, own in (("default", {}), ("ai", {"namespace": "ai", "patches": patches})):
        objects = kustomized("gateways/base", "certificate", own=yaml.safe_dump(own) if own else "")
        service = only(objects, "Service", "llama-picker")["metadata"]
        assert service.get("namespace", "default") == namespace
        names = only(objects, "Certificate")["spec"]["dnsNames"]
        svc = f"{service['name']}.{namespace}.svc"
        assert names == [service["name"], svc, f"{svc}.cluster.local"]


@pytest.mark.parametrize("folder", WORKERS)
def test_the_pool_finds_each_of_the_workers(folder: str) -> None:
    (pod,) = pods_of(kustomized(folder))
    ports = {port["name"]: port["containerPort"] for port in containers(pod["spec"])[-1]["ports"]}
    assert (ports["kv-events"], ports["kv-replay"]) == (5557, 5558)  # where a picker looks
    pool = only(kustomized("gateways/base"), "InferencePool")["spec"]
    assert matches(pool["selector"]["matchLabels"], pod)
    assert [port["number"] for port in pool["targetPorts"]] == [ports["http"]]
