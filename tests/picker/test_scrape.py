"""Scraping real servers over loopback sockets, with timers that the tests wind by hand."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import uvloop
from aiohttp import web

from picker.config import Duration, EndpointSpec, Metrics
from picker.engines import LoadReport
from picker.load import Load
from picker.pages import MAX_ANSWER
from picker.pool import Endpoint, Pool
from picker.scrape import Scraper
from tests.picker.waiting import until

VLLM_PAGE = (Path(__file__).parents[1] / "data" / "vllm_metrics.txt").read_bytes()
IDLE_PAGE = (
    b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
)
BUSY_PAGE = IDLE_PAGE.replace(b"running 0", b"running 3")
SETTINGS = Metrics(
    interval=Duration(0.05),
    idle_interval=Duration(1.0),
    timeout=Duration(1.0),
    stale_after=Duration(2.0),
)
PATIENCE = 60.0  # seconds of real time until a test that hangs is a failure

Answer = Callable[["Pod", asyncio.StreamWriter], Awaitable[None]]


class Clock:
    """Time and timers that only move when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pending: list[Timer] = []

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, self.now + delay, callback)
        self.pending.append(timer)
        return timer

    @property
    def delays(self) -> list[float]:
        return sorted(timer.at - self.now for timer in self.pending)

    def advance(self) -> None:
        """To the next timer, which goes off."""
        timer = min(self.pending, key=lambda timer: timer.at)
        self.now = max(self.now, timer.at)
        timer.cancel()
        timer.callback()


class Timer:
    def __init__(self, clock: Clock, at: float, callback: Callable[[], None]) -> None:
        self.clock, self.at, self.callback = clock, at, callback

    def cancel(self) -> None:
        if self in self.clock.pending:
            self.clock.pending.remove(self)


class HeardLoad(Load):
    """Load that says when it was told something."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self.heard: asyncio.Queue[tuple[Endpoint, LoadReport | str]] = asyncio.Queue()
        self.unreachable: set[str] = set()
        super().__init__(pool, SETTINGS.stale_after, clock=clock)

    def report(self, endpoint: Endpoint, report: LoadReport, began: float) -> None:
        super().report(endpoint, report, began)
        self.heard.put_nowait((endpoint, report))

    def failed(self, endpoint: Endpoint, why: str, *, unreachable: bool = False) -> None:
        super().failed(endpoint, why, unreachable=unreachable)
        if unreachable:
            self.unreachable.add(endpoint.address)
        self.heard.put_nowait((endpoint, why))


class Pod:
    """A server that answers, or fails to, as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.closed = asyncio.Event()  # by the scraper
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.streams: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._server = await asyncio.start_server(self._serve, host, port)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self.address

    async def stop(self) -> None:
        self._server.close()
        for writer in self.streams:
            writer.transport.abort()
        self.go.set()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.streams[writer] = reader
        self.connections += 1
        self.open += 1
        try:
            while not writer.is_closing():
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                self.asked.set()
                await self.answer(self, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            self.closed.set()
            self._tasks.discard(task)
            writer.close()


def sends(*parts: bytes, then_close: bool = False) -> Answer:
    async def answer(pod: Pod, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return answer


def page(body: bytes, status: str = "200 OK", headers: bytes = b"") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n".encode() + headers + b"\r\n" + body
    )


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts)
        + b"0\r\nx-trailer: 1\r\n\r\n"
    )


async def hangs(pod: Pod, writer: asyncio.StreamWriter) -> None:
    """Fault injector: never answers."""
    await pod.streams[writer].read()


async def drips(pod: Pod, writer: asyncio.StreamWriter) -> None:
    """Fault injector: begins an answer that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nvllm:num_requests_running 0\n")
    await pod.streams[writer].read()


async def floods(pod: Pod, writer: asyncio.StreamWriter) -> None:
    """Fault injector: an endless page."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


