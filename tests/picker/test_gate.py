"""Identity, quotas and flow control together, over the real parts: what callers and books see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from picker.config import (
    Config,
    Flow,
    Identity,
    Quota,
    Rewrite,
    RewriteTarget,
    Saturation,
)
from picker.director import Outcome, Pick
from picker.engines import LoadReport
from picker.journal import detail
from picker.quota.editor import Editor, Why
from picker.quota.model import parse_limit
from picker.quota.store_memory import MemoryStore
from picker.quota.views import views
from picker.refusal import Refusal
from picker.service import check_config
from picker.usage import Usage
from tests.picker.core import Core

PODS = ["10.0.0.1:8000", "10.0.0.2:8000"]
TENANT = "x-tenant"
LIMITS = ("requests=1M/day", "total-tokens=100M/day", "concurrency=1M")
MAX_TOKENS = 50


class House:
    """A picker without servers, and its books."""

    def __init__(self, pods: list[str], *, inflight: int = 0, **more: Any) -> None:
        """`inflight`: requests that a pod takes at a time; 0: there is no flow control."""
        config = Config(
            identity=Identity(header=TENANT, keys=True),
            quota=Quota(enabled=True, store="memory:"),
            flow=Flow(enabled=inflight > 0, saturation=Saturation(inflight=max(1, inflight))),
        )
        self.core = Core(pods, gate=config, **more)
        assert self.core.gate is not None
        self.gate = self.core.gate

    async def open(self) -> House:
        await self.gate.start(MemoryStore)
        assert self.gate.store is not None
        self.editor = Editor(self.gate.store, "test")
        return self

    async def limit(self, tenant: str, *limits: str) -> None:
        await self.editor.set(f"tenant/{tenant}", [parse_limit(each) for each in limits], why=Why())

    async def ask(self, tenant: str = "alice", **fields: object) -> Pick:
        """A request, until it is picked."""
        headers = {"content-type": "application/json", TENANT: tenant}
        for name in ("x-gateway-inference-objective", "authorization"):
            headers |= {name: str(fields.pop(name))} if name in fields else {}
        body = {"model": "llama", "prompt": "Hello, world!", "max_tokens": MAX_TOKENS, **fields}
        pick = self.core.director.route(
            "POST", "/v1/completions", headers, json.dumps(body).encode()
        )
        return pick if isinstance(pick, Pick) else await pick

    async def used(self, limit: str = "total-tokens/day", tenant: str = "alice") -> tuple[int, int]:
        """Settled and reserved."""
        await self.gate.settled()
        store = self.gate.store
        assert store is not None
        found = await views(store, await self.editor.read(), f"tenant/{tenant}")
        (view,) = [each for each in found if each.limit.name == limit]
        return round(view.used - view.reserved), view.reserved

    async def faults(self) -> list[object]:
        """Where a counter is not what was settled and what is reserved."""
        await self.gate.settled()
        assert self.gate.store is not None
        return list(await self.gate.store.verify())

    @property
    def running(self) -> int:
        assert self.gate.flow is not None
        return self.gate.flow.running

    @property
    def waiting(self) -> int:
        assert self.gate.flow is not None
        return self.gate.flow.waiting

    def generated(self, pick: Pick, tokens: int) -> None:
        """Its pod tells that it has generated so many in all."""
        report = LoadReport(waiting=0, running=1, kv_usage=0.0, generated=tokens)
        self.core.load.report(pick.endpoint, report, self.core.now)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Two pods, and quotas alone."""
    house = await House(PODS).open()
    await house.limit("alice", *LIMITS)
    yield house
    await house.gate.stop()


@pytest.fixture
async def queueing() -> AsyncIterator[House]:
    """One pod that takes one request at a time, and quotas."""
    house = await House(PODS[:1], inflight=1, models=["llama"]).open()
    await house.limit("alice", *LIMITS)
    yield house
    await house.gate.stop()


async def soon(work: Coroutine[Any, Any, Pick]) -> asyncio.Task[Pick]:
    """Run it as far as it goes without anybody else."""
    task = asyncio.create_task(work)
    for _ in range(20):
        await asyncio.sleep(0)
    return task


