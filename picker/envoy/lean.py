"""The lean profile: the picker is asked once a request, and told by the access log how it went."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HttpUri,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_authz.v3 import (
    AuthorizationResponse,
    BufferSettings,
    ExtAuthz,
    HttpService,
)
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua, LuaPerRoute
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import (
    ListStringMatcher,
    RegexMatcher,
    StringMatcher,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from picker.config import Config
from picker.envoy.clusters import PICKER_GRPC, PICKER_HTTP, another_picker
from picker.envoy.parts import http_filter, names, pick_timeout, set_header
from picker.identity import KEY_HEADERS
from picker.names import (
    DESTINATION,
    PICK_PATH,
    REFUSAL,
    REFUSED,
    REQUEST_ID,
    RETRY_AFTER,
    SPLICE,
    STREAM,
)

# Headers that the picker is not shown
SECRET = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")
OF_ONE_HOP = ("connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
USELESS = ("accept", "accept-encoding", "accept-language", "user-agent", "x-forwarded-proto")
USELESS_PREFIXES = ("x-envoy-", "x-stainless-", "sec-")  # the last of OpenAI's clients, of browsers

SPLICE_FILTER = "warmpath.splice"  # Envoy's name of it

LIMITS = ("x-ratelimit-",)  # headers for the client begin with it

LOG_FLUSH = timedelta(seconds=0.05)
LOG_INTERVAL = timedelta(seconds=0.5)  # of entries about a request that goes on
LOG_BATCH = 64 << 10  # bytes: about a hundred entries, which the picker takes a millisecond for


def stream_header() -> HeaderMutation:
    """Name each request, whatever its client calls it: pick and access log meet by that name."""
    return HeaderMutation(append=set_header(STREAM, "%UNIQUE_ID%"))


def ext_authz(config: Config) -> HttpFilter:
    """Post the request to the picker, and take from its answer where to go."""
    return http_filter(
        "envoy.filters.http.ext_authz",
        ExtAuthz(
            http_service=HttpService(
                server_uri=HttpUri(
                    uri=f"http://{PICKER_HTTP}", cluster=PICKER_HTTP, timeout=pick_timeout(config)
                ),
                path_prefix=PICK_PATH,
                retry_policy=another_picker(config, pick_timeout(config)),
                authorization_response=AuthorizationResponse(
                    allowed_upstream_headers=names(
                        DESTINATION, REQUEST_ID, REFUSAL, REFUSED, RETRY_AFTER, SPLICE, STREAM
                    ),
                    allowed_client_headers=names(
                        "content-type", REFUSED, "retry-after", "www-authenticate", prefixes=LIMITS
                    ),
                    allowed_client_headers_on_success=names(prefixes=LIMITS),
                ),
            ),
            # Scorers may read any header, and nobody knows which. What every client sends and no
            # scorer asks for would only cost time.
            allowed_headers=ListStringMatcher(
                patterns=[StringMatcher(safe_regex=RegexMatcher(regex=".*"))]
            ),
            disallowed_headers=names(*_hidden(config), prefixes=USELESS_PREFIXES),
            with_request_body=BufferSettings(max_request_bytes=config.max_body),
            failure_mode_allow=config.envoy.fail_open,
            status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
            clear_route_cache=True,  # for `refusal_route`
        ),
    )


def _hidden(config: Config) -> list[str]:
    """Headers that the picker is not shown. API keys are, where it tells tenants by them."""
    keys = KEY_HEADERS if config.identity.keys else ()
    return [name for name in (*SECRET, *OF_ONE_HOP, *USELESS) if name not in keys]


def refusal_route() -> Route:
    """Answers what the picker would answer with 503, which ext_authz takes for its failure."""
    return Route(
        name="refused",
        match=RouteMatch(prefix="/", headers=[HeaderMatcher(name=REFUSAL, present_match=True)]),
        direct_response=DirectResponseAction(
            status=503,
            body_format=SubstitutionFormatString(
                text_format_source=DataSource(inline_string=f"%REQ({REFUSAL})%"),
                content_type="application/json",
            ),
        ),
        response_headers_to_add=[
            set_header(REFUSED, f"%REQ({REFUSED})%"),
            set_header("retry-after", f"%REQ({RETRY_AFTER})%"),
        ],
    )


def usage_filter() -> HttpFilter:
    """Reads the usage out of responses."""
    return http_filter("envoy.filters.http.lua", Lua(default_source_code=_script("usage.lua")))


def may_rewrite(config: Config) -> bool:
    """Whether the picker may ask for other models than clients do; Kubernetes can tell it to."""
    return bool(config.rewrites or config.rewrite_headers or config.pool.kubernetes.pool)


def splice_filter() -> HttpFilter:
    """Changes a request's body, and undoes in the response what came of it.

    It stands before `usage_filter`, which so reads the response first, and it does nothing but on
    the route of `spliced`.
    """
    return http_filter(SPLICE_FILTER, Lua(source_codes={"splice": _script("splice.lua")}))


def spliced(pods: Route) -> Route:
    """A route to pods for requests whose body the picker wants changed."""
    return replace(
        pods,
        name=f"{pods.name}, spliced",
        match=RouteMatch(prefix="/", headers=[HeaderMatcher(name=SPLICE, present_match=True)]),
        # The answer is to be read, so it may not be compressed.
        request_headers_to_remove=[SPLICE, "accept-encoding"],
        typed_per_filter_config={SPLICE_FILTER: Any.pack(LuaPerRoute(name="splice"))},
    )


def _script(name: str) -> DataSource:
    return DataSource(inline_string=Path(__file__).with_name(name).read_text())


def access_log() -> AccessLog:
    """Tells the picker how each request goes and ends."""
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        typed_config=Any.pack(
            HttpGrpcAccessLogConfig(
                common_config=CommonGrpcAccessLogConfig(
                    log_name="warmpath",
                    transport_api_version=ApiVersion.V3,
                    grpc_service=GrpcService(
                        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER_GRPC)
                    ),
                    buffer_flush_interval=LOG_FLUSH,
                    buffer_size_bytes=LOG_BATCH,
                ),
                additional_request_headers_to_log=[STREAM],
            )
        ),
    )
