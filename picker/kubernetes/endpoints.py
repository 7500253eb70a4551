"""Pods as endpoints: which of them may serve, at which ports, and why others may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from picker.config import EndpointSpec, Events, EventSource
from picker.kubernetes.objects import MAX_PORTS, InferencePool, Pod, XInferencePool
from picker.pool import MAX_ENDPOINTS, parse_address

MAX_LABELS = 64  # of a pod, that filters and scorers see
MAX_ACTIVE_PORTS = 1024  # characters of the annotation that are read


class Group(NamedTuple):
    """Which pods, and which of their ports."""

    labels: Mapping[str, str]
    ports: tuple[int, ...]  # each is an endpoint; the first is rank 0
    protocol: str = "http"


@dataclass(slots=True)
class Found:
    """What pods come to."""

    specs: list[EndpointSpec] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)  # why, by the pod's name


def group_of(pool: InferencePool | XInferencePool) -> Group:
    """What an InferencePool selects: its ports once each, those that can be."""
    ports = dict.fromkeys(port for port in pool.ports if 0 < port < 65536)
    return Group(pool.labels, tuple(ports)[:MAX_PORTS], pool.protocol)


class Endpoints:
    """Makes endpoints of pods. Pods that have not changed are not looked at again."""

    def __init__(self, events: Events | None) -> None:
        """`events`: the usual ports of KV events, where these are followed."""
        self._events = events
        self._ports: tuple[int, ...] = ()
        self._known: dict[str, tuple[Pod, list[EndpointSpec], str]] = {}

    def of(self, pods: Mapping[str, Pod], ports: tuple[int, ...]) -> Found:
        """The endpoints of pods by name.

        Of two pods at one address the newer has it: the older one's IP was given away. Of more than
        MAX_ENDPOINTS those are left out whose pods' names come last.
        """
        known = self._known if ports == self._ports else {}
        now: dict[str, tuple[Pod, list[EndpointSpec], str]] = {}
        for name, pod in pods.items():
            before = known.get(name)
            now[name] = before if before and before[0] is pod else (pod, *self._read(pod, ports))
        self._known, self._ports = now, ports
        return _without_conflicts(now)

    def _read(self, pod: Pod, ports: tuple[int, ...]) -> tuple[list[EndpointSpec], str]:
        """A pod's endpoints, and why there are none."""
        if why := why_unused(pod):
            return [], why
        about, ip = pod.metadata, pod.status.pod_ip
        labels = dict(sorted((about.labels or {}).items())[:MAX_LABELS])
        annotation = None if about.annotations is None else about.annotations.active_ports
        active = ports if annotation is None else active_ports(annotation, ports)
        specs = [
            EndpointSpec(
                address=_address(ip, port),
                name=f"{about.name}-rank-{rank}",
                labels=labels,
                events=self._sources(ip, rank, len(ports)),
                incarnation=about.uid,
            )
            for rank, port in enumerate(ports)
            if port in active
        ]
        return specs, "" if specs else "its annotation active-ports names no port of the pool"

    def _sources(self, ip: str, rank: int, ranks: int) -> list[EventSource]:
        """Where a rank publishes its KV events; empty: the pod is asked, it has but one.

        As vLLM does, each rank adds its number to both ports. Where that makes a rank's replay
        port another one's port of events, no rank has a replay.
        """
        if self._events is None or ranks < 2:
            return []
        port, replay = self._events.port, self._events.replay_port
        if port + ranks > 65535 or replay + ranks > 65535:
            return []
        has_replay = replay and abs(replay - port) >= ranks
        return [
            EventSource(
                address=f"tcp://{_address(ip, port + rank)}",
                replay=f"tcp://{_address(ip, replay + rank)}" if has_replay else "",
            )
        ]


def why_unused(pod: Pod) -> str:
    """Why a pod may not serve; empty: it may."""
    status = pod.status
    if pod.metadata.deletion_timestamp is not None:
        return "it is being deleted"
    if status.phase in ("Succeeded", "Failed"):
        return f"its phase is {status.phase}"
    if not status.pod_ip:
        return "it has no IP yet"
    try:
        parse_address(_address(status.pod_ip, 1))
    except ValueError:
        return f"its IP cannot be one: {status.pod_ip[:64]!r}"
    ready = (each.status for each in status.conditions or () if each.type == "Ready")
    return "" if next(ready, "") == "True" else "it is not ready"


def active_ports(annotation: str, ports: Sequence[int]) -> set[int]:
    """Those of a pool's ports that the annotation `active-ports` of a pod names: "8000,8002"."""
    named = set(annotation[:MAX_ACTIVE_PORTS].replace(" ", "").split(","))
    return {port for port in ports if str(port) in named}


def _without_conflicts(pods: Mapping[str, tuple[Pod, list[EndpointSpec], str]]) -> Found:
    owners: dict[str, Pod] = {}
    for pod, specs, _ in pods.values():
        for spec in specs:
            other = owners.setdefault(spec.address, pod)
            if other is not pod and _age(pod) > _age(other):
                owners[spec.address] = pod
    found = Found()
    for name in sorted(pods):
        pod, specs, why = pods[name]
        own = [spec for spec in specs if owners[spec.address] is pod]
        if specs and not own:
            why = f"{specs[0].address} is another pod's: {owners[specs[0].address].metadata.name}"
        if own and len(found.specs) + len(own) > MAX_ENDPOINTS:
            own, why = [], f"a pool has at most {MAX_ENDPOINTS} endpoints"
        found.specs += own
        if why:
            found.unused[name] = why
    return found


def _age(pod: Pod) -> tuple[str, str]:
    return pod.metadata.creation_timestamp or "", pod.metadata.uid


def _address(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
