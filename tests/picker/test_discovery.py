from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

from picker.config import EndpointSpec
from picker.discovery import EndpointDiscovery
from picker.names import ENDPOINT_DISCOVERY, PODS
from picker.pool import Pool
from tests.picker.waiting import until

TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def put(pool: Pool, *addresses: str) -> None:
    pool.update([EndpointSpec(address=address) for address in addresses])


@asynccontextmanager
async def envoy(pool: Pool) -> AsyncIterator[Any]:
    """A stream of a client that does what Envoy does."""
    server = grpc.aio.server()
    EndpointDiscovery(pool).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream(
            f"/{ENDPOINT_DISCOVERY}/StreamEndpoints",
            request_serializer=DiscoveryRequest.SerializeToString,
            response_deserializer=DiscoveryResponse.FromString,
        )
    await server.stop(None)


def addresses(response: DiscoveryResponse) -> list[tuple[str, int]]:
    (resource,) = response.resources
    assignment = ClusterLoadAssignment()
    assert resource.Unpack(assignment)
    assert assignment.cluster_name == PODS
    (locality,) = assignment.endpoints
    sockets = [each.endpoint.address.socket_address for each in locality.lb_endpoints]
    return [(socket.address, socket.port_value) for socket in sockets]


async def told(call: Any) -> DiscoveryResponse:
    async with asyncio.timeout(60):
        response = await call.read()
    await call.write(
        DiscoveryRequest(
            type_url=TYPE, version_info=response.version_info, response_nonce=response.nonce
        )
    )
    return response


async def test_the_endpoints_are_told_and_each_change() -> None:
    pool = Pool("test")
    async with envoy(pool) as connect:
        call = connect()
        await call.write(DiscoveryRequest(type_url=TYPE, resource_names=[PODS]))
        first = await told(call)
        assert (first.type_url, addresses(first)) == (TYPE, [])
        put(pool, "192.0.2.1:8000", "[2001:db8::1]:8001")
        second = await told(call)
        assert addresses(second) == [("192.0.2.1", 8000), ("2001:db8::1", 8001)]
        assert second.version_info != first.version_info
        put(pool, "[2001:db8::1]:8001")
        put(pool, "192.0.2.3:8000")
        assert addresses(await told(call)) == [("192.0.2.3", 8000)]


async def test_changes_that_came_while_the_stream_was_down_are_told_at_once() -> None:
    pool = Pool("test")
    async with envoy(pool) as connect:
        call = connect()
        await call.write(DiscoveryRequest(type_url=TYPE))
        version = (await told(call)).version_info
        call.cancel()
        put(pool, "192.0.2.1:8000")
        call = connect()
        await call.write(DiscoveryRequest(type_url=TYPE, version_info=version))
        assert addresses(await told(call)) == [("192.0.2.1", 8000)]


async def test_a_refused_version_is_logged_and_not_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Pool("test")
    async with envoy(pool) as connect:
        call = connect()
        await call.write(DiscoveryRequest(type_url=TYPE))
        response = await call.read()
        refusal = DiscoveryRequest(type_url=TYPE, response_nonce=response.nonce)
        refusal.error_detail.message = "malformed IP address"
        await call.write(refusal)
        await until(lambda: "malformed IP address" in caplog.text)
        put(pool, "192.0.2.1:8000")
        assert addresses(await told(call)) == [("192.0.2.1", 8000)]


async def test_a_stream_that_its_envoy_left_ends() -> None:
    pool = Pool("test")
    async with envoy(pool) as connect:
        call = connect()
        await call.write(DiscoveryRequest(type_url=TYPE))
        await told(call)

        def waiting() -> bool:
            return any("StreamEndpoints" in task.get_name() for task in asyncio.all_tasks())

        assert waiting()
        call.cancel()
        await until(lambda: not waiting())
