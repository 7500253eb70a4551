"""Envoys that a benchmark configures itself, as plain dictionaries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from picker.up.cluster import find_envoy
from picker.up.processes import Child

HOST = "127.0.0.1"
MAX_BODY = 8 << 20
FILTERS = "type.googleapis.com/envoy.extensions.filters."


def envoy(name: str, config: dict[str, Any], folder: Path, admin: int) -> Child:
    """An Envoy on one thread with this configuration, whose admin page is on port `admin`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    flags = ("--concurrency", "1", "--log-level", "error", "--disable-hot-restart")
    return Child(
        name=name,
        command=[find_envoy(), "-c", str(path), *flags],
        log=folder / f"{name}.log",
        ready_url=f"http://{HOST}:{admin}/ready",
    )


def plain(addresses: Sequence[str], port: int, admin: int) -> dict[str, Any]:
    """Nothing but a router and round robin over the addresses: the baseline."""
    endpoints = []
    for pod in addresses:
        host, _, pod_port = pod.rpartition(":")
        endpoints.append({"endpoint": {"address": address(int(pod_port), host)}})
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 1 << 30)
    cluster = {
        "name": "pods",
        "type": "STATIC",
        "connect_timeout": "1s",
        "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "pods", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "3600s"}}
    return {
        "admin": {"address": address(admin)},
        "static_resources": {"listeners": [listener(port, [route])], "clusters": [cluster]},
    }


def listener(
    port: int, routes: Sequence[dict[str, Any]], filters: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """HTTP on a port, with filters before the router."""
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": FILTERS + "http.router.v3.Router"},
    }
    manager = {
        "@type": FILTERS + "network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "route_config": {
            "max_direct_response_body_size_bytes": 1 << 20,
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": list(routes)}],
        },
        "http_filters": [*filters, router],
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "address": address(port),
        "per_connection_buffer_limit_bytes": MAX_BODY,
        "filter_chains": [{"filters": [chain]}],
    }


def address(port: int, host: str = HOST) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
