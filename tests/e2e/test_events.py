"""Real workers behind real Envoy: the picker knows what each of them holds, whatever happens."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from picker.config import Prefix
from tests.e2e.gateway import CHAT, JSON, Gateway, running_gateway, until
from tests.e2e.picker_process import running_site
from tests.e2e.workers import BLOCK, WorkerProcess, blocks_held, running_workers
from text.models import resolve

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
FEW = ("--num-blocks", "160")
EVENTS = Prefix(mode="events", tokenizer="simulated")
MODEL = "smollm2-135m"
EVENTS_YAML = "prefix: {mode: events, tokenizer: simulated}\n"


@pytest.fixture(scope="module", params=["standard", "lean"])
def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[list[WorkerProcess]]:
    """With little memory."""
    async with running_workers(FEW, FEW) as workers:
        yield workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roomy() -> AsyncIterator[list[WorkerProcess]]:
    """With as much memory as they want."""
    async with running_workers([], []) as workers:
        yield workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(profile: str, workers: list[WorkerProcess]) -> AsyncIterator[Gateway]:
    async with gateway_of(workers, profile=profile, prefix=EVENTS) as gateway:
        yield gateway


@asynccontextmanager
async def gateway_of(workers: Sequence[WorkerProcess], **settings: Any) -> AsyncIterator[Gateway]:
    addresses = [worker.address for worker in workers]
    async with running_gateway(pods=0, addresses=addresses, **settings) as gateway:
        yield gateway


class Chat:
    """A conversation that grows turn by turn."""

    def __init__(self, http: aiohttp.ClientSession, system: str) -> None:
        self.prompt_tokens = self.cached_tokens = 0  # of the last turn
        self.request_id = ""
        self._http = http
        self._messages = [{"role": "system", "content": system}]

    async def say(self, text: str) -> None:
        """One more turn; asked again while there is no picker."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self._messages, "max_tokens": 24, "ignore_eos": True}
        while (answer := await self._ask(json.dumps(body))) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._messages.append(answer["choices"][0]["message"])
        self.prompt_tokens = answer["usage"]["prompt_tokens"]
        self.cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def _ask(self, body: str) -> Any:
        self.request_id = uuid.uuid4().hex
        headers = JSON | {"x-request-id": self.request_id}
        async with self._http.post(CHAT, data=body, headers=headers) as response:
            if response.headers.get("x-warmpath-refused") == "no_picker":
                return None
            assert response.status == 200, await response.text()
            return await response.json()


async def complete(http: aiohttp.ClientSession, prompt: str, request_id: str = "") -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    headers = JSON | ({"x-request-id": request_id} if request_id else {})
    async with http.post(COMPLETIONS, data=json.dumps(body), headers=headers) as response:
        assert response.status == 200, await response.text()


async def index(gateway: Gateway) -> Any:
    async with gateway.admin.get("/debug/index") as response:
        assert response.status == 200
        return await response.json()


async def held(gateway: Gateway, worker: WorkerProcess) -> int:
    """Blocks of a worker, as the picker knows."""
    pods = {pod["address"]: pod for pod in (await index(gateway))["pods"]}
    publishers = pods[worker.address]["publishers"]
    return sum(sum(each["held"].values()) for each in publishers)


async def found(gateway: Gateway, prompt: str) -> dict[str, int]:
    """Leading blocks of a prompt by pod, as the picker knows."""
    body = json.dumps({"prompt": prompt})
    async with gateway.admin.post(
        "/debug/lookup", data=body, params={"path": COMPLETIONS}
    ) as response:
        assert response.status == 200
        return {pod["address"]: pod["blocks"] for pod in (await response.json())["pods"]}


async def agree(gateway: Gateway, workers: list[WorkerProcess], prompts: list[str]) -> None:
    """Wait until the picker knows what each worker holds: as many blocks, and of each prompt."""

    async def differing() -> list[Any]:
        wrong: list[Any] = []
        for worker in workers:
            prefixes = await worker.holds()
            if (known := await held(gateway, worker)) != len(prefixes):
                wrong.append((worker.address, known, len(prefixes)))
            for prompt in prompts:
                truth = blocks_held(prefixes, prompt.encode())
                if (await found(gateway, prompt))[worker.address] != truth:
                    wrong.append((worker.address, prompt, truth))
        return wrong

    await gateway.idle()
    await until(differing, [])


def texts(seed: int, count: int) -> Iterator[str]:
    """Prompts of about 30 blocks, half of which they have in common with some others."""
    chosen = random.Random(seed)
    stems = [f"{seed}-{stem} " + "".join(chosen.choices("abcdef ", k=240)) for stem in range(4)]
    for number in range(count):
        yield f"{chosen.choice(stems)} {number} " + "".join(chosen.choices("ghijkl ", k=240))


async def test_the_index_is_what_each_worker_holds(
    gateway: Gateway, workers: list[WorkerProcess]
) -> None:
    one, other = workers
    prompts = list(texts(1, 32))
    for prompt in prompts:  # more than there is room for
        await complete(gateway.http, prompt)
    changes = (await index(gateway))["index"]["changes"]
    assert changes["stored"] > 2 * 160
    assert changes["removed"] > 100
    await agree(gateway, workers, prompts)

    await one.reset()
    await agree(gateway, workers, prompts)
    assert await held(gateway, one) == 0 < await held(gateway, other)

    for worker, end in ((one, one.stop), (other, other.kill)):
        await asyncio.gather(*(complete(gateway.http, prompt) for prompt in prompts[:8]))
        await gateway.idle()
        await end()
        await until(lambda worker=worker: held(gateway, worker), 0)
        for prompt in prompts[:4]:  # the other one serves
            await complete(gateway.http, prompt)
        await worker.start()
        await agree(gateway, workers, prompts)
        for prompt in texts(2, 8):
            await complete(gateway.http, prompt)
        await agree(gateway, workers, prompts)


