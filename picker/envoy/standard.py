"""The standard profile: the picker sees the whole exchange over ext_proc."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import GrpcService, GrpcServiceEnvoyGrpc
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
from picker.envoy.clusters import PICKER_GRPC
from picker.envoy.parts import http_filter
from picker.names import LB_NAMESPACE

LONGEST = 3600.0  # seconds; more Envoy does not take, and 0 would be no time at all


def ext_proc(config: Config) -> HttpFilter:
    """Headers, bodies and trailers of both directions go to the picker and back.

    In full duplex Envoy keeps nothing of a body that it has sent, and fails the request with the
    picker. To fail open it must keep them: the request's until it is answered, and each piece of
    the response.
    """
    send = ProcessingModeHeaderSendMode.SEND
    body = ProcessingModeBodySendMode
    fail_open = config.envoy.fail_open
    endpoints = MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE])
    return http_filter(
        "envoy.filters.http.ext_proc",
        ExternalProcessor(
            grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER_GRPC)),
            processing_mode=ProcessingMode(
                request_header_mode=send,
                request_body_mode=body.BUFFERED if fail_open else body.FULL_DUPLEX_STREAMED,
                request_trailer_mode=send,
                response_header_mode=send,
                response_body_mode=body.STREAMED if fail_open else body.FULL_DUPLEX_STREAMED,
                response_trailer_mode=send,
            ),
            # The answer to the headers waits for the body, however slowly a client sends it.
            message_timeout=timedelta(seconds=min(config.envoy.idle_timeout or LONGEST, LONGEST)),
            failure_mode_allow=fail_open,
            status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
            allow_mode_override=True,
            response_attributes=["upstream.address"],
            metadata_options=MetadataOptions(
                # Without the first, the picked endpoint is dropped; by the second, the picker
                # learns which one served.
                receiving_namespaces=endpoints,
                forwarding_namespaces=endpoints,
            ),
        ),
    )
