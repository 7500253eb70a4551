"""What the manifests tell the picker, the picker understands; and they agree on the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from picker import flow_gauges, metrics
from picker.cli import main
from picker.config import Config, Kubernetes, load
from picker.envoy.binary import find_envoy, why_not
from picker.exposition import Spec
from picker.service import check_config
from tests.manifests.rendered import (
    BUILDS,
    FOLDER,
    OPTIONS,
    WORKERS,
    Object,
    charted,
    container,
    containers,
    each,
    kustomized,
    only,
)
from tests.picker.authority import Authority

PORTS = {"grpc": 7002, "health": 7003, "replica": 7006, "admin": 7090}
CONFIGURED = {
    **{folder: lambda folder=folder: kustomized(folder) for folder in BUILDS},
    **{
        f"options/{option}": lambda option=option: kustomized("gateways/base", option)
        for option in OPTIONS
    },
    "chart": charted,
    "chart, standalone": lambda: charted(mode="standalone"),
    "chart, everything": lambda: charted(
        config={
            "leaderElection": {"enabled": True},
            "listen": {"metricsAuth": "tokenReview", **PORTS},
            "flow": {"enabled": True, "scaleFromZero": "queue"},
            "drain": "10m",
        },
        terminationGracePeriodSeconds=620,
    ),
    "chart, standalone, ports": lambda: charted(
        mode="standalone", config={"listen": PORTS, "envoy": {"listen": 7080}}
    ),
}


@pytest.fixture(params=CONFIGURED)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    made: list[Object] = CONFIGURED[request.param]()
    return made


@pytest.fixture
def mounted(objects: list[Object], tmp_path: Path) -> Path:
    """The picker's ConfigMap and Secret, as its volumes have them."""
    data = only(objects, "ConfigMap")["data"]
    assert list(data) == ["warmpath.yaml"]
    text = data["warmpath.yaml"].replace("/etc/warmpath-replicas/", f"{tmp_path}/")
    (tmp_path / "warmpath.yaml").write_text(text)
    for thing in each(objects, "Secret"):
        for name, value in thing["data"].items():
            (tmp_path / name).write_bytes(b64decode(value))
    return tmp_path


def config_of(directory: Path) -> Config:
    return load(directory / "warmpath.yaml", check_config)


def test_the_picker_takes_its_arguments_and_its_file(objects: list[Object], mounted: Path) -> None:
    picker = container(objects, "picker")
    (folder,) = (
        mount["mountPath"] for mount in picker["volumeMounts"] if mount["name"] == "config"
    )
    arguments = [argument.replace(folder + "/", f"{mounted}/") for argument in picker["args"]]
    for mount in picker["volumeMounts"]:
        if mount["name"] == "tls":
            certificate, key = Authority(mounted).issue()
            arguments = [
                argument.replace(mount["mountPath"], str(mounted)) for argument in arguments
            ]
            certificate.rename(mounted / "tls.crt")  # as a Secret of Kubernetes names them
            key.rename(mounted / "tls.key")
    done = CliRunner().invoke(main, [*arguments, "--check"])
    assert done.exit_code == 0, done.output
    assert "can be used" in done.output


def test_ports_are_where_the_picker_listens(objects: list[Object], mounted: Path) -> None:
    listen = config_of(mounted).listen
    ports = {port["name"]: port["containerPort"] for port in container(objects, "picker")["ports"]}
    told = {name: getattr(listen, name) for name in ("grpc", "health", "replica", "admin")}
    assert ports == told
    assert listen.host == "0.0.0.0"


def test_gateways_get_tls_and_envoy_beside_it_does_not_need_it(
    objects: list[Object], mounted: Path
) -> None:
    config = config_of(mounted)
    alone = [one["name"] for one in containers(deployment(objects)["template"]["spec"])]
    assert config.listen.tls.mode == ("selfSigned" if alone == ["picker"] else "none")
    certified = "tls" in {
        volume["name"] for volume in deployment(objects)["template"]["spec"]["volumes"]
    }
    told = [argument for argument in container(objects, "picker")["args"] if "cert" in argument]
    assert bool(told) is certified