class Scene:
    """Pods, and a scraper of them."""

    def __init__(self, settings: Metrics = SETTINGS) -> None:
        self.clock = Clock()
        self.pool = Pool("test")
        self.load = HeardLoad(self.pool, self.clock)
        self.blocks: list[tuple[str, int]] = []
        self.pods: list[Pod] = []
        self.scraper = Scraper(
            self.pool,
            self.load,
            settings,
            lambda endpoint, tokens: self.blocks.append((endpoint.address, tokens)),
            call_later=self.clock.call_later,
        )

    async def add(self, answer: Answer, host: str = "127.0.0.1") -> Pod:
        pod = Pod(answer)
        await pod.start(host)
        self.pods.append(pod)
        self.update(*self.pool.endpoints, pod.address)
        return pod

    def update(self, *addresses: str, **labels: str) -> None:
        self.pool.update([EndpointSpec(address=a, labels=labels) for a in addresses])

    async def heard(self) -> LoadReport | str:
        """What the load is told next: a report, or why there is none."""
        return (await asyncio.wait_for(self.load.heard.get(), PATIENCE))[1]

    async def scrape(self) -> LoadReport | str:
        """Let the next timer go off, a scrape's, and wait for what comes of it."""
        self.clock.advance()
        return await self.heard()

    def fresh(self) -> list[bool]:
        column = np.zeros(self.pool.capacity, np.float32)
        return self.load.pods(self.pool.slots, column, None).fresh.tolist()


@asynccontextmanager
async def scene_of(*answers: Answer, settings: Metrics = SETTINGS) -> AsyncIterator[Scene]:
    scene = Scene(settings)
    for answer in answers:
        await scene.add(answer)
    await scene.scraper.start()
    try:
        yield scene
    finally:
        await scene.scraper.stop()
        for pod in scene.pods:
            await pod.stop()


async def eventually(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE)


async def test_a_pods_page_becomes_its_load() -> None:
    async with scene_of(sends(page(VLLM_PAGE))) as scene:
        report = await scene.scrape()
        assert report == LoadReport(8.0, 16.0, 0.8421052631578947, 32, 96, generated=1719.0)
        (pod,) = scene.pods
        seen = scene.load.describe(scene.pool.endpoints[pod.address])
        assert (seen.fresh, seen.waiting, seen.running, seen.kv_tokens) == (True, 8, 16, 3072)
        head = pod.requests[0].decode().lower().split("\r\n")
        assert head[0] == "get /metrics http/1.1"
        assert f"host: {pod.address}" in head


async def test_the_connection_is_kept() -> None:
    async with scene_of(sends(page(VLLM_PAGE))) as scene:
        for _ in range(5):
            await scene.scrape()
        assert (scene.pods[0].connections, len(scene.pods[0].requests)) == (1, 5)


HEAD = b"HTTP/1.1 200 OK\r\n"
FRAMINGS = {
    "in many pieces": sends(*(bytes([byte]) for byte in page(BUSY_PAGE))),
    "chunked": sends(chunked(BUSY_PAGE, 7)),
    "chunked, in pieces": sends(*(bytes([byte]) for byte in chunked(BUSY_PAGE, 50))),
    "until the end": sends(HEAD + b"\r\n" + BUSY_PAGE, then_close=True),
    "until the end, in pieces": sends(HEAD + b"\r\n", BUSY_PAGE, then_close=True),
    "HTTP/1.0": sends(page(BUSY_PAGE).replace(b"HTTP/1.1", b"HTTP/1.0"), then_close=True),
    "connection: close": sends(page(BUSY_PAGE, headers=b"Connection: close\r\n")),
    "after an interim answer": sends(b"HTTP/1.1 100 Continue\r\n\r\n", page(BUSY_PAGE)),
    "other capitals": sends(page(BUSY_PAGE).replace(b"content-length", b"Content-LENGTH")),
    "a large page": sends(page(b"# " + b"x" * (MAX_ANSWER - 4000) + b"\n" + BUSY_PAGE)),
    "more than was asked": sends(page(BUSY_PAGE) + page(b"vllm:num_requests_running 9\n")),
}


@pytest.mark.parametrize("answer", FRAMINGS.values(), ids=FRAMINGS)
async def test_all_ways_to_send_a_page(answer: Answer) -> None:
    async with scene_of(answer) as scene:
        for _ in range(3):
            assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)


@pytest.mark.parametrize("surplus", [page(BUSY_PAGE), HEAD])
async def test_a_connection_with_more_than_was_asked_is_not_kept(surplus: bytes) -> None:
    async with scene_of(sends(page(BUSY_PAGE) + surplus)) as scene:
        for _ in range(3):
            assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)
        assert scene.pods[0].connections == 3


