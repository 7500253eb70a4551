"""Whom Envoy sends to: the pods of the pool, and the picker, or several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    HealthCheckHttpHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    KeepaliveSettings,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
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
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from picker.config import Config, PickerAddress
from picker.envoy.parts import NO_LIMIT, RETRYABLE, extension, socket
from picker.names import DESTINATION, EXT_PROC, LB_NAMESPACE, PODS, READY_PATH, SERVED
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


def pickers(config: Config) -> Sequence[PickerAddress]:
    """Where Envoy reaches them."""
    listen = config.listen
    return config.envoy.pickers or [
        PickerAddress(host=listen.host, grpc=listen.grpc, http=listen.http)
    ]


def several_pickers(config: Config) -> bool:
    """Whether there may be another picker to ask: also behind a name."""
    known = pickers(config)
    return len(known) > 1 or not _is_ip(known[0].host)


def picker_grpc(config: Config, transport: TransportSocket | None = None) -> Cluster:
    """The picker's gRPC port.

    A process that stands still, or is cut off, is noticed by its missing pings, and its streams
    end. One whose event loop hangs answers pings all the same: gRPC's own threads do. So its health
    is asked, too, where that matters, and no stream is opened to a picker that hangs or drains.

    Args:
        transport: of its connections, health checks included; None: plain TCP.
    """
    http2 = Http2ProtocolOptions(
        connection_keepalive=KeepaliveSettings(
            interval=timedelta(seconds=2), timeout=timedelta(seconds=3)
        )
    )
    protocol = HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
    cluster = _at(
        _cluster(PICKER_GRPC, protocol), [(each.host, each.grpc) for each in pickers(config)]
    )
    cluster.transport_socket = transport
    if config.envoy.profile == "standard" or several_pickers(config):
        _watch(cluster)
        cluster.health_checks[0].grpc_health_check = HealthCheckGrpcHealthCheck(
            service_name=EXT_PROC
        )
    if several_pickers(config):
        cluster.outlier_detection = _dead_pickers()
    return cluster


def picker_http(config: Config) -> Cluster:
    """The picker's HTTP port, of the lean profile."""
    protocol = HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions())
    cluster = _at(
        _cluster(PICKER_HTTP, protocol), [(each.host, each.http) for each in pickers(config)]
    )
    if several_pickers(config):
        _watch(cluster)
        cluster.health_checks[0].http_health_check = HealthCheckHttpHealthCheck(path=READY_PATH)
        cluster.outlier_detection = _dead_pickers()
    return cluster


def another_picker(config: Config, patience: timedelta) -> RetryPolicy | None:
    """Asks another picker when one is gone; None where there is no other.

    `patience`: that one may take to answer. Envoy 1.40 takes the longest pause between two tries
    for that, too.
    """
    if not several_pickers(config):
        return None
    previous = RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=Any.pack(PreviousHostsPredicate()),
    )
    return RetryPolicy(
        retry_on=RETRYABLE,
        num_retries=max(1, len(pickers(config)) - 1),
        retry_back_off=BackoffStrategy(
            base_interval=timedelta(milliseconds=5), max_interval=patience
        ),
        retry_host_predicate=[previous],
        host_selection_retry_max_attempts=3,
    )


def _watch(cluster: Cluster) -> None:
    """Notice a picker that hangs within four seconds, and one that is back within half of one."""
    second, soon = timedelta(seconds=1), timedelta(milliseconds=250)
    cluster.health_checks = [
        HealthCheck(
            interval=second,
            unhealthy_interval=soon,
            no_traffic_interval=soon,
            timeout=second,
            unhealthy_threshold=2,
            healthy_threshold=1,
        )
    ]
    # Without it, Envoy would ask an unhealthy picker where there is no other.
    cluster.common_lb_config = ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0))


def _dead_pickers() -> OutlierDetection:
    """Pass over a picker that cannot be reached, before its health is asked again."""
    return _pass_over(1, timedelta(seconds=1), timedelta(seconds=2), timedelta(milliseconds=500))


def _pass_over(
    failures: int, first: timedelta, longest: timedelta, interval: timedelta
) -> OutlierDetection:
    """What cannot be reached so many times in a row, for so long; what is answered never counts."""
    return OutlierDetection(
        interval=interval,
        base_ejection_time=first,
        max_ejection_time=longest,
        max_ejection_percent=50,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=failures,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_consecutive_5xx=0,
        enforcing_consecutive_gateway_failure=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
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


def _at(cluster: Cluster, addresses: Iterable[tuple[str, int]]) -> Cluster:
    cluster.type, found = ClusterDiscoveryType.STATIC, []
    for host, port in addresses:
        if not _is_ip(host):
            cluster.type = ClusterDiscoveryType.STRICT_DNS
        elif (address := ip_address(host.strip("[]"))).is_unspecified:
            host = "::1" if address.version == 6 else "127.0.0.1"  # everywhere, so also here
        found.append((host, port))
    cluster.load_assignment = _assignment(cluster.name, found)
    return cluster


def _is_ip(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


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

    With prefix routing one pod sees one client's prompts, so that client's errors must not close
    the pod to others.
    """
    return _pass_over(3, timedelta(seconds=2), timedelta(seconds=20), timedelta(seconds=1))
