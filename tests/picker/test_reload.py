"""A configuration that changes while requests are in flight."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from picker.config import Config, parse
from picker.reference.load import load
from picker.reload import in_force
from picker.running import watch
from picker.service import Service, check_config
from tests.picker.ext_proc import Gateway, channel_to, destination, stream
from tests.picker.test_service import DEADLINE, get, model_server, running, until

BODY = json.dumps({"model": "llama", "prompt": "hello " * 50}).encode()
HEADERS = {
    ":method": "POST",
    ":path": "/v1/completions",
    "content-type": "application/json",
}


def text_of(*pods: tuple[str, str], more: str = "") -> str:
    """A file with free ports and pods of these addresses, each with its tier."""
    endpoints = "".join(f"\n  - {{address: '{a}', labels: {{tier: {tier}}}}}" for a, tier in pods)
    ports = "listen: {grpc: 0, health: 0, http: 0, admin: 0}"
    return f"{ports}\npool:\n  endpoints:{endpoints}\n{more}"


def only(tier: str) -> str:
    return f"scheduling: {{filters: [{{type: label, matchLabels: {{tier: {tier}}}}}]}}\n"


async def ask(channel: grpc.aio.Channel, id: str, **more: str) -> Gateway:
    """A request whose answer has not come yet."""
    gateway = stream(channel)
    named = {name.replace("_", "-"): value for name, value in more.items()}
    await gateway.headers({**HEADERS, "x-request-id": id, **named})
    await gateway.body(BODY)
    return gateway


async def picked(gateway: Gateway) -> str:
    """Where it went; the request's body has been passed on, too."""
    where = destination(await asyncio.wait_for(gateway.read(), DEADLINE))
    while not (
        await gateway.read()
    ).request_body.response.body_mutation.streamed_response.end_of_stream:
        pass
    return where


async def answered(gateway: Gateway) -> bytes:
    """Its answer passes the picker."""
    await gateway.respond({":status": "200", "content-type": "application/json"})
    await gateway.response_body(b'{"model": "llama", "choices": []}', end=True)
    passed = b""
    while True:
        message = await asyncio.wait_for(gateway.read(), DEADLINE)
        mutation = message.response_body.response.body_mutation.streamed_response
        passed += mutation.body
        if mutation.end_of_stream:
            return passed


async def decision(admin: int, id: str) -> dict[str, object]:
    _, text = await get(admin, f"/debug/decisions?request_id={id}")
    found: dict[str, object] = json.loads(text)["decisions"][0]
    return found


async def metric(admin: int, name: str) -> float:
    _, page = await get(admin, "/metrics")
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    assert found, name
    return float(found[1])


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[Service, int, int]]:
    """A picker of a file, as `warmpath pick` keeps it; its gRPC and admin ports."""

    def read() -> Config:
        return load(path, check_config).config

    async with running(read()) as (service, ports):
        task = asyncio.create_task(
            watch(path, read, service.reload, 0.01, failed=service.reloads.failed)
        )
        try:
            yield service, ports.grpc, ports.admin
            assert not task.done()
        finally:
            task.cancel()