FAILURES: dict[str, tuple[Answer, str]] = {
    "busy": (sends(page(BUSY_PAGE, "503 Service Unavailable")), "it answers with status 503"),
    "not found": (sends(page(b"", "404 Not Found")), "it answers with status 404"),
    "moved": (sends(page(b"", "302 Found", b"location: /x\r\n")), "it answers with status 302"),
    "no content": (sends(b"HTTP/1.1 204 No Content\r\n\r\n"), "it answers with status 204"),
    "another page": (
        sends(page(b"<html>hello</html>")),
        "nothing on /metrics is known of vllm",
    ),
    "closes": (sends(then_close=True), "it closed the connection before its page was whole"),
    "truncated": (
        sends(page(BUSY_PAGE)[:-1], then_close=True),
        "it closed the connection before its page was whole",
    ),
    "truncated chunks": (
        sends(chunked(BUSY_PAGE, 50)[:-20], then_close=True),
        "it closed the connection before its page was whole",
    ),
    "head only": (
        sends(HEAD, then_close=True),
        "it closed the connection before its page was whole",
    ),
    "interim answer only": (
        sends(b"HTTP/1.1 100 Continue\r\n\r\n", then_close=True),
        "it closed the connection before its page was whole",
    ),
    "not HTTP": (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), "it does not speak HTTP/1"),
    "binary": (sends(bytes(range(256))), "it does not speak HTTP/1"),
    "upgrade": (
        sends(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n\x00"),
        "it does not speak HTTP/1",
    ),
    "two lengths": (
        sends(HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab"),
        "it does not speak HTTP/1",
    ),
    "endless": (floods, "its page has more than 4 MiB"),
    "endless head": (
        sends(HEAD + b"x: y\r\n" * (MAX_ANSWER // 6 + 1)),
        "its page has more than 4 MiB",
    ),
}


@pytest.mark.parametrize(("answer", "why"), FAILURES.values(), ids=FAILURES)
async def test_a_pod_that_fails_is_told_of_and_asked_again(answer: Answer, why: str) -> None:
    async with scene_of(answer) as scene:
        for _ in range(2):
            assert await scene.scrape() == why
            assert scene.fresh() == [False]
        scene.pods[0].answer = sends(page(BUSY_PAGE))
        assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)
        assert scene.fresh() == [True]


@pytest.mark.parametrize("answer", [hangs, drips], ids=["hangs", "drips"])
async def test_a_pod_that_never_ends_its_answer_is_left_and_grows_stale(answer: Answer) -> None:
    async with scene_of(sends(page(IDLE_PAGE))) as scene:
        (pod,) = scene.pods
        await scene.scrape()
        told = scene.clock.now
        pod.answer = answer
        pod.asked.clear()
        scene.clock.advance()
        asked = scene.clock.now
        await eventually(pod.asked)
        assert scene.clock.delays == [SETTINGS.timeout]
        assert scene.fresh() == [True]
        assert await scene.scrape() == "no whole page within 1 s"
        await eventually(pod.closed)
        assert pod.open == 0, "the connection is not used again"
        scene.clock.now = asked + 2.1
        assert scene.fresh() == [False]
        age = scene.load.age(scene.pool.endpoints[pod.address])
        assert age == pytest.approx(asked + 2.1 - told)
        pod.answer = sends(page(IDLE_PAGE))
        assert isinstance(await scene.scrape(), LoadReport)
        assert pod.connections == 2


async def test_an_idle_pod_that_is_slow_once_stays_trusted() -> None:
    async with scene_of(sends(page(IDLE_PAGE))) as scene:
        (pod,) = scene.pods
        while scene.clock.delays != [SETTINGS.idle_interval]:
            await scene.scrape()
        pod.answer = hangs
        pod.asked.clear()
        scene.clock.advance()
        await eventually(pod.asked)
        assert await scene.scrape() == "no whole page within 1 s"
        pod.answer = sends(page(IDLE_PAGE))
        for _ in range(2):
            scene.clock.now += scene.clock.delays[0] - 0.01
            assert scene.fresh() == [True]
            assert isinstance(await scene.scrape(), LoadReport)


async def test_a_pod_that_nobody_listens_on() -> None:
    async with scene_of(sends(page(BUSY_PAGE))) as scene:
        (pod,) = scene.pods
        await scene.scrape()
        assert scene.fresh() == [True]
        before = scene.pool.endpoints[pod.address]
        await pod.stop()
        await eventually(pod.closed)
        assert await scene.scrape() == "cannot connect: Connection refused"
        assert scene.fresh() == [False], "long before its numbers are too old"
        assert scene.load.unreachable == {pod.address}
        assert not before.alive, "what its cache held is forgotten"
        after = scene.pool.endpoints[pod.address]
        assert await scene.scrape() == "cannot connect: Connection refused"
        assert scene.pool.endpoints[pod.address] is after, "once is enough"
        await pod.start(port=int(pod.address.rpartition(":")[2]))
        assert isinstance(await scene.scrape(), LoadReport)


def started(at: float) -> bytes:
    return BUSY_PAGE + b"process_start_time_seconds %.11e\n" % at


@pytest.mark.parametrize(
    ("page_before", "page_after", "same"),
    [
        (started(1.79595036611e9), started(1.79595036611e9), True),
        (started(1.79595036611e9), started(1.79595036611e9 + 3), False),
        (BUSY_PAGE, BUSY_PAGE, True),  # it does not tell
        (BUSY_PAGE, started(1.79595036611e9), True),
    ],
)
async def test_a_process_that_began_later_is_another_one(
    page_before: bytes, page_after: bytes, same: bool
) -> None:
    """It restarted between two scrapes, and nothing else tells of it."""
    async with scene_of(sends(page(page_before))) as scene:
        (pod,) = scene.pods
        await scene.scrape()
        before = scene.pool.endpoints[pod.address]

        async def dies(pod: Pod, writer: asyncio.StreamWriter) -> None:
            pod.answer = sends(page(page_after))
            writer.close()

        pod.answer = dies
        scene.clock.advance()
        if not same:
            await until(lambda: not before.alive)
            scene.clock.advance()
        assert await scene.heard() == LoadReport(0.0, 3.0, 0.0)
        assert before.alive == same


async def test_a_connection_that_the_pod_closed_meanwhile_is_no_failure() -> None:
    """Servers close idle connections; it may be at the moment of the next request."""
    async with scene_of(sends(page(BUSY_PAGE))) as scene:
        (pod,) = scene.pods
        await scene.scrape()

        async def closes_then_answers(pod: Pod, writer: asyncio.StreamWriter) -> None:
            pod.answer = sends(page(BUSY_PAGE))
            writer.close()

        pod.answer = closes_then_answers
        assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)
        assert (pod.connections, len(pod.requests)) == (2, 3)
        pod.answer = sends(then_close=True)
        assert await scene.scrape() == "it closed the connection before its page was whole"
        assert len(pod.requests) == 5, "tried again once"


async def test_bytes_that_were_not_asked_for_are_not_taken_for_the_next_page() -> None:
    sent = asyncio.Event()

    async def talks_on(pod: Pod, writer: asyncio.StreamWriter) -> None:
        writer.write(page(BUSY_PAGE))
        await pod.go.wait()
        writer.write(page(b"vllm:num_requests_running 9\n"))
        sent.set()

    async with scene_of(talks_on) as scene:
        (pod,) = scene.pods
        await scene.scrape()
        pod.go.set()
        await eventually(sent)
        await eventually(pod.closed)
        pod.answer = sends(page(BUSY_PAGE))
        assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)
        assert pod.connections == 2


