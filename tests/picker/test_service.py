"""The whole picker: started, asked, reloaded, drained; in this process and as users run it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web
from click.testing import CliRunner
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from picker.commands.pick import pick
from picker.config import Config, load, parse
from picker.running import watch
from picker.servers import Ports
from picker.service import Service
from tests.picker.core import completion

DEADLINE = 30.0  # seconds, on a busy machine
PAGE = """\
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc 0.0
"""


@asynccontextmanager
async def model_server(page: str = PAGE) -> AsyncIterator[str]:
    """A pod that tells its load; its address."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=page)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def config_of(*addresses: str, more: str = "") -> Config:
    return parse(text_of(*addresses, more=more))


def text_of(*addresses: str, more: str = "") -> str:
    """A file with free ports."""
    endpoints = "".join(f"\n  - address: {address}" for address in addresses) or " []"
    return (
        f"listen: {{grpc: 0, health: 0, http: 0, admin: 0}}\npool:\n  endpoints:{endpoints}\n{more}"
    )


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[Service, Ports]]:
    service = Service(config)
    try:
        ports = await service.start()
        await asyncio.wait_for(service.until_ready(), DEADLINE)
        yield service, ports
    finally:
        await service.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110  # of files and processes
            await asyncio.sleep(0.01)


async def get(port: int, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{port}{path}"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return response.status, await response.text()


async def healthy(port: int, service: str = "readiness") -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(service=service))
        return bool(answer.status == HealthCheckResponse.SERVING)


