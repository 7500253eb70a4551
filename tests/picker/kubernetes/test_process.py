"""A picker that finds its pods in Kubernetes, asked as gateways ask."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.config import parse
from picker.director import Pick
from picker.service import Service
from tests.kubernetes_api import KubernetesApi, kubeconfig, running_kubernetes
from tests.kubernetes_objects import inference_pool, objective, pod, rewrite
from tests.picker.test_service import (
    DEADLINE,
    PAGE,
    config_of,
    ext_proc,
    get,
    get_request,
    healthy,
    model_server,
    running,
    started,
    until,
)
from tests.worker.process import free_ports

ACTIVE = "inference.networking.k8s.io/active-ports"
BUSY = PAGE.replace("waiting 0", "waiting 50")


def text_for(api: KubernetesApi, ports: dict[str, int] | None = None, more: str = "") -> str:
    listen = dict.fromkeys(("grpc", "health", "http", "admin"), 0) | (ports or {})
    path = kubeconfig(api, Path(api.folder))
    return (
        f"listen: {json.dumps(listen)}\n"
        f"pool: {{kubernetes: {{pool: demo, kubeconfig: {path}}}}}\n{more}"
    )


def apply_pods(api: KubernetesApi, **addresses: str) -> None:
    """Pods by name, of which each serves at one of the pool's ports."""
    ports = sorted(int(address.rpartition(":")[2]) for address in addresses.values())
    api.apply(inference_pool(ports=ports))
    for name, address in addresses.items():
        ip, _, port = address.rpartition(":")
        api.apply(pod(name, ip, annotations={ACTIVE: port}))


async def asked(channel: grpc.aio.Channel) -> ProcessingResponse:
    """The picker's answer to a request."""
    call = ext_proc(channel)
    await call.write(get_request())
    answer = await call.read()
    call.cancel()
    return answer


async def test_a_process_with_a_kubeconfig_serves_the_pods_of_the_pool(tmp_path):
    async with (
        running_kubernetes() as api,
        model_server() as first,
        model_server() as second,
    ):
        names = ("grpc", "health", "http", "admin")
        ports = dict(zip(names, free_ports(4), strict=True))
        path = tmp_path / "warmpath.yaml"
        path.write_text(text_for(api, ports, "drain: 1s\n"))
        start = asyncio.create_task(started(path))
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    status, why = await get(ports["admin"], "/readyz")
                except aiohttp.ClientConnectorError:
                    status, why = 0, ""
                if "there is no InferencePool demo in namespace default" in why:
                    break
                await asyncio.sleep(0.02)
        assert status == 503
        assert not await healthy(ports["health"])
        apply_pods(api, a=first, b=second)
        process, _ = await asyncio.wait_for(start, DEADLINE)
        try:
            assert await healthy(ports["health"])
            async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
                seen = {str(await asked(channel)) for _ in range(20)}
                assert all(first in answer or second in answer for answer in seen)
                api.delete(pod("a"))
                async with asyncio.timeout(DEADLINE):
                    while first in str(await asked(channel)):
                        pass
                assert second in str(await asked(channel))
                state = json.loads((await get(ports["admin"], "/debug/state"))[1])
                assert [each["name"] for each in state["pool"]["pods"]] == [
                    f"b-rank-{int(second > first)}"
                ]
                assert state["kubernetes"]["synced"]
                page = (await get(ports["admin"], "/metrics"))[1]
                assert 'warmpath_kubernetes_synced{resource="pods"} 1' in page
                assert 'inference_pool_ready_pods{name="demo"} 1' in page
                queue = "inference_pool_per_pod_queue_size"
                assert f'{queue}{{name="demo",model_server_pod="b-rank-' in page
                path.write_text(text_for(api, ports, "drain: 2s\n"))  # it goes on watching
                api.delete(inference_pool())
                async with asyncio.timeout(DEADLINE):
                    while not (answer := await asked(channel)).HasField("immediate_response"):
                        pass
                assert answer.immediate_response.status.code == 503
                assert b"there is no InferencePool demo" in answer.immediate_response.body
                apply_pods(api, a=first)
                async with asyncio.timeout(DEADLINE):
                    while first not in str(await asked(channel)):
                        pass
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_it_is_ready_when_the_pods_are_known_and_have_told_their_load():
    release = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running_kubernetes() as api:
        apply_pods(api, a=address)
        service = Service(parse(text_for(api, more="metrics: {timeout: 1m}")))
        try:
            await service.start()
            ready = asyncio.create_task(service.until_ready())
            await until(lambda: service.num_endpoints == 1)
            assert service.not_ready == "starting"
            release.set()
            await asyncio.wait_for(ready, DEADLINE)
            assert service.not_ready is None
        finally:
            await service.stop()
            server.close()


