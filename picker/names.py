"""Names that Envoy, the picker and the protocols between them share."""

from __future__ import annotations

PODS = "pods"  # Envoy's cluster of the pool's endpoints

# Of the endpoint picker protocol
DESTINATION = "x-gateway-destination-endpoint"  # the picked endpoints, best first
SUBSET = "x-gateway-destination-endpoint-subset"  # in dynamic metadata: those it may pick
SERVED = "x-gateway-destination-endpoint-served"  # in dynamic metadata: the one that served
LB_NAMESPACE = "envoy.lb"  # dynamic metadata of DESTINATION and SERVED
SUBSET_HINT = "envoy.lb.subset_hint"  # dynamic metadata of SUBSET

FAIRNESS_ID = "x-gateway-inference-fairness-id"  # the tenant, where this is believed

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"))
"""Methods that are routed; httptools reads hardly more."""

REQUEST_ID = "x-request-id"
RETRY_ON = "x-envoy-retry-on"  # asks Envoy to try again with the next endpoint

OWNED_PREFIXES = (
    DESTINATION,
    "x-warmpath-",
    # By these, pods that split prefill from decode are told whom to ask.
    "x-prefiller-",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
)
"""Request headers that only the picker sets: a client's own are removed."""

OWNED_HEADERS = (
    DESTINATION,
    SUBSET,
    SERVED,
    "x-gateway-destination-endpoint-fallback",
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
)
"""Those of them that have a meaning to somebody outside this project."""

# Our own, between Envoy and the picker
STREAM = "x-warmpath-stream"  # the lean profile's name of one request, made by Envoy
OWNER = "@"  # in it, between that and the picker who picked, where there are several
REFUSAL = "x-warmpath-refusal"  # a 503's body, carried as a header to a direct response
REFUSED = "x-warmpath-refused"  # the reason of a refusal, shown to the client
SPLICE = "x-warmpath-splice"  # how Envoy shall change a body, see splice.lua
RETRY_AFTER = "x-warmpath-retry-after"  # of that 503
SERVED_BY = "x-warmpath-served-by"  # response header of the round-robin port
PICK_PATH = "/pick"  # before the client's path, when the picker is asked over HTTP
READY_PATH = "/ready"  # there, whether it is ready
SET_RETRY_ON = "x-warmpath-set-retry-on"  # gRPC metadata: what the picker shall set RETRY_ON to
JWT_NAMESPACE = "envoy.filters.http.jwt_authn"  # dynamic metadata of verified tokens
USAGE_NAMESPACE = "warmpath"  # dynamic metadata that usage.lua sets

# gRPC services
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
ENDPOINT_DISCOVERY = "envoy.service.endpoint.v3.EndpointDiscoveryService"