def deployment(objects: list[Object]) -> Object:
    spec: Object = only(objects, "Deployment")["spec"]
    return spec


def test_pickers_find_each_other(objects: list[Object], mounted: Path) -> None:
    service, _, port = config_of(mounted).replicas.service.partition(":")
    spec = only(objects, "Service", service)["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True
    assert [str(one["port"]) for one in spec["ports"]] == [port]
    assert deployment(objects)["replicas"] == 2


def test_the_pool_is_the_one_that_is_applied(objects: list[Object], mounted: Path) -> None:
    config = config_of(mounted)
    pools = [thing for thing in objects if thing["kind"] == "InferencePool"]
    if pools:
        (pool,) = pools
        assert config.pool.kubernetes == Kubernetes(pool=pool["metadata"]["name"])
    else:
        spec = only(kustomized("gateways/base"), "InferencePool")["spec"]
        assert config.pool.kubernetes == Kubernetes(
            selector=spec["selector"]["matchLabels"],
            target_ports=[port["number"] for port in spec["targetPorts"]],
        )


def test_there_is_time_to_drain(objects: list[Object], mounted: Path) -> None:
    config = config_of(mounted)
    pod = deployment(objects)["template"]["spec"]
    sleeps = [
        one["lifecycle"]["preStop"]["sleep"]["seconds"]
        for one in containers(pod)
        if "lifecycle" in one
    ]
    needed = config.drain_delay + config.drain + sum(sleeps)
    assert needed + 10 <= pod["terminationGracePeriodSeconds"]
    assert sleeps or config.drain_delay >= 5  # for a gateway to hear that the picker leaves


def test_one_that_leads_replaces_the_other(objects: list[Object], mounted: Path) -> None:
    """The next one is not ready before the last one is gone, so neither may be waited for."""
    strategy = deployment(objects)["strategy"]
    elects = config_of(mounted).leader_election.enabled or any(
        "leader-election" in argument for argument in container(objects, "picker")["args"]
    )
    budgets = [thing for thing in objects if thing["kind"] == "PodDisruptionBudget"]
    if elects:
        assert strategy == {"type": "Recreate"}
        assert not budgets
    else:
        assert strategy == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        assert [budget["spec"]["maxUnavailable"] for budget in budgets] == [1]


# Standalone: Envoy beside the picker

STANDALONE = {
    "standalone": lambda: kustomized("standalone"),
    "chart, lean": lambda: charted(mode="standalone"),
    "chart, another port": lambda: charted(mode="standalone", config={"envoy": {"listen": 7080}}),
    "chart, standard": lambda: charted(mode="standalone", envoy={"profile": "standard"}),
}


@pytest.mark.parametrize("made", STANDALONE.values(), ids=STANDALONE)
def test_envoy_takes_what_the_pod_makes_for_it(made: Any, tmp_path: Path) -> None:
    objects = made()
    pod = deployment(objects)["template"]["spec"]
    order = [one["name"] for one in pod["initContainers"]]
    assert order == ["configure-envoy", "picker"]
    assert pod["initContainers"][1]["restartPolicy"] == "Always"  # else Envoy never starts
    (tmp_path / "warmpath.yaml").write_text(only(objects, "ConfigMap")["data"]["warmpath.yaml"])
    shell, flag, script = pod["initContainers"][0]["command"]
    script = re.sub("/etc/(warmpath|envoy)/", f"{tmp_path}/", script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([shell, flag, script], check=True, env=os.environ | {"PATH": path})
    (envoy,) = pod["containers"]
    (file,) = (argument for argument in envoy["args"] if argument.endswith(".yaml"))
    written = (tmp_path / Path(file).name).read_text()
    binary = find_envoy()
    assert binary is not None
    bootstrap = yaml.safe_load(written)
    assert why_not(binary, json.dumps(bootstrap)) is None
    (clients,) = bootstrap["static_resources"]["listeners"]
    address = clients["address"]["socket_address"]
    (port,) = envoy["ports"]
    assert address == {"address": "0.0.0.0", "port_value": port["containerPort"]}


# Workers

NOT_OURS = {"workers/vllm"}


@pytest.mark.parametrize("folder", [folder for folder in WORKERS if folder not in NOT_OURS])
def test_workers_take_their_arguments(folder: str) -> None:
    for one in containers(deployment(kustomized(folder))["template"]["spec"]):
        command = main
        words = list(one["args"])
        context = main.make_context("warmpath", [*words], resilient_parsing=True)
        while words and hasattr(command, "get_command"):
            found = command.get_command(context, words.pop(0))
            assert found is not None, one["args"]
            command = found
        context = command.make_context(command.name, words)
        if one["name"] == "worker":
            ports = {port["name"]: port["containerPort"] for port in one["ports"]}
            given = context.params
            assert ports["http"] == given["port"]
            assert ports["kv-events"] == given["kv_events_port"]
            assert ports["kv-replay"] == given["kv_replay_port"]
            assert given["host"] == "0.0.0.0"


# Autoscaling by our metrics

METRICS = {
    spec.name: spec
    for module in (metrics, flow_gauges)
    for found in vars(module).values()
    for spec in (found.values() if isinstance(found, dict) else [found])
    if isinstance(spec, Spec)
}
# Of the Prometheus operator, for each series that comes from a pod.
TARGET_LABELS = {"namespace", "pod"}
SCALED: dict[str, Any] = {"podMonitor": {"create": True}, "autoscaling": {"type": "hpa"}}


def check_query(query: str) -> str:
    """The metric of a query, which must exist, with the labels that are asked for."""
    match = re.fullmatch(r"(?:sum\()?(\w+)\{(.*)\}\)?", query)
    assert match, query
    name, labels = match.groups()
    assert METRICS[name].kind == "gauge"
    asked = set(re.findall(r"(\w+)(?:=~|!=|=)", labels))
    assert asked <= TARGET_LABELS | set(METRICS[name].labels)
    return name


def test_the_adapter_makes_what_the_autoscaler_asks_for() -> None:
    rules = yaml.safe_load((FOLDER / "options/hpa/prometheus-adapter.yaml").read_text())
    made = {}
    for rule in rules["rules"]["external"]:
        name = check_query(rule["seriesQuery"])
        assert name in rule["metricsQuery"]
        made[rule["name"]["as"]] = name
    for scaler in (kustomized("gateways/base", "hpa"), charted(autoscaling={"type": "hpa"})):
        spec = only(scaler, "HorizontalPodAutoscaler")["spec"]
        asked = [metric["external"]["metric"]["name"] for metric in spec["metrics"]]
        assert asked == list(made)
    assert set(made.values()) == {
        "inference_objective_running_requests",
        "warmpath_flow_waiting_requests",
    }


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: kustomized("gateways/base", "pod-monitor", "hpa"), "llama"),
        (lambda: charted(**SCALED), "llama"),
        (lambda: charted("qwen", **SCALED), "qwen"),
    ],
)
def test_the_autoscaler_asks_for_the_requests_of_its_own_pool(made: Any, name: str) -> None:
    objects = made()
    labels = deployment(objects)["template"]["metadata"]["labels"]
    kept = only(objects, "PodMonitor")["spec"]["podTargetLabels"]
    series = {re.sub(r"\W", "_", label): labels[label] for label in kept}  # as Prometheus names it
    for metric in only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]:
        selector = metric["external"]["metric"]["selector"]["matchLabels"]
        assert selector.items() <= series.items()
        assert name in selector.values()


@pytest.mark.parametrize(
    "made",
    [
        lambda: kustomized("gateways/base", "keda"),
        lambda: charted(autoscaling={"type": "keda", "minReplicas": 0}),
    ],
    ids=["options/keda", "chart"],
)
def test_keda_asks_for_metrics_that_there_are(made: Any) -> None:
    objects = made()
    name = only(objects, "Deployment")["metadata"]["name"]
    spec = only(objects, "ScaledObject")["spec"]
    for trigger in spec["triggers"]:
        query = trigger["metadata"]["query"]
        check_query(query)
        assert f'pod=~"{name}-.*"' in query
    workers = only(kustomized("workers/simulated"), "Deployment")
    assert spec["scaleTargetRef"]["name"] == workers["metadata"]["name"]