async def test_a_request_reserves_and_its_end_settles_what_it_used(house: House) -> None:
    pick = await house.ask()
    prompt = pick.prompt_tokens
    assert await house.used() == (0, prompt + MAX_TOKENS)
    assert await house.used("concurrency") == (0, 1)
    told = dict(pick.client_headers)
    assert told["x-ratelimit-remaining-requests"] == "999999"
    assert told["x-ratelimit-remaining-tokens"] == str(100_000_000 - prompt - MAX_TOKENS)
    pick.response_started(200)
    pick.end(Outcome.COMPLETED, Usage(9, 0, 5))
    assert await house.used() == (14, 0)
    assert await house.used("requests/day") == (1, 0)
    assert await house.used("concurrency") == (0, 0)


async def test_it_ends_once(queueing: House) -> None:
    pick = await queueing.ask()
    passage = pick.passage
    assert passage is not None
    pick.end(Outcome.COMPLETED, Usage(9, 0, 5))
    pick.end(Outcome.ABORTED)
    passage.left(Usage(1000, 0, 1000))
    assert await queueing.used() == (14, 0)
    assert queueing.running == 0


@pytest.mark.parametrize("streamed", [0, 3])
async def test_who_leaves_pays_the_prompt_and_what_it_saw(house: House, streamed: int) -> None:
    pick = await house.ask(stream=True)
    pick.response_started(200)
    for _ in range(streamed):
        pick.streamed(1)
    pick.end(Outcome.ABORTED)
    pick.streamed(100)
    assert await house.used() == (pick.prompt_tokens + streamed, 0)


async def test_who_leaves_pays_what_its_pod_made_that_nobody_saw_pass(house: House) -> None:
    pick = await house.ask()
    house.generated(pick, 1000)
    house.generated(pick, 1007)
    pick.end(Outcome.ABORTED)
    assert await house.used() == (pick.prompt_tokens + 7, 0)


async def test_what_passes_is_not_estimated_too(house: House) -> None:
    pick = await house.ask(stream=True)
    house.generated(pick, 1000)
    house.generated(pick, 1004)
    for _ in range(6):
        pick.streamed(1)
    house.generated(pick, 1030)
    pick.end(Outcome.ABORTED)
    assert await house.used() == (pick.prompt_tokens + 6, 0)


async def test_no_estimate_is_above_what_the_request_allows(house: House) -> None:
    pick = await house.ask()
    house.generated(pick, 0)
    house.generated(pick, 10_000)
    pick.end(Outcome.ABORTED)
    assert await house.used() == (pick.prompt_tokens + MAX_TOKENS, 0)


async def test_whom_a_pod_failed_pays_nothing(house: House) -> None:
    for status, outcome in ((500, Outcome.FAILED), (429, Outcome.COMPLETED)):
        pick = await house.ask()
        pick.response_started(status)
        pick.end(outcome, Usage(9, 0, 5))
        assert await house.used() == (0, 0)
        assert await house.used("requests/day") == (0, 0)


async def test_a_wrong_request_is_a_request_and_costs_no_tokens(house: House) -> None:
    pick = await house.ask()
    pick.response_started(400)
    pick.end(Outcome.COMPLETED)
    assert await house.used() == (0, 0)
    assert await house.used("requests/day") == (1, 0)


async def test_what_makes_no_tokens_reserves_none_and_does_not_queue(queueing: House) -> None:
    first = await queueing.ask()  # all that the pod takes
    before = await queueing.used()
    pick = queueing.core.director.route("GET", "/v1/models", {TENANT: "alice"}, None)
    pick = pick if isinstance(pick, Pick) else await pick
    assert (await queueing.used()) == before
    pick.response_started(200)
    pick.end(Outcome.COMPLETED)
    assert (await queueing.used()) == before
    assert (await queueing.used("requests/day")) == (1, 1)
    first.end(Outcome.COMPLETED, Usage(1, 0, 1))


async def test_a_batch_reserves_for_each_of_its_prompts(house: House) -> None:
    pick = await house.ask(prompt=["one", "two", "three"], n=2)
    assert (await house.used())[1] == pick.prompt_tokens + 3 * 2 * MAX_TOKENS
    pick.end(Outcome.ABORTED)


