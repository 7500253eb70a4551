"""One picker of several leads: by a real Lease on an API server that speaks the protocol."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
)
from grpc_health.v1.health_pb2_grpc import HealthStub

from picker.config import LeaderElection, parse
from picker.kubernetes.leader import check_settings
from picker.servers import Ports
from picker.service import Service
from tests.kubernetes_api import KubernetesApi, running_kubernetes
from tests.kubernetes_objects import inference_pool
from tests.picker.kubernetes.test_process import text_for
from tests.picker.test_service import DEADLINE, get, started

LEASE = "epp-default-demo.gateway-api-inference-extension.sigs.k8s.io"
KIND = "leases.coordination.k8s.io"
QUICK = "leaderElection: {enabled: true, duration: 1s, renewDeadline: 800ms, retry: 100ms}\n"
SLOW = "leaderElection: {enabled: true, duration: 1h, renewDeadline: 50m, retry: 100ms}\n"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with running_kubernetes() as api:
        api.apply(inference_pool())
        yield api


@asynccontextmanager
async def candidate(
    api: KubernetesApi, election: str = SLOW
) -> AsyncIterator[tuple[Service, Ports]]:
    """A picker that has synced."""
    service = Service(parse(text_for(api, more=f"{election}drainDelay: 0s\ndrain: 1s\n")))
    try:
        ports = await service.start()
        await asyncio.wait_for(service.until_ready(), DEADLINE)
        yield service, ports
    finally:
        await service.stop()


async def until(service: Service, *states: str | None) -> None:
    async with asyncio.timeout(DEADLINE):
        while service.not_ready not in states:  # noqa: ASYNC110  # of the API server
            await asyncio.sleep(0.005)


def lease(api: KubernetesApi) -> Any:
    return api.get(LEASE, "default", KIND)


def hold(api: KubernetesApi, holder: str, seconds: int = 3600, **about: Any) -> None:
    """Another holds the lease from now on."""
    with suppress(KeyError):
        about = lease(api)["metadata"] | about
    about.pop("resourceVersion", None)
    spec = {
        "holderIdentity": holder,
        "leaseDurationSeconds": seconds,
        "acquireTime": "2026-01-01T00:00:00.000000Z",
        "renewTime": "2026-01-01T00:00:00.000000Z",
        "leaseTransitions": 5,
    }
    api.apply(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": LEASE, "namespace": "default"} | about,
            "spec": spec,
        }
    )


async def test_the_first_leads_and_hands_over_when_it_drains(api: KubernetesApi) -> None:
    async with candidate(api) as (first, ports):
        await until(first, None)
        spec = lease(api)["spec"]
        assert spec["leaseDurationSeconds"] == 3600
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["acquireTime"])
        assert await get(ports.admin, "/readyz") == (200, "ok\n")
        name = f'leader_election_master_status{{name="{LEASE}"}}'
        assert f"{name} 1\n" in (await get(ports.admin, "/metrics"))[1]
        async with candidate(api) as (second, others):
            why = f"{spec['holderIdentity']} leads"
            await until(second, why)
            assert await get(others.admin, "/readyz") == (503, why + "\n")
            assert f"{name} 0\n" in (await get(others.admin, "/metrics"))[1]
            draining = asyncio.create_task(first.drain())
            await until(second, None)  # an hour before the lease ends
            assert first.not_ready == "draining"
            await draining
            spec = lease(api)["spec"]
            assert spec["leaseTransitions"] == 1
        assert lease(api)["spec"]["holderIdentity"] == ""


async def test_a_lease_of_another_is_waited_for_and_its_clock_is_not_believed(
    api: KubernetesApi,
) -> None:
    hold(api, "the reference picker\n_1", seconds=1, labels={"kept": "yes"})
    async with candidate(api, QUICK) as (service, _):
        await until(service, "the reference picker?_1 leads")  # though renewed months ago
        await until(service, None)
        found = lease(api)
        assert found["spec"]["leaseTransitions"] == 6
        assert found["metadata"]["labels"] == {"kept": "yes"}


async def test_an_api_server_that_is_away_costs_the_lead(
    api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "picker.kubernetes.leader")
    async with candidate(api, QUICK) as (service, ports):
        await until(service, None)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.health}") as channel:
            watch = HealthStub(channel).Watch(HealthCheckRequest(service="readiness"))
            assert (await watch.read()).status == HealthCheckResponse.SERVING
            api.fail(KIND, *[500] * 1000)
            assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
            why = service.not_ready
            assert why is not None
            assert "500 the server is not well" in why
            api.recover(KIND)
            assert (await watch.read()).status == HealthCheckResponse.SERVING
            watch.cancel()
    told = [record.message for record in caplog.records]
    (lost,) = [each for each in told if each.startswith("No longer leading: the lease was not")]
    assert "not renewed for 0.8 s: cannot update leases.coordination.k8s.io" in lost
    assert sum(each.startswith("Leading: Lease epp-default-demo") for each in told) == 2


async def test_who_loses_the_lease_to_another_leads_no_more(
    api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    async with candidate(api) as (service, _):
        await until(service, None)
        hold(api, "a usurper")
        await until(service, "a usurper leads")
        assert "No longer leading: a usurper has the lease" in caplog.text
        assert lease(api)["spec"]["holderIdentity"] == "a usurper"
    assert lease(api)["spec"]["holderIdentity"] == "a usurper"


async def test_of_many_that_come_at_once_one_leads(api: KubernetesApi) -> None:
    async with (
        candidate(api, QUICK) as (a, _),
        candidate(api, QUICK) as (b, _),
        candidate(api, QUICK) as (c, _),
    ):
        services = (a, b, c)
        async with asyncio.timeout(DEADLINE):
            await api.asked("update", KIND, 5)
        assert [each.not_ready for each in services].count(None) == 1
        leader = next(each for each in services if each.not_ready is None)
        await leader.stop()
        for other in services:
            if other is not leader:
                await until(other, None, *[f"{lease(api)['spec']['holderIdentity']} leads"])


async def test_what_the_role_lacks_is_said(
    api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.forbid("create", KIND)
    async with candidate(api) as (service, _):
        async with asyncio.timeout(DEADLINE):
            while "The Lease cannot be kept" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert 'resources: ["leases"], verbs: [create]' in caplog.text
        assert "forbidden to create leases" in (service.not_ready or "")
        api.permit("create", KIND)
        await until(service, None)


async def test_a_lease_that_is_none_is_an_error(api: KubernetesApi) -> None:
    hold(api, "x")
    lease(api)["spec"]["leaseDurationSeconds"] = "soon"
    async with candidate(api) as (service, _):
        await until(
            service,
            f"{LEASE} is no Lease: Expected `int | null`, got `str`"
            " - at `$.spec.leaseDurationSeconds`",
        )


async def test_a_picker_stands_for_election_when_it_could_lead(api: KubernetesApi) -> None:
    api.delete(inference_pool())
    service = Service(parse(text_for(api, more=SLOW)))
    try:
        await service.start()
        synced = asyncio.create_task(service.until_ready())
        async with asyncio.timeout(DEADLINE):
            await api.asked("watch", "inferencepools.inference.networking.k8s.io")
        assert not [each for each in api.requests if each[1] == KIND]
        api.apply(inference_pool())
        await until(service, None)
        await synced
    finally:
        await service.stop()


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"duration": 10, "renew_deadline": 10}, "leaderElection.renewDeadline must be less"),
        ({"retry": 9}, "leaderElection.retry must be less"),
    ],
)
def test_times_that_do_not_go_together(times: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_settings(LeaderElection(enabled=True, **times))
    with pytest.raises(ValueError, match=why):
        Service(
            parse("leaderElection: {enabled: true, duration: 10s}")
            if not times.get("retry")
            else parse("leaderElection: {enabled: true, retry: 9s}")
        )


# Health: what is told by whether it has synced and leads

NAMES = ("", "readiness", EXT_PROC)


@pytest.mark.parametrize(
    ("synced", "leads", "name", "status"),
    [
        *[(True, True, name, HealthCheckResponse.SERVING) for name in NAMES],
        *[(True, False, name, HealthCheckResponse.NOT_SERVING) for name in NAMES],
        (False, False, "readiness", HealthCheckResponse.NOT_SERVING),
        (False, False, EXT_PROC, HealthCheckResponse.NOT_SERVING),
        (False, False, "liveness", HealthCheckResponse.SERVING),
        (True, False, "liveness", HealthCheckResponse.SERVING),
        (True, True, "liveness", HealthCheckResponse.SERVING),
        (False, False, "inference-extension", HealthCheckResponse.NOT_SERVING),
        (True, False, "inference-extension", HealthCheckResponse.SERVING),
        (True, True, "inference-extension", HealthCheckResponse.SERVING),
    ],
)
async def test_health(
    api: KubernetesApi, synced: bool, leads: bool, name: str, status: int
) -> None:
    if not leads:
        hold(api, "another")
    if not synced:
        api.delete(inference_pool())
    service = Service(parse(text_for(api, more=SLOW)))
    try:
        ports = await service.start()
        if synced:
            await asyncio.wait_for(service.until_ready(), DEADLINE)
            await until(service, None if leads else "another leads")
        for port in (ports.health, ports.grpc):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = HealthStub(channel)
                assert (await stub.Check(HealthCheckRequest(service=name))).status == status
                assert (await stub.List(HealthListRequest())).statuses[name].status == status
                watch = stub.Watch(HealthCheckRequest(service=name))
                assert (await watch.read()).status == status
                watch.cancel()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Check(HealthCheckRequest(service="x"))
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
                watch = stub.Watch(HealthCheckRequest(service="x"))
                assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
                watch.cancel()
    finally:
        await service.stop()


async def test_watchers_are_told_when_the_pool_is_known(api: KubernetesApi) -> None:
    api.delete(inference_pool())
    service = Service(parse(text_for(api, more=SLOW)))
    try:
        ports = await service.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.health}") as channel:
            request = HealthCheckRequest(service="inference-extension")
            watch = HealthStub(channel).Watch(request)
            assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
            api.apply(inference_pool())
            await asyncio.wait_for(service.until_ready(), DEADLINE)
            assert (await watch.read()).status == HealthCheckResponse.SERVING
            watch.cancel()
    finally:
        await service.stop()


# Processes


async def test_when_the_leader_is_killed_another_leads(api: KubernetesApi, tmp_path: Path) -> None:
    path = tmp_path / "warmpath.yaml"
    path.write_text(text_for(api, more=QUICK))
    running: list[tuple[asyncio.subprocess.Process, int]] = []
    try:
        for _ in range(2):
            process, lines = await started(path)
            running.append((process, int(lines[-1].split("http://127.0.0.1:")[1].split()[0])))
        leader = await ready_one(running)
        process, _ = running.pop(leader)
        before = lease(api)["spec"]["holderIdentity"]
        process.send_signal(signal.SIGKILL)
        await process.wait()
        assert await ready_one(running) == 0
        assert lease(api)["spec"]["holderIdentity"] != before
        process, port = running[0]
        process.send_signal(signal.SIGSTOP)  # it believes no more than its clock allows
        hold(api, "another")
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(DEADLINE):
            while (await get(port, "/readyz"))[0] == 200:
                pass
    finally:
        for process, _ in running:
            process.kill()
            await process.wait()


async def ready_one(running: list[tuple[asyncio.subprocess.Process, int]]) -> int:
    """Which one of some processes is ready, once one is."""
    async with asyncio.timeout(DEADLINE):
        while True:
            ready = [(await get(port, "/readyz"))[0] == 200 for _, port in running]
            assert sum(ready) <= 1
            if any(ready):
                return ready.index(True)
            await asyncio.sleep(0.02)
