"""Names that Envoy, the picker and the protocol share."""

from __future__ import annotations

PODS = "pods"  # the cluster of the pool's endpoints

DESTINATION = "x-gateway-destination-endpoint"  # the picked endpoints, best first
SERVED = "x-gateway-destination-endpoint-served"  # in dynamic metadata: the one that served
LB_NAMESPACE = "envoy.lb"  # dynamic metadata

OWNED_PREFIXES = (
    "x-gateway-destination-endpoint",
    "x-warmpath-",
    # By these, pods that split prefill from decode are told whom to ask.
    "x-prefiller-",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
)
"""Request headers that only the picker sets: a client's own are removed."""

STREAM = "x-warmpath-stream"  # the lean profile's name of one request, made by Envoy
REFUSAL = "x-warmpath-refusal"  # a 503's body, carried as a header to a direct response
REFUSED = "x-warmpath-refused"  # the reason of a refusal, shown to the client
RETRY_AFTER = "x-warmpath-retry-after"  # of that 503
SERVED_BY = "x-warmpath-served-by"  # response header of the round-robin port
PICK_PATH = "/pick"  # before the client's path, when the picker is asked over HTTP

USAGE_NAMESPACE = "warmpath"  # dynamic metadata that usage.lua sets
