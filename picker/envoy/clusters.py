"""Whom Envoy sends to: the pods of the pool, and the picker."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from ipaddress import ip_address

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    ConfigSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    KeepaliveSettings,
    RetryPolicy,
    TcpKeepalive,
    TransportSocket,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.core.v3 import (
    HttpProtocolOptions as CommonHttpProtocolOptions,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from picker.envoy.parts import NO_LIMIT, extension, socket
from picker.names import DESTINATION, EXT_PROC, LB_NAMESPACE, PODS, SERVED
from picker.pool import parse_address

PICKER_GRPC = "picker-grpc"
PICKER_HTTP = "picker-http"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# Shorter than the 5 s after which vLLM's server closes an idle connection: a request that
# meets that closing is lost.
_POD_IDLE = timedelta(seconds=4)


def pods(endpoints: Iterable[str] | None, *, tell_served: bool) -> Cluster:
    """The pool: the picker's choice, and round robin where there is none.

    Args:
        endpoints: "ip:port" each; None: those that the picker tells, now and at each change.
        tell_served: put the endpoint that serves into dynamic metadata, where ext_proc finds it.
    """
    protocol = HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions())
    cluster = _cluster(PODS, protocol, idle=_POD_IDLE)
    cluster.load_balancing_policy = _picked_host(tell_served)
    cluster.outlier_detection = _outliers()
    if endpoints is None:
        cluster.type = ClusterDiscoveryType.EDS
        cluster.eds_cluster_config = ClusterEdsClusterConfig(eds_config=_told_by_picker())
    else:
        cluster.type = ClusterDiscoveryType.STATIC
        cluster.load_assignment = _assignment(PODS, map(parse_address, endpoints))
    return cluster


def picker_grpc(
    host: str, port: int, *, watched: bool, transport: TransportSocket | None = None
) -> Cluster:
    """The picker's gRPC port.

    A process that stands still, or is cut off, is noticed by its missing pings, and its streams
    end. One whose event loop hangs answers pings all the same: gRPC's own threads do.

    Args:
        watched: ask its health, too, and open no stream to a picker that hangs or drains.
        transport: of its connections, health checks included; None: plain TCP.
    """
    http2 = Http2ProtocolOptions(
        connection_keepalive=KeepaliveSettings(
            interval=timedelta(seconds=2), timeout=timedelta(seconds=3)
        )
    )
    protocol = HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
    cluster = _at(_cluster(PICKER_GRPC, protocol), host, port)
    cluster.transport_socket = transport
    if watched:
        cluster.health_checks = [_health_check()]
        # Without it, Envoy would ask an unhealthy picker where there is no other.
        cluster.common_lb_config = ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0))
    return cluster


def picker_http(host: str, port: int) -> Cluster:
    """The picker's HTTP port, of the lean profile."""
    protocol = HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions())
    return _at(_cluster(PICKER_HTTP, protocol), host, port)


def _health_check() -> HealthCheck:
    """Notices a picker that hangs within four seconds, and one that is back within half of one."""
    second, soon = timedelta(seconds=1), timedelta(milliseconds=250)
    return HealthCheck(
        interval=second,
        unhealthy_interval=soon,
        no_traffic_interval=soon,
        timeout=second,
        unhealthy_threshold=2,
        healthy_threshold=1,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name=EXT_PROC),
    )


def _cluster(
    name: str,
    protocol: HttpProtocolOptionsExplicitHttpConfig,
    idle: timedelta | None = None,
) -> Cluster:
    options = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpProtocolOptions(idle_timeout=idle),
        explicit_http_config=protocol,
    )
    limits = CircuitBreakersThresholds(
        max_connections=NO_LIMIT,
        max_pending_requests=NO_LIMIT,
        max_requests=NO_LIMIT,
        max_retries=NO_LIMIT,
    )
    keepalive = TcpKeepalive(keepalive_probes=3, keepalive_time=30, keepalive_interval=10)
    return Cluster(
        name=name,
        connect_timeout=timedelta(seconds=1),
        circuit_breakers=CircuitBreakers(thresholds=[limits]),
        typed_extension_protocol_options={_HTTP_OPTIONS: Any.pack(options)},
        upstream_connection_options=UpstreamConnectionOptions(tcp_keepalive=keepalive),
    )


def _at(cluster: Cluster, host: str, port: int) -> Cluster:
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        cluster.type = ClusterDiscoveryType.STRICT_DNS
    else:
        cluster.type = ClusterDiscoveryType.STATIC
        if address.is_unspecified:  # listens everywhere, so also here
            host = "::1" if address.version == 6 else "127.0.0.1"
    cluster.load_assignment = _assignment(cluster.name, [(host, port)])
    return cluster


def _assignment(cluster: str, addresses: Iterable[tuple[str, int]]) -> ClusterLoadAssignment:
    endpoints = [
        LbEndpoint(endpoint=Endpoint(address=socket(host, port))) for host, port in addresses
    ]
    return ClusterLoadAssignment(
        cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)]
    )


def _told_by_picker() -> ConfigSource:
    back_off = BackoffStrategy(
        base_interval=timedelta(milliseconds=500), max_interval=timedelta(seconds=2)
    )
    grpc = GrpcServiceEnvoyGrpc(
        cluster_name=PICKER_GRPC, retry_policy=RetryPolicy(retry_back_off=back_off)
    )
    return ConfigSource(
        api_config_source=ApiConfigSource(
            api_type=ApiConfigSourceApiType.GRPC,
            transport_api_version=ApiVersion.V3,
            grpc_services=[GrpcService(envoy_grpc=grpc)],
        ),
        resource_api_version=ApiVersion.V3,
        initial_fetch_timeout=timedelta(seconds=5),  # then Envoy starts without endpoints
    )


def _picked_host(tell_served: bool) -> LoadBalancingPolicy:
    """The first endpoint of the header, for each retry the next; behind them round robin."""
    override = OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(header=DESTINATION),
            OverrideHostOverrideHostSource(metadata=_lb_key(DESTINATION)),
        ],
        selected_host_key=_lb_key(SERVED) if tell_served else None,
        fallback_policy=_policy(
            extension("envoy.load_balancing_policies.round_robin", RoundRobin())
        ),
    )
    return _policy(extension("envoy.load_balancing_policies.override_host", override))


def _policy(config: TypedExtensionConfig) -> LoadBalancingPolicy:
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=config)])


def _lb_key(key: str) -> MetadataKey:
    return MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=key)])


def _outliers() -> OutlierDetection:
    """Pass over a pod that cannot be reached, for a few seconds.

    Only failures to connect count. What a pod answers does not: with prefix routing one pod sees
    one client's prompts, so that client's errors must not close the pod to others.
    """
    return OutlierDetection(
        interval=timedelta(seconds=1),
        base_ejection_time=timedelta(seconds=2),
        max_ejection_time=timedelta(seconds=20),
        max_ejection_percent=50,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=3,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_consecutive_5xx=0,
        enforcing_consecutive_gateway_failure=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
    )
