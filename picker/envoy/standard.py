"""The standard profile: the picker sees the whole exchange over ext_proc."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import GrpcService, GrpcServiceEnvoyGrpc, HeaderValue
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode

from picker.config import Config
from picker.envoy.clusters import PICKER_GRPC, another_picker
from picker.envoy.parts import RETRYABLE, http_filter, pick_timeout
from picker.names import JWT_NAMESPACE, LB_NAMESPACE, SET_RETRY_ON

LONGEST = timedelta(seconds=3600)  # more Envoy does not take, and 0 would be no time at all


def retries_by_route(config: Config) -> bool:
    """Whether the route says when to retry; else the picker does, request by request.

    In full duplex Envoy 1.40 sends a body with trailers twice where its route may retry
    (envoy#45470). The picker knows which requests have trailers. Where Envoy has to go on without
    the picker, it buffers bodies, and trailers do no harm.
    """
    return config.envoy.profile != "standard" or config.envoy.fail_open


def ext_proc(config: Config) -> HttpFilter:
    """Headers, bodies and trailers of both directions go to the picker and back.

    In full duplex Envoy keeps nothing of a body that it has sent, and fails the request with the
    picker. To fail open it must keep them: the request's until it is answered, and each piece of
    the response. Then the picker answers each message at once, and a time limit makes sense. In
    full duplex it answers when it has the whole body, however slowly a client sends that; Envoy
    1.40 has no time limit there at all, see `clusters.picker_grpc`.
    """
    send = ProcessingModeHeaderSendMode.SEND
    body = ProcessingModeBodySendMode
    fail_open = config.envoy.fail_open
    told = [] if retries_by_route(config) else [HeaderValue(key=SET_RETRY_ON, value=RETRYABLE)]
    endpoints = MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE])
    known = [LB_NAMESPACE, JWT_NAMESPACE] if config.identity.claim else [LB_NAMESPACE]
    return http_filter(
        "envoy.filters.http.ext_proc",
        ExternalProcessor(
            grpc_service=GrpcService(
                envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER_GRPC),
                initial_metadata=told,
                retry_policy=another_picker(config, LONGEST),
            ),
            mutation_rules=HeaderMutationRules(allow_envoy=True),  # the picker asks for retries
            processing_mode=ProcessingMode(
                request_header_mode=send,
                request_body_mode=body.BUFFERED if fail_open else body.FULL_DUPLEX_STREAMED,
                request_trailer_mode=send,
                response_header_mode=send,
                response_body_mode=body.STREAMED if fail_open else body.FULL_DUPLEX_STREAMED,
                response_trailer_mode=send,
            ),
            message_timeout=pick_timeout(config) if fail_open else LONGEST,
            failure_mode_allow=fail_open,
            status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
            allow_mode_override=True,
            response_attributes=["upstream.address"],
            metadata_options=MetadataOptions(
                # Without the first, the picked endpoint is dropped; by the second, the picker
                # learns which one served.
                receiving_namespaces=endpoints,
                forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=known),
            ),
        ),
    )