def ext_proc(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
    process = channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    return process()


def get_request() -> ProcessingRequest:
    """GET /v1/models, as Envoy tells it."""
    message = ProcessingRequest()
    message.request_headers.end_of_stream = True
    for name, value in ((":method", "GET"), (":path", "/v1/models")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


async def ask_lean(port: int) -> tuple[int, str | None]:
    async with aiohttp.ClientSession() as http:
        headers = {"x-warmpath-stream": "1"}
        async with http.get(f"http://127.0.0.1:{port}/pick/v1/models", headers=headers) as answer:
            return answer.status, answer.headers.get("x-gateway-destination-endpoint")


async def test_both_faces_pick_from_one_pool() -> None:
    async with model_server() as pod, running(config_of(pod)) as (_, ports):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            call = ext_proc(channel)
            await call.write(get_request())
            answer = await call.read()
            assert pod in str(answer)
            call.cancel()
        assert await ask_lean(ports.http) == (200, pod)
        _, text = await get(ports.admin, "/debug/decisions")
        assert [each["endpoint"] for each in json.loads(text)["decisions"]] == [pod, pod]


async def test_it_is_ready_when_each_pod_has_told_or_failed() -> None:
    release = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    service = Service(config_of(address, more="metrics: {timeout: 1m}"))
    try:
        ports = await service.start()
        assert await get(ports.admin, "/readyz") == (503, "starting\n")
        assert (await get(ports.admin, "/healthz"))[0] == 200
        assert not await healthy(ports.health)
        assert await healthy(ports.health, "liveness")
        assert await healthy(ports.health, "inference-extension")  # its pool is in the file
        with pytest.raises(aiohttp.ClientConnectorError):  # Envoy must not ask yet
            await ask_lean(ports.http)
        release.set()
        await asyncio.wait_for(service.until_ready(), DEADLINE)
        assert await get(ports.admin, "/readyz") == (200, "ok\n")
        assert await healthy(ports.health)
        assert await healthy(ports.grpc)
    finally:
        await service.stop()
        server.close()


async def test_a_pool_without_pods_is_ready_to_say_so() -> None:
    async with running(config_of()) as (_, ports):
        assert (await get(ports.admin, "/readyz"))[0] == 200


async def test_the_size_that_a_pod_tells_reaches_the_index() -> None:
    page = PAGE + 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4"} 1\n'
    async with model_server(page) as pod, running(config_of(pod)) as (service, ports):
        service.director.pick(completion([1] * 64_000))
        _, text = await get(ports.admin, "/debug/state")
        assert json.loads(text)["prefixIndex"]["blocks"] == 64 * 4 // 256


async def test_draining_tells_probes_first_and_lets_streams_end() -> None:
    async with (
        model_server() as pod,
        running(config_of(pod, more="drain: 30s")) as (service, ports),
    ):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            call = ext_proc(channel)
            await call.write(get_request())
            await call.read()
            draining = asyncio.create_task(service.drain())
            await until(lambda: service.not_ready == "draining")
            assert await get(ports.admin, "/readyz") == (503, "draining\n")
            assert not await healthy(ports.health)
            for asked_for_liveness in ("liveness", "inference-extension"):  # it is not killed
                assert await healthy(ports.health, asked_for_liveness)
            message = ProcessingRequest()
            message.response_headers.end_of_stream = True
            message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
            await call.write(message)
            assert (await call.read()).HasField("response_headers")
            await call.done_writing()
            await asyncio.wait_for(draining, DEADLINE)
        _, text = await get(ports.admin, "/debug/decisions")
        assert json.loads(text)["decisions"][0]["outcome"] == "completed"


async def test_a_drain_ends_when_its_time_is_up() -> None:
    async with model_server() as pod, running(config_of(pod, more="drain: 0")) as (service, ports):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            call = ext_proc(channel)
            await call.write(get_request())
            await call.read()
            await asyncio.wait_for(service.drain(), DEADLINE)
        _, text = await get(ports.admin, "/debug/decisions")
        assert json.loads(text)["decisions"][0]["outcome"] == "aborted"


async def test_envoy_is_told_the_endpoints_and_their_change() -> None:
    stream = "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints"
    async with (
        running(config_of("127.0.0.1:1")) as (service, ports),
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
    ):
        call = channel.stream_stream(
            stream,
            request_serializer=DiscoveryRequest.SerializeToString,
            response_deserializer=DiscoveryResponse.FromString,
        )()
        await call.write(DiscoveryRequest())
        first = await call.read()
        service.reload(config_of("127.0.0.1:1", "127.0.0.1:2"))
        await call.write(DiscoveryRequest(version_info=first.version_info))
        second = await call.read()
        assigned = ClusterLoadAssignment()
        assert second.resources[0].Unpack(assigned)
        addresses = [each.endpoint.address for each in assigned.endpoints[0].lb_endpoints]
        assert [address.socket_address.port_value for address in addresses] == [1, 2]
        call.cancel()


async def test_reload_takes_over_endpoints_and_tells_what_needs_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "picker.service")
    async with (
        model_server() as first,
        model_server() as second,
        running(config_of(first)) as (service, ports),
    ):
        service.reload(config_of(second, more="prefix: {maxBlocks: 7}\nusage: false\nmodels: [a]"))
        assert "1 endpoints: 1 came, 1 left" in caplog.text
        assert "only a restart applies it: prefix.maxBlocks, usage" in caplog.text
        _, text = await get(ports.admin, "/config")
        assert second in text
        assert "models:\n- a" in text
        assert "maxBlocks: 1024" in text
        with pytest.raises(ValueError, match="given twice"):
            service.reload(config_of(second, second))
        assert service.num_endpoints == 1


async def test_the_largest_body_that_may_be_configured_can_be_served() -> None:
    async with running(config_of("127.0.0.1:1", more="maxBody: 1000MiB")) as (_, ports):
        assert await healthy(ports.grpc)


async def test_a_port_in_use_is_named() -> None:
    for key in ("grpc", "http", "health", "admin"):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ports = dict.fromkeys(("grpc", "http", "health", "admin"), 0) | {key: port}
            service = Service(parse(json.dumps({"listen": ports})))
            with pytest.raises(OSError, match=rf"port {port} \(listen\.{key}\): "):
                await service.start()
            await service.stop()


class Watched:
    """A file that is watched, and what was applied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.applied: list[float] = []

    def read(self) -> Config:
        return load(self.path)

    def apply(self, config: Config) -> None:
        self.applied.append(config.drain)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(watch(self.path, self.read, self.apply, poll_seconds=0.01))
        try:
            await until(lambda: len(self.applied) == 1)
            yield
            assert not task.done()
        finally:
            task.cancel()


async def test_a_file_that_changes_is_applied(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "w.yaml")
    watched.path.write_text("drain: 1")
    async with watched.watching():
        watched.path.write_text("drain: 22")
        await until(lambda: watched.applied[-1] == 22)
        replacement = tmp_path / "new.yaml"
        replacement.write_text("drain: 33")
        replacement.replace(watched.path)
        await until(lambda: watched.applied[-1] == 33)
    assert watched.applied == [1, 22, 33]


async def test_a_file_that_is_being_written_is_left_alone_until_it_stands_still(
    tmp_path: Path,
) -> None:
    class Growing(type(tmp_path)):  # type: ignore[misc]
        looks = 0

        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            type(self).looks += 1
            if type(self).looks <= 20:
                self.write_text("#" * type(self).looks)
            return super().stat(follow_symlinks=follow_symlinks)

    path = Growing(tmp_path / "w.yaml")
    read: list[int] = []

    def remember() -> Config:
        read.append(Growing.looks)
        return Config()

    task = asyncio.create_task(watch(path, remember, lambda _: None, poll_seconds=0))
    await until(lambda: bool(read))
    task.cancel()
    assert read[0] > 20


async def test_a_config_map_that_is_swapped_is_applied(tmp_path: Path) -> None:
    for version, drain in (("v1", 1), ("v2", 2)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "w.yaml").write_text(f"drain: {drain}")
    data = tmp_path / "..data"
    data.symlink_to("v1")
    watched = Watched(tmp_path / "w.yaml")
    watched.path.symlink_to("..data/w.yaml")
    async with watched.watching():
        swap = tmp_path / "..tmp"
        swap.symlink_to("v2")
        swap.replace(data)
        await until(lambda: watched.applied == [1, 2])


async def test_a_bad_file_or_none_keeps_the_old_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path / "w.yaml")
    watched.path.write_text("drain: 1")
    async with watched.watching():
        watched.path.write_text("drain: soon")
        await until(lambda: "w.yaml:1: drain: 'soon' is not a duration" in caplog.text)
        watched.path.unlink()
        await until(lambda: "cannot be read" in caplog.text)
        watched.path.write_text("")
        await until(lambda: "w.yaml is empty" in caplog.text)
        watched.path.write_text("drain: 2")
        await until(lambda: watched.applied == [1, 2])
    assert caplog.text.count("The old configuration stays in force") == 3


async def test_nothing_ends_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Watched):
        def read(self) -> Config:
            if self.path.read_text() == "drain: 13":
                raise RuntimeError("bad luck")
            return super().read()

    watched = Failing(tmp_path / "w.yaml")
    watched.path.write_text("drain: 1")
    async with watched.watching():
        watched.path.write_text("drain: 13")
        await until(lambda: "bad luck" in caplog.text)
        watched.path.write_text("drain: 2")
        await until(lambda: watched.applied == [1, 2])


async def started(path: Path, *flags: str) -> tuple[asyncio.subprocess.Process, list[str]]:
    """`warmpath pick -c FILE`, and its lines up to the ready line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "picker.cli", "pick", "-c", path, *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE):
        while not lines or "Ready" not in lines[-1]:
            assert process.stderr is not None
            line = await process.stderr.readline()
            assert line, lines
            lines.append(line.decode())
    return process, lines


