"""`warmpath up` from start to Ctrl-C."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from picker.names import SERVED_BY
from picker.up import cluster, show
from picker.up.cluster import HOST, CannotStart, Plan
from picker.up.demo import Answer, Route, Served, converse, prompts
from picker.up.processes import Child, ChildFailed

START_SECONDS = 300.0  # a large model on a slow disk
EVENTS_SECONDS = 60.0  # from when all are ready
POLL_SECONDS = 0.05


async def run(plan: Plan, console: Console, *, demo: bool) -> None:
    """Start everything, show the demo, serve until a signal, stop everything.

    Raises:
        CannotStart, ChildFailed, DemoFailed: why not, in a line.
    """
    children: list[Child] = []
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stopping, children)
    directory = Path(tempfile.mkdtemp(prefix="warmpath-up-"))
    try:
        workers = cluster.workers(plan, directory)
        pickers = cluster.pickers(plan, directory)
        envoy = cluster.envoy(plan, directory)
        children += [*workers, *pickers, envoy]
        await _until(stopping, _serve(plan, workers, pickers, envoy, console, demo=demo))
        console.print("Stopping")
    except ChildFailed as failed:
        raise ChildFailed(f"{failed}\nThe logs are in {directory}") from None
    finally:
        for child in reversed(children):  # clients leave before those who serve them
            child.signal(signal.SIGTERM)
        await asyncio.gather(*(child.stop() for child in children))
    shutil.rmtree(directory, ignore_errors=True)


def _on_signal(stopping: asyncio.Event, children: Sequence[Child]) -> None:
    """The first signal stops in order; a second one ends everything at once."""
    if stopping.is_set():
        for child in children:
            child.signal(signal.SIGKILL)
    stopping.set()


async def _until(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Run `work` until it fails or a signal came."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        stopped.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


async def _serve(
    plan: Plan,
    workers: Sequence[Child],
    pickers: Sequence[Child],
    envoy: Child,
    console: Console,
    *,
    demo: bool,
) -> None:
    async with aiohttp.ClientSession() as http:
        with show.StartProgress(console) as progress:
            await _start([*workers, *pickers], http, progress)
            await _hear_events(plan, http)
            await _start([envoy], http, progress)  # Envoy asks at once if the picker is well
        if demo:
            await _demonstrate(plan, http, console)
        show.places(plan, console)
        await _watch(workers, pickers, envoy, console)


async def _start(
    children: Sequence[Child], http: aiohttp.ClientSession, progress: show.StartProgress
) -> None:
    """Start all at once; each is waited for, and the first failure ends the start."""

    async def ready(child: Child) -> None:
        await child.until_ready(http, START_SECONDS)
        progress.ready(child)

    for child in children:
        await child.start()
        progress.starting(child)
    try:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(ready(child))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _hear_events(plan: Plan, http: aiohttp.ClientSession) -> None:
    """Wait until the picker knows what every worker holds, and hears what changes.

    Raises:
        CannotStart: there is one that it does not hear.
    """
    deadline = time.monotonic() + EVENTS_SECONDS
    while deaf := await _unheard(plan, http):
        if time.monotonic() > deadline:
            raise CannotStart(
                f"the picker hears no KV events of {', '.join(deaf)} within {EVENTS_SECONDS:.0f} s"
            )
        await asyncio.sleep(POLL_SECONDS)


async def _indexes(plan: Plan, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """What each picker knows of what the workers hold."""
    indexes = []
    for listen in plan.listens:
        async with http.get(f"http://{HOST}:{listen.admin}/debug/index") as response:
            indexes.append(dict(await response.json()))
    return indexes


async def _unheard(plan: Plan, http: aiohttp.ClientSession) -> list[str]:
    """Workers whose publishers a picker has not found, or does not follow yet."""
    return [
        pod["address"]
        for index in await _indexes(plan, http)
        for pod in index["pods"]
        if not pod["publishers"]
        or any(not each["connected"] or each["replaying"] for each in pod["publishers"])
    ]


async def _demonstrate(plan: Plan, http: aiohttp.ClientSession, console: Console) -> None:
    async def served_by_picker(request_id: str, _: aiohttp.ClientResponse) -> Served:
        decision = await _decision(plan, http, request_id)
        return Served(
            pod=names[decision["endpoint"]],
            predicted_tokens=decision["predictedTokens"],
        )

    async def served_by_turns(_: str, response: aiohttp.ClientResponse) -> Served:
        return Served(pod=names[response.headers[SERVED_BY]])

    names = {f"{HOST}:{port}": f"worker-{i}" for i, port in enumerate(plan.worker_ports, 1)}
    turns = Route(f"http://{HOST}:{plan.baseline_port}", served_by_turns)
    warm = Route(f"http://{HOST}:{plan.port}", served_by_picker)
    with show.DemoProgress(console, total=2 * prompts()) as progress:
        answers: dict[Route, list[Answer]] = {}
        for route in (turns, warm):
            await _forget_prefixes(plan, http)
            answers[route] = []
            async for answer in converse(http, route, plan.served_model):
                answers[route].append(answer)
                progress.advance(answer)
    show.demo(answers[warm], answers[turns], console)


async def _decision(plan: Plan, http: aiohttp.ClientSession, request_id: str) -> dict[str, Any]:
    """What a picker decided, once it knows the end: a visitor thinks before the next turn."""
    while True:
        for listen in plan.listens:
            url = f"http://{HOST}:{listen.admin}/debug/decisions"
            async with http.get(url, params={"request_id": request_id}) as response:
                if response.status != 200:
                    continue  # it was another picker's
                [decision] = (await response.json())["decisions"]
            if decision["outcome"] is not None:
                return dict(decision)
        await asyncio.sleep(0.02)


async def _forget_prefixes(plan: Plan, http: aiohttp.ClientSession) -> None:
    """Each way starts with cold caches, and the picker knows."""
    for port in plan.worker_ports:
        async with http.post(f"http://{HOST}:{port}/reset_prefix_cache") as response:
            response.raise_for_status()
    deadline = time.monotonic() + EVENTS_SECONDS
    while any(
        held for each in await _indexes(plan, http) for held in each["index"]["held"].values()
    ):
        if time.monotonic() > deadline:
            raise CannotStart("the picker does not hear that the workers' caches are empty")
        await asyncio.sleep(POLL_SECONDS)


async def _watch(
    workers: Sequence[Child], pickers: Sequence[Child], envoy: Child, console: Console
) -> None:
    """Serve on while there is somebody to serve; a lost worker or picker is told and passed by."""
    ends = {asyncio.create_task(child.wait()): child for child in [*workers, *pickers, envoy]}
    try:
        while True:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                child = ends.pop(task)
                what = child.end()
                alive = list(ends.values())
                if child is envoy or not all(
                    any(each in alive for each in group) for group in (workers, pickers)
                ):
                    raise ChildFailed(what)
                console.print(f"{what}\nThe others go on", style="yellow", soft_wrap=True)
    finally:
        for task in ends:
            task.cancel()
