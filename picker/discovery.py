"""Tells Envoy which endpoints the pool has: Envoy's EDS, over the picker's gRPC port.

Speaks envoy.service.endpoint.v3.EndpointDiscoveryService, the variant that sends the whole state.
An Envoy that lost its picker goes on with the endpoints that it knows.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

from picker.names import ENDPOINT_DISCOVERY, PODS
from picker.pool import Endpoint, Pool

log = logging.getLogger(__name__)


class EndpointDiscovery:
    """Sends the pool's endpoints to each Envoy that asks, and again after each change."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._changed = asyncio.Event()
        pool.listen(self)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on a gRPC server that has not started yet."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream, request_deserializer=DiscoveryRequest.FromString
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    ENDPOINT_DISCOVERY, {"StreamEndpoints": handler}
                ),
            )
        )

    def added(self, _: Endpoint) -> None:
        self._wake()

    def removed(self, _: Endpoint) -> None:
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stream(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Each request but the first acknowledges, or refuses, what was sent before."""
        sent = None
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.HasField("error_detail"):
                log.error("Envoy refused the endpoints: %s", request.error_detail.message)
            while (version := str(self._pool.revision)) == sent:
                await self._changed.wait()
            response = DiscoveryResponse(
                version_info=version, nonce=version, type_url=request.type_url
            )
            response.resources.add().Pack(self._assignment())
            await context.write(response.SerializeToString())
            sent = version

    def _assignment(self) -> ClusterLoadAssignment:
        assignment = ClusterLoadAssignment(cluster_name=PODS)
        locality = assignment.endpoints.add()
        for endpoint in self._pool.endpoints.values():
            address = locality.lb_endpoints.add().endpoint.address.socket_address
            address.address, address.port_value = endpoint.host, endpoint.port
        return assignment