async def test_a_process_serves_takes_over_its_file_and_drains(tmp_path: Path) -> None:
    path = tmp_path / "warmpath.yaml"
    async with model_server() as first, model_server() as second:
        path.write_text(text_of(first, more="drain: 5s"))
        process, lines = await started(path)
        try:
            port = int(lines[-1].split("http://127.0.0.1:")[1].split()[0])
            path.write_text(text_of(first, second, more="drain: 5s"))
            async with asyncio.timeout(DEADLINE):
                while second not in (await get(port, "/debug/state"))[1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_second_signal_ends_a_drain(tmp_path: Path) -> None:
    path = tmp_path / "warmpath.yaml"
    path.write_text(text_of(more="drain: 1h"))
    process, lines = await started(path)
    try:
        port = int(lines[-1].split("ext_proc on 127.0.0.1:")[1].split(",")[0])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = ext_proc(channel)
            await call.write(ProcessingRequest())  # a stream in flight, with nothing to answer
            assert await healthy(port)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while b"Draining" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(pick, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_check_says_yes_or_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("scheduling:\n  scorers:\n    queue: 2\n")
    assert invoke("-c", path, "--check") == (0, f"{path} can be used\n")
    path.write_text("scheduling:\n  scorers:\n    queu: 2\n")
    code, output = invoke("-c", path, "--check")
    assert code == 3
    assert output.startswith(f"Error: {path}:3: scheduling.scorers.queu: ")
    assert "'queue'" in output
    path.write_text("pool:\n  endpoints:\n  - address: pod-a:8000\n")
    code, output = invoke("-c", path, "--check")
    assert code == 3
    assert f"{path}:3: pool.endpoints[0].address: " in output
    for name, source in (("a", "x ="), ("b", "x = y"), ("c", "import nothing_of_this_name")):
        (tmp_path / f"scorer_{name}.py").write_text(source)
        path.write_text(f"scheduling:\n  scorers:\n    'scorer_{name}:S': 2\n")
        with monkeypatch.context() as patched:
            patched.syspath_prepend(tmp_path)
            code, output = invoke("-c", path, "--check")
        assert (code, len(output.splitlines())) == (3, 1)
        where = f"{path}:3: scheduling.scorers.scorer_{name}:S"
        assert output.startswith(f"Error: {where}: cannot load")
    assert invoke("--endpoint", "127.0.0.1:1", "--check")[0] == 0
    assert invoke("--endpoint", "127.0.0.1", "--check")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say which pods"),
        (("-c", "missing.yaml"), "missing.yaml: cannot be read"),
        (("--endpoint", "pod:1"), "pod"),
        (("--endpoint", "127.0.0.1:1", "--grpc-port", "65536"), "65536"),
        (("--endpoint", "127.0.0.1:1", "--metrics-interval", "fast"), "is not a duration"),
        (("--endpoint", "127.0.0.1:1", "--metrics-interval", "0"), "between 5ms and 1m"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_a_port_in_use_exits_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        free = ("--grpc-port", "0", "--http-port", "0", "--health-port", "0")
        code, output = invoke("--endpoint", "127.0.0.1:1", *free, "--admin-port", port)
    assert code == 1
    assert output.splitlines()[-1].startswith(f"Error: cannot listen on 127.0.0.1, port {port}")


def test_pods_are_named_in_warmpath_yaml_or_by_flags_and_not_in_both(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("drain: 1s\n")
    code, output = invoke("-c", path, "--endpoint", "127.0.0.1:1")
    assert code == 2
    assert "exclude each other" in output
