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
from picker.envoy.names import OWNED_PREFIXES, PODS
from picker.envoy.parts import extension, http_filter, set_header, socket
from picker.refusal import Refusal

# By these a client could change Envoy's timeouts and retries.
_ENVOY_PREFIX = "x-envoy-"
_RETRY_ON = "connect-failure,refused-stream,reset-before-request"
_NO_POD = ("UH", "UF", "UC", "UO", "LR", "UR", "URX", "NC", "DF", "UPE")
_TIMED_OUT = ("UT", "SI", "DT", "UMSDR")


def listener(config: Config) -> Listener:
    return Listener(
        name="clients",
        address=socket(config.envoy.host, config.envoy.listen),
        # Bodies are held until the picker has answered.
        per_connection_buffer_limit_bytes=config.max_body,
        tcp_keepalive=TcpKeepalive(keepalive_probes=3, keepalive_time=60, keepalive_interval=20),
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=Any.pack(_http(config)),
                    )
                ]
            )
        ],
    )


def _http(config: Config) -> HttpConnectionManager:
    http = HttpConnectionManager(
        stat_prefix="clients",
        use_remote_address=True,
        preserve_external_request_id=True,
        stream_idle_timeout=timedelta(seconds=config.envoy.idle_timeout),
        request_headers_timeout=timedelta(seconds=30),
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                EarlyHeaderMutation(mutations=_early_mutations(config)),
            )
        ],
        route_config=RouteConfiguration(
            name="clients",
            virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=_routes(config))],
            validate_clusters=True,
        ),
        http_filters=[
            *_filters(config),
            http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
        ],
        local_reply_config=LocalReplyConfig(mappers=_local_replies(config)),
    )
    if config.envoy.profile == "lean":
        http.access_log = [lean.access_log()]
        http.access_log_options = HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=lean.LOG_INTERVAL
        )
    return http


def _early_mutations(config: Config) -> list[HeaderMutation]:
    mutations = [
        HeaderMutation(
            remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix))
        )
        for prefix in (*OWNED_PREFIXES, _ENVOY_PREFIX)
    ]
    if config.envoy.profile == "lean":
        mutations.append(lean.stream_header())
    return mutations


def _filters(config: Config) -> list[HttpFilter]:
    if config.envoy.profile == "standard":
        return [standard.ext_proc(config)]
    if config.usage:
        return [lean.ext_authz(config), lean.usage_filter()]
    return [lean.ext_authz(config)]


def _routes(config: Config) -> list[Route]:
    pods = Route(
        name="pods",
        match=RouteMatch(prefix="/"),
        route=RouteAction(
            cluster=PODS,
            timeout=timedelta(seconds=config.envoy.timeout),
            idle_timeout=timedelta(seconds=config.envoy.idle_timeout),
            retry_policy=RetryPolicy(
                retry_on=_RETRY_ON,
                num_retries=config.envoy.retries,
                retry_back_off=RetryPolicyRetryBackOff(
                    base_interval=timedelta(milliseconds=5),
                    max_interval=timedelta(milliseconds=50),
                ),
            ),
        ),
    )
    return [lean.refusal_route(), pods] if config.envoy.profile == "lean" else [pods]


def _local_replies(config: Config) -> list[ResponseMapper]:
    """Envoy's own answers, in the shape that clients of model servers read."""
    limit = f"the request body is over the limit of {config.max_body} bytes"
    return [
        _reply(Refusal(413, "body_too_large", limit), _status(413)),
        _reply(
            Refusal(503, "no_picker", "the endpoint picker does not answer", retry_after=1),
            _details("^ext_(authz|proc)_error"),
        ),
        _reply(
            Refusal(503, "no_endpoint", "no model server could be reached", retry_after=1),
            _and(_status(503), _flags(*_NO_POD)),
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