async def test_an_answer_that_tells_no_usage_costs_what_was_reserved(house: House) -> None:
    pick = await house.ask()
    pick.response_started(200)
    pick.end(Outcome.COMPLETED)
    assert await house.used() == (pick.prompt_tokens + MAX_TOKENS, 0)
    pick = await house.ask(stream=True)
    pick.response_started(200)
    for _ in range(3):
        pick.streamed(2)
    pick.end(Outcome.COMPLETED)
    assert await house.used() == (2 * pick.prompt_tokens + MAX_TOKENS + 6, 0)


async def test_the_estimate_of_a_request_that_another_pod_serves_goes_on_there(
    house: House,
) -> None:
    pick = await house.ask()
    house.generated(pick, 0)
    house.generated(pick, 4)
    served = next(address for address in PODS if address != pick.endpoint.address)
    pick.response_started(200, served)
    assert pick.endpoint.address == served
    house.generated(pick, 500)
    house.generated(pick, 510)
    pick.end(Outcome.ABORTED)
    assert await house.used() == (pick.prompt_tokens + 10, 0)


async def test_a_refused_request_holds_nothing(house: House) -> None:
    await house.limit("alice", "requests=0/day")
    with pytest.raises(Refusal) as caught:
        await house.ask()
    assert (caught.value.status, caught.value.reason) == (429, "quota_exceeded")
    assert await house.used() == (0, 0)
    assert 'warmpath_refusals_total{reason="quota_exceeded",status="429"} 1' in house.core.page()


async def test_an_unknown_key_is_refused_before_anything_is_reserved(house: House) -> None:
    with pytest.raises(Refusal) as caught:
        await house.ask(authorization="Bearer wrong")
    assert (caught.value.status, caught.value.reason) == (401, "invalid_api_key")
    assert await house.used() == (0, 0)


async def test_a_new_key_is_known_at_once_and_names_its_tenant(house: House) -> None:
    _, secret = await house.editor.create_key("tenant/alice", why=Why())
    pick = await house.ask("somebody", authorization=f"Bearer {secret}")
    assert pick.tenant == "alice"
    assert (await house.used())[1] == pick.prompt_tokens + MAX_TOKENS


async def test_a_pick_that_fails_gives_all_back(queueing: House) -> None:
    with pytest.raises(Refusal) as caught:
        await queueing.ask(model="unknown")
    assert caught.value.reason == "model_not_found"
    assert await queueing.used() == (0, 0)
    assert queueing.running == 0


async def test_the_queue_refuses_and_the_quota_gets_all_back(queueing: House) -> None:
    first = await queueing.ask()
    waiting = await soon(queueing.ask())
    assert (await queueing.used("requests/day")) == (0, 2)
    assert queueing.gate.flow is not None
    queueing.gate.flow.close()
    with pytest.raises(Refusal) as caught:
        await waiting
    assert (caught.value.status, caught.value.reason) == (503, "draining")
    assert (await queueing.used("requests/day")) == (0, 1)
    first.end(Outcome.COMPLETED, Usage(1, 0, 1))
    assert (queueing.running, queueing.waiting) == (0, 0)


async def test_who_leaves_the_queue_gets_all_back(queueing: House) -> None:
    first = await queueing.ask()
    waiting = await soon(queueing.ask())
    assert (queueing.waiting, queueing.running) == (1, 1)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert (queueing.waiting, queueing.running) == (0, 1)
    assert (await queueing.used("requests/day")) == (0, 1)
    first.end(Outcome.COMPLETED, Usage(1, 0, 1))


async def test_who_leaves_when_its_turn_has_come_gets_all_back(queueing: House) -> None:
    first = await queueing.ask()
    leaving, last = await soon(queueing.ask()), await soon(queueing.ask())
    first.end(Outcome.COMPLETED, Usage(1, 0, 1))
    leaving.cancel()  # it was let go, but does not know yet
    with suppress(asyncio.CancelledError):
        await leaving
    assert (await last).endpoint.address == PODS[0]
    assert (queueing.waiting, queueing.running) == (0, 1)
    assert (await queueing.used("requests/day")) == (1, 1)
    (await last).end(Outcome.COMPLETED, Usage(1, 0, 1))


