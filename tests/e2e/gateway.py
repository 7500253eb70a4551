"""Real Envoy before a real picker before pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from picker.config import Config, EndpointSpec, Envoy, Listen, PoolSection
from picker.envoy.bootstrap import bootstrap
from picker.names import (
    OWNED_HEADERS,
    REFUSAL,
    REFUSED,
    RETRY_AFTER,
    SERVED_BY,
    SET_RETRY_ON,
    SPLICE,
    STREAM,
)
from picker.service import Service
from tests.e2e.pods import Pod, running_pods
from tests.envoy_process import Envoy as EnvoyProcess
from tests.envoy_process import running_envoy

DEADLINE = 30.0  # seconds, on a busy machine
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
FORGED = [  # what a client may send to speak for the picker
    (write(name), "192.0.2.99:9090")
    for name in (
        *OWNED_HEADERS,
        *(
            STREAM,
            REFUSAL,
            REFUSED,
            RETRY_AFTER,
            SERVED_BY,
            SET_RETRY_ON,
            SPLICE,
            "x-warmpath-anything",
        ),
    )
    for write in (str.lower, str.title, str.upper)
]
ANY_PORTS = Listen(grpc=0, health=0, http=0, admin=0)


@dataclass(frozen=True, slots=True)
class Gateway:
    """All of it, and a client of it."""

    envoy: EnvoyProcess
    service: Service
    pods: Sequence[Pod]
    http: aiohttp.ClientSession
    admin: aiohttp.ClientSession

    async def inflight(self) -> float:
        """Requests and tokens that the picker counts as being served, over all pods."""
        async with self.admin.get("/debug/state") as response:
            pods = (await response.json())["pool"]["pods"]
        return sum(pod["inflightRequests"] + pod["inflightTokens"] for pod in pods)

    async def idle(self) -> None:
        """Wait until nothing is counted as being served."""
        await until(self.inflight, 0)

    async def decision(self, request_id: str) -> Any:
        """What the picker remembers of a request."""
        async with self.admin.get("/debug/decisions", params={"request_id": request_id}) as told:
            return (await told.json())["decisions"][0] if told.status == 200 else None

    def change_pool(self, addresses: Sequence[str]) -> None:
        """As when the file is written anew."""
        config = self.service.config
        pool = PoolSection(endpoints=[EndpointSpec(address=address) for address in addresses])
        self.service.reload(msgspec.structs.replace(config, pool=pool))

    async def metric(self, name: str, label: str = "") -> float:
        """The sum over a metric's series, or over those with a label."""
        async with self.admin.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        series = [line for line in lines if line.startswith(name) and label in line]
        return sum(float(line.split()[-1]) for line in series)


async def until(value: Callable[[], Any], wanted: Any) -> None:
    """Wait for what other processes do."""
    async with asyncio.timeout(DEADLINE):
        while await value() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def config_for(pods: Sequence[Pod], addresses: Sequence[str] = (), **settings: Any) -> Config:
    told = [*(pod.address for pod in pods), *addresses]
    endpoints = [EndpointSpec(address=address) for address in told]
    return Config(
        listen=settings.pop("listen", ANY_PORTS),
        pool=settings.pop("pool", PoolSection(endpoints=endpoints)),
        **{"envoy": Envoy(profile=settings.pop("profile", "standard")), **settings},
    )


@asynccontextmanager
async def running_gateway(
    *,
    pods: int = 2,
    addresses: Sequence[str] = (),
    discover: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """A gateway with a picker in this process, before pods of ours and those at `addresses`.

    `change` may alter Envoy's bootstrap.
    """
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_pods(pods))
        config = config_for(running, addresses, **settings)
        service = Service(config)
        stack.push_async_callback(service.stop)
        ports = await service.start()
        await service.until_ready()
        listen = msgspec.structs.replace(
            config.listen,
            grpc=ports.grpc,
            health=ports.health,
            http=ports.http,
            admin=ports.admin,
        )
        told = bootstrap(msgspec.structs.replace(config, listen=listen), discover=discover)
        if change is not None:
            change(told)
        envoy = await stack.enter_async_context(running_envoy(told))
        await envoy.wait_for_stat("cluster.pods.membership_total", service.num_endpoints)
        http = await stack.enter_async_context(aiohttp.ClientSession(envoy.url))
        admin = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{ports.admin}")
        )
        yield Gateway(envoy, service, running, http, admin)


async def refused(response: aiohttp.ClientResponse) -> tuple[int, str]:
    """Status and reason of a refusal, shaped as all are, whoever refuses."""
    assert response.headers["content-type"] == "application/json"
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-warmpath-refused"] == error["code"]
    assert not [name for name in response.headers if "refusal" in name.lower()]
    return response.status, error["code"]


def ext_proc(told: dict[str, Any]) -> dict[str, Any]:
    """The ext_proc filter in a bootstrap."""
    (manager,) = told["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    filters = manager["typed_config"]["http_filters"]
    found: dict[str, Any] = next(
        each["typed_config"] for each in filters if each["name"] == "envoy.filters.http.ext_proc"
    )
    return found


def manager(told: dict[str, Any]) -> dict[str, Any]:
    """The connection manager in a bootstrap."""
    (only,) = told["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    found: dict[str, Any] = only["typed_config"]
    return found


def chat(text: str = "hello", pad: int = 0, **fields: Any) -> bytes:
    """A chat request's body, made longer by some spaces that a JSON reader skips."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps(body).encode() + b" " * pad
