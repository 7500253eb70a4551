"""Whatever happens in a cluster and to its API server, the endpoints come out as they should."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from picker.pool import Endpoint
from tests.kubernetes_api import KubernetesApi, running_kubernetes
from tests.kubernetes_objects import POOL_GROUP, Object, inference_pool, pod
from tests.picker.kubernetes.following import Followed, following

ACTIVE = "inference.networking.k8s.io/active-ports"
POOLS = f"inferencepools.{POOL_GROUP}"
NAMES = ("a", "b", "c", "d")
GROUPS = ("llm", "other")
PORTS = (8000, 8001, 8002)

pods = st.builds(
    dict,
    op=st.just("pod"),
    name=st.sampled_from(NAMES),
    ip=st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", ""]),
    group=st.sampled_from(GROUPS),
    ready=st.sampled_from([True, True, True, False]),
    phase=st.sampled_from(["Running", "Running", "Running", "Pending", "Succeeded", "Failed"]),
    leaving=st.sampled_from([False, False, False, True]),
    active=st.sampled_from([None, None, None, "", "8001", "8000,8002", "x,,8000"]),
    anew=st.booleans(),  # another pod of this name
)
pools = st.builds(
    dict,
    op=st.just("pool"),
    group=st.sampled_from(GROUPS),
    ports=st.lists(st.sampled_from(PORTS), min_size=1, max_size=3, unique=True),
)
others = st.sampled_from(
    [
        {"op": "delete", "name": "a"},
        {"op": "delete", "name": "b"},
        {"op": "delete pool"},
        {"op": "compact"},
        {"op": "cut", "after": b""},
        {"op": "cut", "after": b'{"type": "DELETED", "object": {"metad'},
        {"op": "garbage", "line": b'{"type": "ADDED", "object": {"metadata": null}}\n'},
        {"op": "garbage", "line": b"\x00\n"},
        {"op": "hold"},
        {"op": "bookmark"},
        {"op": "fail", "kind": "pods", "codes": [500, 503]},
        {"op": "fail", "kind": POOLS, "codes": [429]},
        {"op": "gone as", "what": "event"},
        {"op": "gone as", "what": "status"},
        {"op": "forbid"},
        {"op": "rest"},  # until all that was done is known
    ]
)
scripts = st.lists(pods | pods | pools | others, min_size=1, max_size=25)


@dataclass
class Cluster:
    """What the script has made, kept apart from the API server."""

    api: KubernetesApi
    pods: dict[str, Object] = field(default_factory=dict)  # as the server stored them
    pool: dict[str, Any] | None = None

    def do(self, step: dict[str, Any]) -> None:
        api, op = self.api, step["op"]
        if op == "pod":
            self._pod(step)
        elif op == "pool":
            self.pool = step
            api.apply(inference_pool(labels={"app": step["group"]}, ports=step["ports"]))
        elif op == "delete" and step["name"] in self.pods:
            api.delete(self.pods.pop(step["name"]))
        elif op == "delete pool" and self.pool is not None:
            api.delete(inference_pool())
            self.pool = None
        elif op == "compact":
            api.compact()
        elif op == "cut":
            api.cut(step["after"])
        elif op == "garbage":
            api.send(step["line"], "pods")
            api.send(step["line"], POOLS)
        elif op == "hold":
            api.hold()
        elif op == "bookmark":
            api.bookmark()
        elif op == "fail":
            api.fail(step["kind"], *step["codes"])
        elif op == "gone as":
            api.gone_as = step["what"]
        elif op == "forbid":
            api.forbid("watch", "pods")

    def _pod(self, step: dict[str, Any]) -> None:
        name = step["name"]
        if step["anew"] and name in self.pods:
            self.api.delete(self.pods.pop(name))
        self.pods[name] = self.api.apply(
            pod(
                name,
                step["ip"],
                {"app": step["group"]},
                ready=step["ready"],
                phase=step["phase"],
                annotations=None if step["active"] is None else {ACTIVE: step["active"]},
                **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if step["leaving"] else {}),
            )
        )

    def make_well(self) -> None:
        """Nothing goes wrong any more."""
        self.api.permit("watch", "pods")
        self.api.release()

    def expected(self) -> dict[str, tuple[str, str]]:
        """Name and uid by address, by the rules as the protocol has them."""
        found: dict[str, tuple[str, str]] = {}
        if self.pool is None:
            return found
        by_age = sorted(self.pods.values(), key=lambda each: each["metadata"]["creationTimestamp"])
        for each in by_age:
            about, status = each["metadata"], each["status"]
            serves = (
                about["labels"]["app"] == self.pool["group"]
                and "deletionTimestamp" not in about
                and status["phase"] not in ("Succeeded", "Failed")
                and {"type": "Ready", "status": "True"} in status["conditions"]
                and "podIP" in status
            )
            active = about.get("annotations", {}).get(ACTIVE)
            for rank, port in enumerate(self.pool["ports"]):
                if serves and (active is None or str(port) in active.split(",")):
                    ip = status["podIP"]
                    host = f"[{ip}]" if ":" in ip else ip
                    found[f"{host}:{port}"] = f"{about['name']}-rank-{rank}", about["uid"]
        return found


class Witness:
    """Sees each change of the pool."""

    def __init__(self, followed: Followed) -> None:
        self._pool = followed.pool
        self.problems: list[str] = []
        followed.pool.listen(self)

    def added(self, endpoint: Endpoint) -> None:
        self._look()

    def removed(self, endpoint: Endpoint) -> None:
        self._look()

    def _look(self) -> None:
        groups = {each.labels["app"] for each in self._pool.endpoints.values()}
        if len(groups) > 1:
            self.problems.append(f"pods of {groups} are mixed: {list(self._pool.endpoints)}")


def state(followed: Followed) -> dict[str, tuple[str, str]]:
    return {
        address: (each.name, each.incarnation) for address, each in followed.pool.endpoints.items()
    }


async def play(script: list[dict[str, Any]]) -> None:
    async with running_kubernetes() as api:
        cluster = Cluster(api)
        cluster.do({"op": "pool", "group": "llm", "ports": [8000]})
        async with following(api) as followed:
            witness = Witness(followed)
            for step in [*script, {"op": "rest"}]:
                if step["op"] == "rest":
                    cluster.make_well()
                    expected = cluster.expected()
                    await followed.until(lambda: state(followed) == expected)  # noqa: B023
                else:
                    cluster.do(step)
                    await asyncio.sleep(0)
            assert witness.problems == []


@settings(deadline=None, max_examples=60)
@given(scripts)
def test_a_script_of_cluster_events_ends_in_exactly_the_expected_endpoints(script):
    asyncio.run(play(script))
