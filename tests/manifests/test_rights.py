"""The rights that pickers are given: all that they ask Kubernetes for, and nothing else."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker.config import parse
from picker.service import Service
from tests.kubernetes_api import KubernetesApi, kubeconfig, running_kubernetes
from tests.manifests.rendered import NAMESPACE, Object, charted, each, kustomized, only

Right = tuple[str, str]  # a verb, and plural.group
SECONDS = 30.0  # until a picker has asked for all, on a busy machine


def granted(objects: list[Object], kind: str = "Role") -> set[Right]:
    """What the one ServiceAccount may do."""
    account = only(objects, "ServiceAccount")["metadata"]["name"]
    rights: set[Right] = set()
    for binding in each(objects, f"{kind}Binding"):
        (subject,) = binding["subjects"]
        assert subject["name"] == account
        for rule in only(objects, kind, binding["roleRef"]["name"])["rules"]:
            for group, plural, verb in product(rule["apiGroups"], rule["resources"], rule["verbs"]):
                rights.add((verb, f"{plural}.{group}" if group else plural))
    return rights


async def asked(objects: list[Object], folder: Path, pool: dict[str, Any]) -> set[Right]:
    """What a picker asks for, that is configured as its ConfigMap says.

    Args:
        pool: changes in pool.kubernetes.
    """
    data = yaml.safe_load(only(objects, "ConfigMap")["data"]["warmpath.yaml"])
    data["listen"] = dict.fromkeys(("grpc", "http", "health", "admin", "quota", "replica"), 0)
    data["flow"] = {"enabled": True}  # else objectives tell nothing, and are not asked for
    data["replicas"] = {}
    async with running_kubernetes() as api:
        for thing in objects:
            if thing["kind"] in ("InferencePool", "InferenceObjective"):
                about = {**thing["metadata"], "namespace": NAMESPACE}
                api.apply({**thing, "metadata": about})
        data["pool"]["kubernetes"] |= {"kubeconfig": str(kubeconfig(api, folder)), **pool}
        service = Service(parse(yaml.safe_dump(data)))
        try:
            await service.start()
            async with asyncio.timeout(SECONDS):
                if "group" not in pool:  # whose pool is not there
                    await service.until_ready()
                await watched(api, data["pool"]["kubernetes"])
                if data.get("leaderElection"):
                    await api.asked("create", "leases.coordination.k8s.io")
        finally:
            await service.stop()
        return {(verb, name) for verb, name, _ in api.requests}


async def watched(api: KubernetesApi, pool: dict[str, Any]) -> None:
    """Until all is followed that can be."""
    if "group" in pool:  # the older group's pool, which is not there
        await api.asked("watch", f"inferencepools.{pool['group']}")
    else:
        await api.asked("watch", "pods")
    if "pool" in pool:
        for plural in ("inferenceobjectives", "inferencemodelrewrites"):
            for group in ("inference.networking.x-k8s.io", "llm-d.ai"):
                await api.asked("watch", f"{plural}.{group}")


@pytest.mark.parametrize("made", [lambda: kustomized("gateways/base"), charted])
async def test_behind_a_gateway(made: Any, tmp_path: Path) -> None:
    objects = made()
    usual = await asked(objects, tmp_path, {})
    older = await asked(objects, tmp_path, {"group": "inference.networking.x-k8s.io"})
    assert granted(objects) == usual | older
    assert not granted(objects, "ClusterRole")


@pytest.mark.parametrize(
    "made", [lambda: kustomized("standalone"), lambda: charted(mode="standalone")]
)
async def test_standalone(made: Any, tmp_path: Path) -> None:
    objects = made()
    assert granted(objects) == await asked(objects, tmp_path, {})
    assert not granted(objects, "ClusterRole")


LEASES = {(verb, "leases.coordination.k8s.io") for verb in ("get", "create", "update")}


async def test_with_a_leader(tmp_path: Path) -> None:
    objects = charted(config={"leaderElection": {"enabled": True}})
    found = await asked(objects, tmp_path, {})
    assert found <= granted(objects)
    assert found & LEASES >= {(verb, "leases.coordination.k8s.io") for verb in ("get", "create")}


REVIEWS = {
    ("create", "tokenreviews.authentication.k8s.io"),
    ("create", "subjectaccessreviews.authorization.k8s.io"),
}


@pytest.mark.parametrize(
    ("made", "more", "of_the_cluster"),
    [
        (lambda: kustomized("gateways/base", "leader-election"), LEASES, set()),
        (lambda: charted(config={"leaderElection": {"enabled": True}}), LEASES, set()),
        (lambda: kustomized("gateways/base", "metrics-auth"), set(), REVIEWS),
        (lambda: charted(config={"listen": {"metricsAuth": "tokenReview"}}), set(), REVIEWS),
    ],
)
def test_more_rights_come_with_what_needs_them(
    made: Any, more: set[Right], of_the_cluster: set[Right]
) -> None:
    objects = made()
    assert granted(objects) == granted(charted()) | more
    assert granted(objects, "ClusterRole") == of_the_cluster
