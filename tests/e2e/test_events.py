"""Real workers behind real Envoy: the picker knows what each of them holds, whatever happens."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from picker.config import Prefix
from tests.e2e.gateway import CHAT, JSON, Gateway, running_gateway, until
from tests.e2e.picker_process import PickerProcess, Profile
from tests.e2e.workers import WorkerProcess, blocks_held, running_workers

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
FEW = ("--num-blocks", "96")
EVENTS = Prefix(mode="events", tokenizer="simulated")


@pytest.fixture(scope="module", params=["standard", "lean"])
def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[list[WorkerProcess]]:
    async with running_workers(FEW, FEW) as workers:
        yield workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(profile: str, workers: list[WorkerProcess]) -> AsyncIterator[Gateway]:
    addresses = [worker.address for worker in workers]
    async with running_gateway(
        pods=0, addresses=addresses, profile=profile, prefix=EVENTS
    ) as gateway:
        yield gateway


async def complete(http: aiohttp.ClientSession, prompt: str, **fields: Any) -> Any:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    async with http.post(COMPLETIONS, data=json.dumps(body), headers=JSON) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def converse(http: aiohttp.ClientSession, messages: list[dict[str, str]], text: str) -> Any:
    """One more turn of a chat; the usage of the answer."""
    messages.append({"role": "user", "content": text})
    body = {"model": "m", "messages": messages, "max_tokens": 24, "ignore_eos": True}
    async with http.post(CHAT, data=json.dumps(body), headers=JSON) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    messages.append(answer["choices"][0]["message"])
    return answer["usage"]


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
    prompts = list(texts(1, 24))
    for prompt in prompts:  # several times of what fits
        await complete(gateway.http, prompt)
    before = (await index(gateway))["index"]["changes"]
    assert before["stored"] > 2 * 96
    assert before["removed"] > 96
    await agree(gateway, workers, prompts)

    await one.reset()
    await agree(gateway, workers, prompts)
    assert await held(gateway, one) == 0 < await held(gateway, other)

    for again in (one.stop, other.kill):
        await asyncio.gather(*(complete(gateway.http, prompt) for prompt in prompts[:8]))
        await gateway.idle()
        await again()
        worker = one if again == one.stop else other
        await until(lambda worker=worker: held(gateway, worker), 0)
        for prompt in prompts[:4]:  # the other one serves
            await complete(gateway.http, prompt)
        await worker.start()
        await agree(gateway, workers, prompts)
        for prompt in texts(2, 8):
            await complete(gateway.http, prompt)
        await agree(gateway, workers, prompts)
