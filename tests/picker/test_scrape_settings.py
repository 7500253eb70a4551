"""Where pods' load is asked for, as it is set: over TLS, on another port, at another path."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from picker.config import EndpointSpec, Metrics
from picker.engines import LoadReport
from picker.load import Load
from picker.pool import Endpoint, Pool
from picker.scrape import Scraper
from tests.picker.authority import Authority

DEADLINE = 30.0  # seconds, on a busy machine


@asynccontextmanager
async def page(path: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server whose load is at a path; its port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_waiting 7\n")

    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Heard(Load):
    """Load that says when it was told something."""

    def __init__(self, pool: Pool) -> None:
        self.heard: asyncio.Queue[float | str | None] = asyncio.Queue()
        super().__init__(pool)

    def report(self, endpoint: Endpoint, report: LoadReport, began: float) -> None:
        self.heard.put_nowait(report.waiting)

    def failed(self, endpoint: Endpoint, why: str, *, unreachable: bool = False) -> None:
        self.heard.put_nowait(why)


async def told(address: str, settings: Metrics) -> float | str | None:
    """What the first look at a pod brings: its queue, or why not."""
    pool = Pool("test")
    load = Heard(pool)
    pool.update([EndpointSpec(address=address)])
    scraper = Scraper(pool, load, settings, lambda endpoint, tokens: None)
    await scraper.start()
    try:
        return await asyncio.wait_for(load.heard.get(), DEADLINE)
    finally:
        await scraper.stop()


def served_by(authority: Authority, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("pod", names=names or ("10.0.0.9",)))
    return context


async def test_another_path_and_another_port() -> None:
    async with page("/prometheus/load") as port:
        settings = Metrics(path="/prometheus/load", port=port)
        assert await told("127.0.0.1:1", settings) == 7
        assert "404" in str(await told("127.0.0.1:1", Metrics(port=port)))


async def test_any_certificate_is_believed_where_that_is_set(tmp_path: Path) -> None:
    async with page("/metrics", served_by(Authority(tmp_path))) as port:
        settings = Metrics(scheme="https", insecure_skip_verify=True)
        assert await told(f"127.0.0.1:{port}", settings) == 7


async def test_a_certificate_of_nobody_known_is_refused(tmp_path: Path) -> None:
    async with page("/metrics", served_by(Authority(tmp_path), "127.0.0.1")) as port:
        why = str(await told(f"127.0.0.1:{port}", Metrics(scheme="https")))
        assert why.startswith("cannot connect: TLS: ")


async def test_a_pod_without_tls_is_told_from_one_with(tmp_path: Path) -> None:
    async with page("/metrics") as port:
        settings = Metrics(scheme="https", insecure_skip_verify=True)
        assert str(await told(f"127.0.0.1:{port}", settings)).startswith("cannot connect: TLS")


@pytest.mark.parametrize("path", ["metrics", "/a b", "/a\r\nx: y", "/" + "a" * 2000, "/ä"])
def test_what_is_no_path_is_refused(path: str) -> None:
    pool = Pool("test")
    with pytest.raises(ValueError, match=r"metrics\.path: .* is no path"):
        Scraper(pool, Load(pool), Metrics(path=path), lambda endpoint, tokens: None)
