"""Where clients come in: the listener, its filters, its routes, and what Envoy answers itself."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLogFilter,
    AndFilter,
    ComparisonFilter,
    ExtensionFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutation,
    HeaderMutationRemoveOnMatch,
)
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HttpProtocolOptions,
    RuntimeUInt32,
    SubstitutionFormatString,
    TcpKeepalive,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    RetryPolicy,
    RetryPolicyRetryBackOff,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerHcmAccessLogOptions,
    HttpFilter,
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from picker.config import Config
from picker.envoy import lean, standard
from picker.envoy.parts import RETRYABLE, extension, http_filter, set_header, socket
from picker.names import OWNED_PREFIXES, PODS, SERVED_BY
from picker.refusal import Refusal, body_too_large

MAX_HEADERS = 300  # of a client; with those that the picker sets, they stay below pods' limits
_NO_POD = ("UH", "UF", "UC", "UO", "LR", "UR", "URX", "NC", "DF", "UPE")
_TIMED_OUT = ("UT", "SI", "DT", "UMSDR")


def clients(config: Config) -> Listener:
    """Where requests come in that the picker sends on their way."""
    mutations = _removals()
    filters = [standard.ext_proc(config)]
    routes = [_pods_route(config, RETRYABLE if standard.retries_by_route(config) else "")]
    if config.envoy.profile == "lean":
        mutations.append(lean.stream_header())
        filters = [lean.ext_authz(config)]
        if config.usage or lean.may_rewrite(config):
            filters.append(lean.splice_filter())
            routes.insert(0, lean.spliced(routes[0]))
        if config.usage:
            filters.append(lean.usage_filter())
        routes.insert(0, lean.refusal_route())
    http = _http(config, "clients", mutations, filters, routes)
    if config.envoy.profile == "lean":
        http.access_log = [lean.access_log()]
        http.access_log_options = HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=lean.LOG_INTERVAL
        )
    return _listener(config, config.envoy.listen, http)


def baseline(config: Config, port: int) -> Listener:
    """The same pods, round robin, without asking anybody: to compare with."""
    http = _http(config, "baseline", _removals(), [], [_pods_route(config, RETRYABLE)])
    assert http.route_config is not None, "just made"
    http.route_config.response_headers_to_add = [
        set_header(SERVED_BY, "%UPSTREAM_REMOTE_ADDRESS%")  # nobody else knows where it went
    ]
    return _listener(config, port, http)


def _listener(config: Config, port: int, http: HttpConnectionManager) -> Listener:
    return Listener(
        name=http.stat_prefix,
        address=socket(config.envoy.host, port),
        # Bodies are held until the picker has answered.
        per_connection_buffer_limit_bytes=config.max_body,
        tcp_keepalive=TcpKeepalive(keepalive_probes=3, keepalive_time=60, keepalive_interval=20),
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=Any.pack(http),
                    )
                ]
            )
        ],
    )


def _http(
    config: Config,
    name: str,
    mutations: list[HeaderMutation],
    filters: list[HttpFilter],
    routes: list[Route],
) -> HttpConnectionManager:
    return HttpConnectionManager(
        stat_prefix=name,
        common_http_protocol_options=HttpProtocolOptions(max_headers_count=MAX_HEADERS),
        use_remote_address=True,
        preserve_external_request_id=True,
        stream_idle_timeout=timedelta(seconds=config.envoy.idle_timeout),
        request_headers_timeout=timedelta(seconds=30),
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                EarlyHeaderMutation(mutations=mutations),
            )
        ],
        route_config=RouteConfiguration(
            name=name,
            virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=routes)],
            validate_clusters=True,
        ),
        http_filters=[
            *filters,
            http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
        ],
        local_reply_config=LocalReplyConfig(mappers=_local_replies(config)),
    )


def _removals() -> list[HeaderMutation]:
    """A client does not speak for the picker, nor change Envoy's timeouts and retries."""
    return [
        HeaderMutation(
            remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix))
        )
        for prefix in (*OWNED_PREFIXES, "x-envoy-")
    ]


def _pods_route(config: Config, retry_on: str) -> Route:
    retries = RetryPolicy(
        retry_on=retry_on,
        num_retries=config.envoy.retries,
        retry_back_off=RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=50)
        ),
    )
    return Route(
        name="pods",
        match=RouteMatch(prefix="/"),
        route=RouteAction(
            cluster=PODS,
            timeout=timedelta(seconds=config.envoy.timeout),
            idle_timeout=timedelta(seconds=config.envoy.idle_timeout),
            retry_policy=retries,
        ),
    )


def _local_replies(config: Config) -> list[ResponseMapper]:
    """Envoy's own answers, in the shape that clients of model servers read."""
    return [
        _reply(body_too_large(config.max_body), _status(413)),
        _reply(
            Refusal(503, "no_picker", "the endpoint picker does not answer", retry_after=1),
            _details("^ext_(authz|proc)_error"),
        ),
        _reply(
            Refusal(
                503,
                "no_endpoint",
                "no model server could be reached, or each hung up",
                retry_after=1,
            ),
            _and(_status(503), _flags(*_NO_POD)),
        ),
        _reply(
            Refusal(502, "bad_response", "the model server answered something else than HTTP"),
            _status(502),
        ),
        _reply(
            Refusal(504, "timeout", "the model server did not answer in time"),
            _and(_status(504), _flags(*_TIMED_OUT)),
        ),
    ]


def _reply(refusal: Refusal, when: AccessLogFilter) -> ResponseMapper:
    text = refusal.body.decode().replace("%", "%%")
    headers = [set_header(*header) for header in refusal.headers if header[0] != "content-type"]
    return ResponseMapper(
        filter=when,
        headers_to_add=headers,
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=text), content_type="application/json"
        ),
    )


def _status(code: int) -> AccessLogFilter:
    value = RuntimeUInt32(default_value=code, runtime_key="warmpath.local_reply")
    return AccessLogFilter(
        status_code_filter=StatusCodeFilter(comparison=ComparisonFilter(value=value))
    )


def _flags(*flags: str) -> AccessLogFilter:
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags)))


def _details(pattern: str) -> AccessLogFilter:
    expression = ExpressionFilter(expression=f"response.code_details.matches('{pattern}')")
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel", typed_config=Any.pack(expression)
        )
    )


def _and(*filters: AccessLogFilter) -> AccessLogFilter:
    return AccessLogFilter(and_filter=AndFilter(filters=list(filters)))