async def test_predictions_come_true(profile: Any, roomy: list[WorkerProcess]) -> None:
    """Of chats side by side, some of which begin like earlier ones."""
    async with gateway_of(roomy, profile=profile, prefix=EVENTS) as gateway:
        cached = []

        async def hold(number: int) -> None:
            chat = Chat(gateway.http, f"You are number {number}. " * 8)
            for turn in range(5):
                await chat.say(f"Question {number}.{turn}?")
                cached.append(chat.cached_tokens)

        for _ in range(6):
            await asyncio.gather(*map(hold, range(8)))
        await gateway.idle()
        results = (await index(gateway))["predictions"]["events"]
        assert sum(results.values()) == len(cached) == 240
        assert results["exact"] >= 0.99 * len(cached)
        assert sum(map(bool, cached)) > 0.9 * len(cached)  # so that there was something to predict


async def test_a_burst_of_equal_prompts_stays_on_one_pod(
    gateway: Gateway, workers: list[WorkerProcess]
) -> None:
    """Also those that come before the first of them is computed."""
    for worker in workers:
        await worker.reset()
    await agree(gateway, workers, [])
    prompt = "Once more. " * 180
    names = [f"burst-{number}" for number in range(5)]
    await asyncio.gather(*(complete(gateway.http, prompt, name) for name in names))
    picked = [await gateway.decision(name) for name in names]
    assert len({each["endpoint"] for each in picked}) == 1
    assert [each["matchedBlocks"] > 0 for each in picked].count(False) == 1
    await agree(gateway, workers, [prompt])


async def test_a_restarted_picker_learns_all_again_under_load(
    profile: Any, roomy: list[WorkerProcess], tmp_path: Path
) -> None:
    addresses = [worker.address for worker in roomy]
    async with running_site(profile, tmp_path, addresses=addresses, more=EVENTS_YAML) as site:
        # So long that no chat leaves its pod for a less busy one.
        chats = [Chat(site.http, f"You are the {number}th. " * 160) for number in range(8)]
        warm, restarted = asyncio.Event(), asyncio.Event()

        async def hold(chat: Chat) -> None:
            await chat.say("Hello.")
            turns_after = 0
            while turns_after < 3:
                warm.set()
                turns_after += restarted.is_set()
                before = chat.prompt_tokens
                await chat.say("Go on.")
                assert chat.cached_tokens >= before // BLOCK * BLOCK

        async with asyncio.TaskGroup() as group:
            for chat in chats:
                group.create_task(hold(chat))
            await warm.wait()
            await site.picker.kill()
            await site.picker.start()
            restarted.set()


@pytest.mark.parametrize("tokenizer", ["pods", "gguf"])
async def test_prompts_have_the_tokens_that_the_model_sees(tokenizer: str) -> None:
    """Of a real model's tokenizer and chat template: asked from the pods, or read from its file."""
    if tokenizer == "gguf":
        (file,) = resolve(MODEL).glob("*.gguf")
        tokenizer = str(file)
    prefix = Prefix(mode="events", tokenizer=tokenizer)
    async with (
        running_workers(["--model", MODEL]) as workers,
        gateway_of(workers, prefix=prefix) as gateway,
    ):
        chat = Chat(gateway.http, "You are the guide of a small museum by the sea. " * 10)
        for text in ("When do you open?", "¿Y el sábado?", "Tickets: 3 for £4?"):
            before = chat.prompt_tokens
            await chat.say(text)
            await gateway.idle()
            told = await gateway.decision(chat.request_id)
            assert told["matchedBy"] == "events"
            assert told["promptTokens"] == chat.prompt_tokens
            assert told["predictedTokens"] == chat.cached_tokens
            assert chat.cached_tokens >= before // BLOCK * BLOCK
        missed = (await index(gateway))["missedTokens"]
        assert not any(missed.values())


async def test_a_pod_without_events_is_matched_by_what_was_sent_to_it() -> None:
    async with (
        running_workers(["--no-kv-events"], []) as workers,
        gateway_of(workers, prefix=EVENTS) as gateway,
    ):
        silent, telling = workers
        pods = {pod["address"]: pod for pod in (await index(gateway))["pods"]}
        assert pods[silent.address]["publishers"] == []
        assert "no KV events" in pods[silent.address]["trouble"]
        connected = "warmpath_pod_events_connected"
        for worker, known in ((silent, 0), (telling, 1)):
            assert await gateway.metric(connected, f'endpoint="{worker.address}"') == known
        chats = [Chat(gateway.http, f"You are the {number}th. " * 20) for number in range(6)]
        by: dict[str, set[str]] = {}
        for turn in range(3):
            for chat in chats:
                before = chat.prompt_tokens
                await chat.say(f"Question {turn}?")
                await gateway.idle()
                told = await gateway.decision(chat.request_id)
                by.setdefault(told["endpoint"], set()).add(told["matchedBy"])
                assert chat.cached_tokens >= before // BLOCK * BLOCK  # it stayed where it was
                assert told["predictedTokens"] >= before / 4
        assert by == {silent.address: {"approximate"}, telling.address: {"events"}}