async def test_a_pick_tells_whose_it_was_and_how_long_it_waited(queueing: House) -> None:
    first = await queueing.ask()
    waiting = await soon(queueing.ask("bob"))
    first.end(Outcome.COMPLETED, Usage(1, 0, 1))
    second = await waiting
    second.end(Outcome.COMPLETED, Usage(1, 0, 1))
    assert (first.tenant, first.waited) == ("alice", 0.0)
    told = detail(second)
    assert told["tenant"] == "bob"
    assert told["waitedSeconds"] > 0
    assert second.passage is None, "the journal keeps picks for long"


async def test_flow_is_charged_what_an_unseen_answer_is_estimated_to_have(
    queueing: House,
) -> None:
    """Else a client that leaves before its answer ends would get it for nothing."""
    pick = await queueing.ask()
    queueing.generated(pick, 0)
    queueing.generated(pick, 20)
    pick.end(Outcome.ABORTED)
    assert queueing.gate.flow is not None
    (band,) = queueing.gate.flow.bands
    counter = band.vtc.find("alice")
    assert counter is not None
    assert counter.service == pick.prompt_tokens + 2 * 20


class StillLoop(asyncio.SelectorEventLoop):
    """No time passes, so that the same steps do the same each time."""

    def time(self) -> float:
        return 1000.0