async def pauses(scene: Scene, count: int) -> list[float]:
    """The pauses after so many scrapes."""
    found = []
    for _ in range(count):
        await scene.scrape()
        found += scene.clock.delays
    return found


async def test_a_busy_pod_is_asked_at_each_interval() -> None:
    async with scene_of(sends(page(BUSY_PAGE))) as scene:
        assert await pauses(scene, 4) == pytest.approx([0.05] * 4)


async def test_a_pod_with_a_request_of_ours_is_busy_whatever_it_tells() -> None:
    async with scene_of(sends(page(IDLE_PAGE))) as scene:
        scene.load.credit(scene.pool.endpoints[scene.pods[0].address], 0)
        assert await pauses(scene, 3) == pytest.approx([0.05] * 3)


async def test_the_pauses_of_an_idle_pod_double_up_to_the_idle_interval() -> None:
    async with scene_of(sends(page(IDLE_PAGE))) as scene:
        assert await pauses(scene, 7) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
        scene.pods[0].answer = sends(page(BUSY_PAGE))
        assert await pauses(scene, 2) == pytest.approx([0.05, 0.05])


async def test_the_pauses_of_a_failing_pod_double_up_to_the_idle_interval() -> None:
    async with scene_of(sends(page(b"", "500 Oops"))) as scene:
        assert await pauses(scene, 6) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


