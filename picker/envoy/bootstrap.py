"""All of Envoy's configuration."""

from __future__ import annotations

import json
from typing import Any as Json

import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Node
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.google.protobuf import Any

from picker.config import Config
from picker.envoy import clusters, listener, tls
from picker.envoy.parts import as_dict, socket

ADMIN_HOST = "127.0.0.1"
MAX_CLIENTS = 50_000  # connections


def bootstrap(
    config: Config, *, discover: bool = False, baseline_port: int | None = None
) -> dict[str, Json]:
    """Envoy's bootstrap for the profile of `config.envoy`, as JSON.

    Args:
        discover: the picker tells Envoy the endpoints, also when they change; else they are those
            of `config.pool`, for good.
        baseline_port: serve the same pods there too, round robin, to compare with.

    Raises:
        ValueError: a port of the picker is 0, an endpoint is no IP address with a port, or the
            picker's certificate cannot be used.
    """
    lean = config.envoy.profile == "lean"
    for name in ("grpc", "http") if lean else ("grpc",):
        if not getattr(config.listen, name) and not config.envoy.pickers:
            raise ValueError(f"listen.{name} is 0: Envoy must know the picker's port")
    addresses = None if discover else [spec.address for spec in config.pool.endpoints]
    upstreams = [
        clusters.pods(addresses, tell_served=not lean),
        clusters.picker_grpc(config, tls.to_picker(config)),
    ]
    if lean:
        upstreams.append(clusters.picker_http(config))
    listeners = [listener.clients(config)]
    if baseline_port is not None:
        listeners.append(listener.baseline(config, baseline_port))
    whole = Bootstrap(
        node=Node(id=f"warmpath-{config.pool.name}", cluster="warmpath"),
        admin=Admin(address=socket(ADMIN_HOST, config.envoy.admin), ignore_global_conn_limit=True),
        overload_manager=OverloadManager(resource_monitors=[_connections()]),
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=upstreams),
    )
    return as_dict(whole)


def _connections() -> ResourceMonitor:
    """A bound on clients' connections: each may hold a body."""
    return ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections",
        typed_config=Any.pack(
            DownstreamConnectionsConfig(max_active_downstream_connections=MAX_CLIENTS)
        ),
    )


def as_json(bootstrap: dict[str, Json]) -> str:
    return json.dumps(bootstrap, indent=2) + "\n"


def as_yaml(bootstrap: dict[str, Json]) -> str:
    return yaml.dump(bootstrap, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines, such as a script, as it is read."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