class Interleavings(RuleBasedStateMachine):
    """Requests come, wait, leave, are picked, move and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = StillLoop()
        self.house = House(PODS, inflight=2, seed=0)
        self.do(self.house.open())
        for tenant in ("alice", "bob"):
            self.do(self.house.limit(tenant, "requests=12/day", "concurrency=5", *LIMITS[1:2]))
        self.tasks: list[asyncio.Task[Pick]] = []  # that nobody has looked at since they came
        self.picks: list[Pick] = []  # that have not ended

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def now(self, work: Callable[[], object]) -> None:
        """Call what needs the loop, but does not wait."""

        async def called() -> None:
            work()

        self.do(called())

    def settle(self) -> None:
        """Let all that can go on do so, and look what became of it."""

        async def turns() -> None:
            for _ in range(30):
                await asyncio.sleep(0)
            await self.house.gate.settled()

        self.do(turns())
        for task in [each for each in self.tasks if each.done()]:
            self.tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                self.picks.append(task.result())
            elif not task.cancelled():
                assert isinstance(task.exception(), Refusal)

    @rule(tenant=st.sampled_from(["alice", "bob", "carol"]), stream=st.booleans())
    def ask(self, tenant: str, stream: bool) -> None:
        self.tasks.append(self.loop.create_task(self.house.ask(tenant, stream=stream)))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tasks), "who").cancel()

    @precondition(lambda self: self.picks)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(list(Outcome)),
        usage=st.none() | st.builds(Usage, st.integers(0, 99), st.just(0), st.integers(0, 99)),
    )
    def end(self, data: st.DataObject, outcome: Outcome, usage: Usage | None) -> None:
        pick = data.draw(st.sampled_from(self.picks), "which")
        self.picks.remove(pick)
        self.now(lambda: pick.end(outcome, usage))
        pick.end(Outcome.ABORTED)

    @precondition(lambda self: self.picks)
    @rule(data=st.data(), tokens=st.integers(1, 9), address=st.sampled_from(PODS))
    def answer(self, data: st.DataObject, tokens: int, address: str) -> None:
        pick = data.draw(st.sampled_from(self.picks), "which")
        self.now(lambda: pick.response_started(200, address))
        self.now(lambda: pick.streamed(tokens))

    @rule(address=st.sampled_from(PODS), waiting=st.integers(0, 6), generated=st.integers(0, 999))
    def tell(self, address: str, waiting: int, generated: int) -> None:
        report = LoadReport(waiting=waiting, running=0, kv_usage=0.0, generated=generated)
        core = self.house.core
        self.now(lambda: core.load.report(core.endpoint(address), report, core.now))

    @rule()
    def go_on(self) -> None:
        self.settle()

    @invariant()
    def all_is_counted(self) -> None:
        self.settle()
        house = self.house
        assert (house.running, house.waiting) == (len(self.picks), len(self.tasks))
        assert sum(requests for requests, _ in house.core.inflight()) == len(self.picks)
        assert self.do(house.faults()) == []
        for tenant in ("alice", "bob"):
            held = [pick for pick in self.picks if pick.tenant == tenant]
            _, reserved = self.do(house.used("concurrency", tenant))
            assert len(held) <= reserved <= min(5, len(held) + len(self.tasks))
        assert house.gate.store is not None
        reservations = self.do(house.gate.store.reservations())
        assert len(reservations) <= len(self.picks) + len(self.tasks)

    def teardown(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.settle()
        for pick in self.picks:
            self.now(partial(pick.end, Outcome.COMPLETED))
        self.settle()
        assert (self.house.running, self.house.waiting) == (0, 0)
        assert self.do(self.house.faults()) == []
        assert self.house.gate.store is not None
        assert self.do(self.house.gate.store.reservations()) == []
        self.do(self.house.gate.stop())
        self.loop.close()


Interleavings.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestInterleavings = Interleavings.TestCase


async def test_without_a_queue_picks_and_bodies_are_left_as_they_are() -> None:
    """As the reference picker without flow control: only what is sheddable notices."""
    flow = Flow(enabled=True, queue=False, objectives={"batch": -1})
    core = Core(PODS, gate=Config(flow=flow, usage=False), scorers={"kv": 1.0}, seed=1)
    full = core.endpoint(PODS[0])
    core.load.report(full, LoadReport(waiting=9, running=1, kv_usage=0.1), core.now)
    core.load.report(core.endpoint(PODS[1]), LoadReport(0, 1, 0.5), core.now)
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    headers = {"content-type": "application/json"}

    async def ask(**more: str) -> Pick:
        named = {name.replace("_", "-"): value for name, value in more.items()}
        picking = core.director.route("POST", "/v1/completions", headers | named, body)
        return picking if isinstance(picking, Pick) else await picking

    pick = await ask()
    assert pick.endpoint is full  # which its scores say, although another has room
    assert pick.splice is None  # nobody counts its usage
    core.load.report(core.endpoint(PODS[1]), LoadReport(9, 1, 1.0), core.now)
    with pytest.raises(Refusal) as refused:
        await ask(x_gateway_inference_objective="batch")
    assert refused.value.status == 429
    assert (await ask()).endpoint is full


async def test_limits_are_for_the_model_that_is_asked_for(house: House) -> None:
    """Whatever it is sent as, which changes from request to request."""
    targets = [RewriteTarget(model="target"), RewriteTarget(model="canary")]
    house.core.director.rewrites.update([Rewrite(models=["llama"], targets=targets)])
    limits = {"llama": "requests=3/day", "target": "requests=1/day", "canary": "requests=1/day"}
    for model, limit in limits.items():
        of_model = msgspec.structs.replace(parse_limit(limit), model=model)
        await house.editor.set("tenant/alice", [of_model], why=Why())
    for _ in range(3):
        (await house.ask()).end(Outcome.COMPLETED)
    with pytest.raises(Refusal) as refusal:
        await house.ask()
    assert refusal.value.status == 429


def test_keys_that_nobody_could_know_are_no_configuration() -> None:
    for more in (Config(), Config(flow=Flow(enabled=True))):
        config = replace(more, identity=Identity(keys=True))
        with pytest.raises(ValueError, match=r"identity\.keys.*quota\.enabled"):
            check_config(config)


async def test_who_must_tell_who_it_is_need_not_be_limited() -> None:
    config = Config(identity=Identity(header=TENANT, required=True), usage=False)
    check_config(config)
    core = Core(PODS, gate=config)
    assert core.gate is not None
    await core.gate.start(MemoryStore)
    body = json.dumps({"model": "llama", "prompt": "Hi"}).encode()

    async def ask(headers: dict[str, str]) -> Pick:
        pick = core.director.route("POST", "/v1/completions", headers, body)
        return pick if isinstance(pick, Pick) else await pick

    with pytest.raises(Refusal) as caught:
        await ask({})
    assert caught.value.status == 401
    pick = await ask({TENANT: "a"})
    assert pick.tenant == "a"
    pick.end(Outcome.ABORTED)