async def test_a_pick_ends_the_pause_of_an_idle_pod() -> None:
    async with scene_of(sends(page(IDLE_PAGE))) as scene:
        await pauses(scene, 6)
        endpoint = scene.pool.endpoints[scene.pods[0].address]
        scene.clock.now += 0.5
        scene.load.credit(endpoint, 10)
        scene.load.picked(endpoint, cold=True)
        (delay,) = scene.clock.delays
        assert 0 < delay <= SETTINGS.interval
        scene.clock.now += delay / 2
        scene.load.picked(endpoint, cold=True)
        assert scene.clock.delays == pytest.approx([delay / 2]), "not put off by the next pick"
        assert await pauses(scene, 2) == pytest.approx([0.05, 0.05])


async def test_a_pick_does_not_hurry_a_pod_that_is_busy_or_fails() -> None:
    async with scene_of(sends(page(BUSY_PAGE))) as scene:
        (pod,) = scene.pods
        endpoint = scene.pool.endpoints[pod.address]
        await scene.scrape()
        scene.load.picked(endpoint, cold=True)
        assert scene.clock.delays == pytest.approx([0.05])
        pod.answer = sends(page(b"", "500 Oops"))
        await pauses(scene, 3)
        scene.load.picked(endpoint, cold=True)
        assert scene.clock.delays == pytest.approx([0.4])


async def test_a_slow_pod_gets_half_of_the_interval_to_itself() -> None:
    async def slow(pod: Pod, writer: asyncio.StreamWriter) -> None:
        await pod.go.wait()
        writer.write(page(BUSY_PAGE))

    async with scene_of(slow) as scene:
        (pod,) = scene.pods
        scene.clock.advance()
        await eventually(pod.asked)
        scene.clock.now += 0.3
        pod.go.set()
        await scene.heard()
        assert scene.clock.delays == pytest.approx([0.025])


async def test_a_pick_while_the_page_is_under_way_stays_counted() -> None:
    async def held(pod: Pod, writer: asyncio.StreamWriter) -> None:
        await pod.go.wait()
        writer.write(page(b"vllm:num_requests_waiting 7\n"))

    async with scene_of(held) as scene:
        (pod,) = scene.pods
        endpoint = scene.pool.endpoints[pod.address]
        scene.load.picked(endpoint, cold=False)
        scene.clock.now += 0.01
        scene.clock.advance()
        await eventually(pod.asked)
        scene.clock.now += 0.01
        scene.load.picked(endpoint, cold=False)
        pod.go.set()
        await scene.heard()
        assert scene.load.describe(endpoint).waiting == 7 + 1
        await scene.scrape()
        assert scene.load.describe(endpoint).waiting == 7


async def test_pods_that_come_together_are_not_asked_together() -> None:
    async with scene_of() as scene:
        scene.update(*(f"127.0.0.1:{port}" for port in range(1, 101)))
        delays = scene.clock.delays
        assert len(delays) == 100
        assert delays[0] >= 0
        assert delays[-1] < SETTINGS.interval
        gaps = np.diff(delays)
        assert gaps.min() > SETTINGS.interval / 400, "nearly evenly"
        assert gaps.max() < SETTINGS.interval / 50


async def test_the_first_round_ends_when_each_pod_answered_or_failed() -> None:
    async with scene_of(
        sends(page(BUSY_PAGE)), sends(page(b"", "500 Oops")), hangs, hangs
    ) as scene:
        await scene.add(sends(page(BUSY_PAGE)))
        addresses = list(scene.pool.endpoints)
        round_done = asyncio.ensure_future(scene.scraper.first_round())
        for _ in addresses:
            scene.clock.advance()
        for _ in range(3):
            await scene.heard()
        for pod in scene.pods[2:4]:
            await eventually(pod.asked)
        assert not round_done.done()
        scene.update(*(a for a in addresses if a != scene.pods[3].address))  # one hangs, then goes
        while scene.load.describe(scene.pool.endpoints[scene.pods[2].address]).error is None:
            assert not round_done.done()
            scene.clock.advance()  # to the time-out of the other
        await asyncio.wait_for(round_done, PATIENCE)


async def test_the_first_round_of_an_empty_pool_is_over() -> None:
    async with scene_of() as scene:
        await asyncio.wait_for(scene.scraper.first_round(), PATIENCE)


async def test_a_removed_pod_is_let_go_and_its_late_answer_ignored() -> None:
    async def held(pod: Pod, writer: asyncio.StreamWriter) -> None:
        await pod.go.wait()
        writer.write(page(BUSY_PAGE))

    async with scene_of(held) as scene:
        (pod,) = scene.pods
        scene.clock.advance()
        await eventually(pod.asked)
        scene.update()
        pod.go.set()
        await eventually(pod.closed)
        assert scene.clock.pending == []
        assert scene.load.heard.empty()
        scene.update(pod.address)
        assert scene.fresh() == [False]
        assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)