async def test_a_stream_lives_through_a_reload_and_ends_as_it_began(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    async with model_server() as a, model_server() as b:
        path.write_text(text_of((a, "old"), (b, "new"), more=only("old")))
        async with watched(path) as (service, port, admin), channel_to(port) as channel:
            first = await ask(channel, "first")
            assert await picked(first) == a
            path.write_text(text_of((a, "old"), (b, "new"), more=only("new") + "models: [llama]\n"))
            await until(lambda: service.config.models == ["llama"])
            second = await ask(channel, "second")
            assert await picked(second) == b
            for gateway in (first, second):
                assert b'"choices"' in await answered(gateway)
            outcomes = [(await decision(admin, id))["outcome"] for id in ("first", "second")]
            assert outcomes == ["completed", "completed"]


async def test_a_stream_whose_pod_leaves_by_a_reload_is_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    async with model_server() as a, model_server() as b:
        path.write_text(text_of((a, "x")))
        async with watched(path) as (service, port, admin), channel_to(port) as channel:
            first = await ask(channel, "first")
            assert await picked(first) == a
            path.write_text(text_of((b, "x")))
            await until(lambda: service.config.pool.endpoints[0].address == b)
            assert b'"choices"' in await answered(first)
            assert (await decision(admin, "first"))["outcome"] == "completed"
            assert await picked(await ask(channel, "second")) == b


async def test_an_endpoint_picker_config_in_a_config_map_is_taken_over(tmp_path: Path) -> None:
    """Kubernetes swaps a symbolic link; what is asked here is the picker's policy."""
    profile = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        "- {type: label-selector-filter, parameters: {matchLabels: {tier: TIER}}}\n"
    )
    for version, tier in (("v1", "old"), ("v2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "epp.yaml").write_text(profile.replace("TIER", tier))
    (tmp_path / "..data").symlink_to("v1")
    path = tmp_path / "epp.yaml"
    path.symlink_to("..data/epp.yaml")
    async with model_server() as a, model_server() as b:
        pods = [
            {"address": a, "labels": {"tier": "old"}},
            {"address": b, "labels": {"tier": "new"}},
        ]
        above = {
            "listen": {"grpc": 0, "health": 0, "http": 0, "admin": 0},
            "pool": {"endpoints": pods},
        }

        def read() -> Config:
            return load(path, check_config, above=above).config

        async with running(read()) as (service, ports), channel_to(ports.grpc) as channel:
            task = asyncio.create_task(watch(path, read, service.reload, 0.01))
            first = await ask(channel, "first")
            assert await picked(first) == a
            (tmp_path / "..tmp").symlink_to("v2")
            (tmp_path / "..tmp").replace(tmp_path / "..data")
            await until(lambda: "new" in str(service.config.scheduling))
            assert await picked(await ask(channel, "second")) == b
            assert b'"choices"' in await answered(first)
            task.cancel()


async def test_a_bad_file_keeps_the_old_one_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    async with model_server() as a, model_server() as b:
        path.write_text(text_of((a, "x"), (b, "y"), more=only("x")))
        async with watched(path) as (service, port, admin), channel_to(port) as channel:
            taken = service.reloads.succeeded_at
            assert await metric(admin, "warmpath_config_last_reload_successful") == 1
            path.write_text(text_of((a, "x"), (b, "y"), more="scheduling: {scorers: {prefx: 1}}\n"))
            await until(lambda: service.reloads.error is not None)
            assert await metric(admin, "warmpath_config_last_reload_successful") == 0
            name = "warmpath_config_last_reload_success_timestamp_seconds"
            assert await metric(admin, name) == taken
            _, text = await get(admin, "/debug/config")
            told = json.loads(text)
            assert told["successful"] is False
            assert told["error"].startswith(f"{path}:6: scheduling.scorers.prefx: unknown scorer")
            assert await picked(await ask(channel, "first")) == a
            path.write_text("")
            await until(lambda: "is empty" in str(service.reloads.error))
            path.write_text(text_of((a, "x"), (b, "y"), more=only("y") + "usage: false\n"))
            await until(lambda: service.reloads.error is None)
            assert await metric(admin, "warmpath_config_last_reload_successful") == 1
            assert await metric(admin, name) > taken
            _, text = await get(admin, "/debug/config")
            assert json.loads(text)["waitingForRestart"] == ["usage"]
            assert await picked(await ask(channel, "second")) == b


async def test_what_is_found_to_be_impossible_late_changes_nothing() -> None:
    """Endpoints are checked by the pool, which is asked last of all that can fail."""
    async with model_server() as a, running(parse(text_of((a, "x")))) as (service, _):
        before = service.config
        for bad in (
            text_of((a, "x"), (a, "x"), more="models: [m]\n"),
            text_of(("1.2.3.4:5", "x"), more="scheduling: {scorers: {prefx: 1}}\n"),
            text_of(("1.2.3.4:5", "x"), more="metrics: {idleInterval: 10s}\n"),
            text_of(("1.2.3.4:5", "x"), more="rewrites: [{targets: []}]\n"),
        ):
            try:
                service.reload(parse(bad))
            except ValueError:
                assert service.config == before
                assert service.num_endpoints == 1
            else:
                raise AssertionError(bad)


FLOW = "flow: {{enabled: true, saturation: {{waiting: {waiting}}}, objectives: {objectives}}}\n"
HEADER = {"x_gateway_inference_objective": "batch"}


async def test_who_waits_goes_by_the_new_limits() -> None:
    async with model_server() as a:

        def config(waiting: int, **objectives: int) -> Config:
            more = FLOW.format(waiting=waiting, objectives=json.dumps(objectives))
            return parse(text_of((a, "x"), more=more))

        async with (
            running(config(1)) as (service, ports),
            channel_to(ports.grpc) as channel,
        ):
            first = await ask(channel, "first")
            assert await picked(first) == a
            second = await ask(channel, "second")
            await until(lambda: service.waiting == 1)
            service.reload(config(2))
            assert await picked(second) == a
            service.reload(config(2, batch=-1))
            refused = await ask(channel, "third", **HEADER)
            answer = await asyncio.wait_for(refused.read(), DEADLINE)
            assert answer.immediate_response.status.code == 429
            for gateway in (first, second):
                assert b'"choices"' in await answered(gateway)


async def test_a_shorter_time_to_live_holds_for_those_who_wait() -> None:
    async with model_server() as a:

        def config(ttl: str) -> Config:
            more = f"flow: {{enabled: true, ttl: {ttl}, saturation: {{waiting: 1}}}}\n"
            return parse(text_of((a, "x"), more=more))

        async with (
            running(config("1h")) as (service, ports),
            channel_to(ports.grpc) as channel,
        ):
            await picked(await ask(channel, "first"))
            second = await ask(channel, "second")
            await until(lambda: service.waiting == 1)
            service.reload(config("0s"))  # for ever
            service.reload(config("1h"))
            third = await ask(channel, "third")
            await until(lambda: service.waiting == 2)
            service.reload(config("1ms"))
            answer = await asyncio.wait_for(third.read(), DEADLINE)
            assert answer.immediate_response.status.code == 429
            assert service.waiting == 1  # it was told that it may wait for ever
            second.call.cancel()


async def test_other_pages_are_asked_for_load() -> None:
    async with (
        model_server() as a,
        model_server("mine_queue 3\n") as b,
        running(parse(text_of((a, "x")))) as (service, ports),
    ):

        async def pod() -> dict[str, Any]:
            _, text = await get(ports.admin, "/debug/state")
            found: dict[str, Any] = json.loads(text)["pool"]["pods"][0]
            return found

        async def until_pod(fits: Callable[[dict[str, Any]], bool]) -> None:
            async with asyncio.timeout(DEADLINE):
                while not fits(await pod()):  # noqa: ASYNC110  # of a page
                    await asyncio.sleep(0.01)

        port = b.rpartition(":")[2]
        more = (
            f"metrics: {{port: {port}, engine: mine, engines: {{mine: {{waiting: mine_queue}}}}}}"
        )
        service.reload(parse(text_of((a, "x"), more=more)))
        await until_pod(lambda pod: pod["waiting"] == 3)
        service.reload(parse(text_of((a, "x"), more="metrics: {path: /nothing}")))
        await until_pod(lambda pod: "404" in str(pod["scrapeError"]))
        service.reload(parse(text_of((a, "x"))))
        await until_pod(lambda pod: pod["scrapeError"] is None and pod["waiting"] == 0)


def test_what_is_in_force_is_named_key_by_key() -> None:
    old = parse("flow: {ttl: 1s, order: deadline}\ndrain: 1s\nlisten: {grpc: 1}")
    more = "identity: {header: x, required: true}"
    new = parse(
        f"flow: {{ttl: 2s}}\ndrain: 2s\nlisten: {{grpc: 2, admin: 3}}\nmaxBody: 1MiB\n{more}"
    )
    config, waiting = in_force(old, new)
    assert (config.flow.ttl, config.flow.order, config.drain) == (2, "deadline", 2)
    assert (config.listen, config.max_body) == (old.listen, old.max_body)
    assert (config.identity.header, config.identity.required) == ("x", False)
    assert waiting == [
        "listen.grpc",
        "listen.admin",
        "identity.required",
        "flow.order",
        "maxBody",
    ]
    assert in_force(old, old) == (old, [])


def test_who_turns_to_kubernetes_keeps_the_endpoints_until_a_restart() -> None:
    old = parse("pool: {endpoints: [{address: '1.2.3.4:5'}]}")
    config, waiting = in_force(old, parse("pool: {kubernetes: {pool: demo}, ignoreSubset: true}"))
    assert config.pool.endpoints == old.pool.endpoints
    assert config.pool.ignore_subset
    assert waiting == ["pool.endpoints", "pool.kubernetes"]