@asynccontextmanager
async def busy_service(api: KubernetesApi) -> AsyncIterator[tuple[Service, int]]:
    """A service with flow control, whose only pod has no room; its gRPC port."""
    async with model_server(BUSY) as address:
        apply_pods(api, a=address)
        patient = "metrics: {timeout: 1m, staleAfter: 1h}\n"  # with a busy machine
        config = parse(text_for(api, more=f"flow: {{enabled: true, ttl: 1s}}\n{patient}"))
        async with running(config) as (service, ports):
            yield service, ports.grpc


async def refusal(port: int, objective_name: str) -> str:
    """Why a request of an objective is refused."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = ext_proc(channel)
        message = ProcessingRequest()
        for name, value in (
            (":method", "POST"),
            (":path", "/v1/completions"),
            ("content-type", "application/json"),
            ("x-gateway-inference-objective", objective_name),
        ):
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        await call.write(message)
        body = ProcessingRequest()
        body.request_body.body, body.request_body.end_of_stream = b'{"prompt": "hi"}', True
        await call.write(body)
        answer = await call.read()
        return str(answer.immediate_response.body)


async def test_an_objective_of_the_cluster_gives_its_priority():
    async with running_kubernetes() as api:
        api.apply(objective("batch", -5))
        async with busy_service(api) as (_, port):
            assert "the priority is below 0" in await refusal(port, "batch")
            assert "no pod had room" in await refusal(port, "chat")


async def test_rewrites_of_the_cluster_count_after_those_of_the_file():
    async with running_kubernetes() as api, model_server() as address:
        apply_pods(api, a=address)
        api.apply(rewrite("r", [(["m"], [("cluster", None)]), (["n"], [("also", None)])]))
        more = "rewrites: [{models: [m], targets: [{model: file}]}]"
        async with running(parse(text_for(api, more=more))) as (service, _):
            body = {"messages": [{"role": "user", "content": "hi"}]}

            def sent_as(model: str) -> str | None:
                raw = json.dumps(body | {"model": model}).encode()
                headers = {"content-type": "application/json"}
                pick = service.director.route("POST", "/v1/chat/completions", headers, raw)
                assert isinstance(pick, Pick)
                return pick.model

            assert [sent_as(model) for model in ("m", "n", "o")] == ["file", "also", "o"]
            api.delete(rewrite("r", []))
            await until(lambda: sent_as("n") == "n")
            assert sent_as("m") == "file"


async def test_a_reload_neither_empties_the_pool_nor_ends_the_watch(caplog):
    async with running_kubernetes() as api, model_server() as address:
        apply_pods(api, a=address)
        config = parse(text_for(api))
        async with running(config) as (service, _):
            service.reload(parse(text_for(api, more="usage: false")))
            assert "only a restart applies it: usage" in caplog.text
            service.reload(parse(f"pool: {{endpoints: [{{address: '{address}'}}]}}"))
            assert "pool.endpoints, pool.kubernetes" in caplog.text
            assert service.num_endpoints == 1
            api.delete(pod("a"))
            await until(lambda: service.num_endpoints == 0)


async def test_a_file_that_goes_over_to_kubernetes_keeps_its_endpoints_until_a_restart(caplog):
    async with (
        running_kubernetes() as api,
        model_server() as address,
        running(config_of(address)) as (service, _),
    ):
        service.reload(parse(text_for(api)))
        assert service.num_endpoints == 1
        assert "pool.kubernetes" in caplog.text