async def test_a_pod_removed_while_it_is_connected_to_is_let_go() -> None:
    async with scene_of(sends(page(BUSY_PAGE))) as scene:
        (pod,) = scene.pods
        scene.clock.advance()
        scene.update()
        assert scene.clock.pending == []
        scene.update(pod.address)
        for _ in range(2):
            assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)
        assert len(pod.requests) == 2
        assert scene.load.heard.empty()


async def test_stop_closes_all_connections() -> None:
    async with scene_of(sends(page(BUSY_PAGE)), sends(page(BUSY_PAGE))) as scene:
        await scene.scrape()
        await scene.scrape()
        await scene.scraper.stop()
        for pod in scene.pods:
            await eventually(pod.closed)
        assert scene.clock.pending == []
        scene.update(scene.pods[0].address, "127.0.0.1:1")
        assert scene.clock.pending == []


async def test_a_pods_label_decides_what_is_asked_of_it_at_once() -> None:
    async with scene_of(sends(page(BUSY_PAGE))) as scene:
        (pod,) = scene.pods
        await scene.scrape()
        pod.answer = sends(page(b"trtllm_num_requests_running 5\n"))
        label = {"inference.networking.k8s.io/engine-type": "trtllm-serve"}
        scene.update(pod.address, **label)
        assert await scene.scrape() == LoadReport(running=5.0)
        assert pod.requests[-1].startswith(b"GET /prometheus/metrics HTTP/1.1\r\n")


async def test_the_size_of_a_kv_cache_is_told_when_it_is_first_seen_or_changes() -> None:
    def config(blocks: int) -> bytes:
        info = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
        return page(BUSY_PAGE + info.encode())

    async with scene_of(sends(config(10))) as scene:
        (pod,) = scene.pods
        for answer in (config(10), config(10), config(20), page(BUSY_PAGE), config(20)):
            pod.answer = sends(answer)
            await scene.scrape()
        assert scene.blocks == [(pod.address, 160), (pod.address, 320)]


@pytest.mark.parametrize("host", ["127.0.0.1", *(["::1"] if socket.has_ipv6 else [])])
async def test_ipv4_and_ipv6(host: str) -> None:
    async with scene_of() as scene:
        pod = await scene.add(sends(page(BUSY_PAGE)), host)
        assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)
        assert f"host: {pod.address}\r\n".encode() in pod.requests[0]


async def test_one_pod_does_not_hold_up_another() -> None:
    async with scene_of(hangs, sends(page(BUSY_PAGE))) as scene:
        scene.clock.advance()
        await eventually(scene.pods[0].asked)
        for _ in range(5):
            assert await scene.scrape() == LoadReport(0.0, 3.0, 0.0)


async def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with scene_of(sends(page(b"", "500 Oops"))) as scene:
        with caplog.at_level(logging.INFO):
            for _ in range(4):
                await scene.scrape()
        assert [record.message for record in caplog.records] == [
            f"pod {scene.pods[0].address} does not tell its load: it answers with status 500"
        ]


def test_idle_pods_must_be_asked_often_enough_to_be_trusted() -> None:
    with pytest.raises(ValueError, match=r"metrics.idleInterval \(2 s\) must be shorter than"):
        Scene(Metrics(idle_interval=Duration(2.0), stale_after=Duration(2.0)))


def test_with_the_loop_that_the_picker_runs_on() -> None:
    """uvloop, its own timers, and an HTTP server that others wrote."""

    async def scrape() -> None:
        enough = asyncio.Event()
        asked = 0

        async def metrics(request: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            if asked == 5:
                enough.set()
            return web.Response(body=VLLM_PAGE, content_type="text/plain")

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        pool = Pool("test")
        load = Load(pool)
        pool.update([EndpointSpec(address=f"localhost:{port}")])
        blocks: list[int] = []
        scraper = Scraper(
            pool, load, Metrics(interval=Duration(0.001)), lambda _, tokens: blocks.append(tokens)
        )
        await scraper.start()
        try:
            await asyncio.wait_for(scraper.first_round(), PATIENCE)
            (endpoint,) = pool.endpoints.values()
            seen = load.describe(endpoint)
            assert (seen.fresh, seen.waiting, blocks) == (True, 8.0, [3072])
            await eventually(enough)
        finally:
            await scraper.stop()
            await runner.cleanup()

    uvloop.run(scrape())
