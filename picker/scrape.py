"""Asks each pod for its load: often while it is busy, seldom while it is idle."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import ssl
from collections.abc import Callable, Mapping

from picker.config import Metrics
from picker.engines import ENGINE_LABELS, Engine, engine_of, engines_of, parse, start_time
from picker.load import Load
from picker.pages import PageConnection
from picker.pool import Endpoint, Pool

SAME_START = 1.0  # seconds that two readings of a process's start may differ
_PATH = re.compile(r"/[!-~]{0,1000}")
_UNREACHABLE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
log = logging.getLogger(__name__)

_GOLDEN = 0.6180339887  # multiples of it, without their whole parts, are spread evenly


CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class Scraper:
    """Keeps `Load` told. A listener of its pool.

    A pod is asked each `interval` while it has work: as it tells, or because we sent it some. The
    pauses of an idle pod double up to `idle_interval`, and so do those of a pod that fails; a pick
    for an idle pod ends its pause.
    """

    def __init__(
        self,
        pool: Pool,
        load: Load,
        settings: Metrics,
        on_resize: Callable[[Endpoint, int], None],
        *,
        call_later: CallLater | None = None,
    ) -> None:
        """`on_resize` is told how many tokens a pod's KV cache holds, when first known and when
        that changes. `call_later` is the running loop's unless given.

        Raises:
            ValueError: the settings cannot be used.
        """
        check_settings(settings)
        self._pool = pool
        self.load = load
        self._use(settings)
        self.on_resize = on_resize
        self._unknown_engines: set[str] = set()  # that labels have named
        self._call_later = call_later
        self._watches: dict[Endpoint, _Watch] = {}
        self._unheard: set[Endpoint] = set()
        self._all_heard = asyncio.Event()
        self._all_heard.set()
        self._running = False

    def _use(self, settings: Metrics) -> None:
        self._engines = engines_of(settings)
        self._labels = (settings.engine_label,) if settings.engine_label else ENGINE_LABELS
        self.tls = _tls(settings)
        self.settings = settings

    def reconfigure(self, settings: Metrics) -> None:
        """Ask by other settings from now on.

        Raises:
            ValueError: they cannot be used; nothing has changed then.
        """
        check_settings(settings)
        self._use(settings)
        for endpoint, watch in list(self._watches.items()):
            watch.close()
            self._watch(endpoint)

    def engine(self, labels: Mapping[str, str]) -> Engine:
        """Of a pod with these labels."""
        return engine_of(
            labels, self.settings.engine, self._unknown_engines, self._engines, self._labels
        )

    async def start(self) -> None:
        """Begin to ask all pods, those present and those to come."""
        if self._call_later is None:
            self._call_later = asyncio.get_running_loop().call_later
        self._running = True
        self.load.on_pick = self._picked
        self._pool.listen(self)

    async def stop(self) -> None:
        """Close all connections and ask no more."""
        self._running = False
        for endpoint in list(self._watches):
            self.removed(endpoint)

    async def first_round(self) -> None:
        """Wait until each pod has answered or failed once."""
        await self._all_heard.wait()

    def added(self, endpoint: Endpoint) -> None:
        if not self._running:
            return
        self._unheard.add(endpoint)
        self._all_heard.clear()
        self._watch(endpoint)

    def _watch(self, endpoint: Endpoint) -> None:
        assert self._call_later is not None
        self._watches[endpoint] = _Watch(self, endpoint, self._call_later)

    def removed(self, endpoint: Endpoint) -> None:
        watch = self._watches.pop(endpoint, None)
        if watch is not None:
            watch.close()
            self.heard(endpoint)

    def heard(self, endpoint: Endpoint) -> None:
        """A pod answered or failed, or is gone."""
        if self._unheard:
            self._unheard.discard(endpoint)
            if not self._unheard:
                self._all_heard.set()

    def restarted(self, endpoint: Endpoint) -> Endpoint:
        """The process that answered is no more, and its cache is lost; a new watch begins."""
        log.info("pod %s is another process than before: its cache is lost", endpoint.address)
        return self._pool.restarted(endpoint)

    def _picked(self, endpoint: Endpoint) -> None:
        watch = self._watches.get(endpoint)
        if watch is not None and watch.resting:
            watch.wake()


class _Watch:
    """Asks one pod."""

    def __init__(self, scraper: Scraper, endpoint: Endpoint, call_later: CallLater) -> None:
        self.resting = False  # in a pause longer than `interval`, because the pod is idle
        self._scraper = scraper
        self._load = scraper.load
        self._settings = scraper.settings
        self._endpoint = endpoint
        self._call_later = call_later
        # Pods that came together are not asked together, and drift apart while they are idle.
        share, interval = endpoint.slot * _GOLDEN % 1.0, self._settings.interval
        self._longest_pause = max(interval, self._settings.idle_interval * (1.0 - 0.1 * share))
        self._pause: float = interval
        self._began = 0.0
        self._answered = False
        self._new_connection = False
        self._process_began: float | None = None
        self._kv_tokens: int | None = None
        self._connection: PageConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._read_labels()
        self._timer = call_later(interval * share, self._scrape)

    def wake(self) -> None:
        """The pod was idle and is just being sent a request, which its page will show soon."""
        self.resting = False
        self._timer.cancel()
        self._rest(self._settings.interval)

    def close(self) -> None:
        self._timer.cancel()
        self._disconnect()

    def _read_labels(self) -> None:
        self._labels: Mapping[str, str] = self._endpoint.labels
        self._engine = self._scraper.engine(self._labels)
        self._path = self._settings.path or self._engine.path
        self._request = (
            f"GET {self._path} HTTP/1.1\r\nhost: {self._endpoint.address}\r\n"
            "accept: text/plain\r\nuser-agent: warmpath\r\n\r\n"
        ).encode()

    def _scrape(self) -> None:
        if self._labels is not self._endpoint.labels:
            self._read_labels()
        self.resting = False
        self._began = self._load.clock()
        self._load.asked(self._endpoint)
        self._timer = self._call_later(self._settings.timeout, self._too_late)
        connection = self._connection
        if connection is not None and connection.open:
            connection.ask(self._request)
        else:
            self._connect()

    def _connect(self) -> None:
        self._connection = None
        self._connecting = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        endpoint = self._endpoint
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: PageConnection(self.page, self.failed),
                endpoint.host,
                self._settings.port or endpoint.port,
                ssl=self._scraper.tls,
            )
        except OSError as error:
            self._connecting = None
            if isinstance(error, ssl.SSLError):
                why = f"cannot connect: TLS: {error.reason or error}"
            else:
                why = "cannot connect: " + (os.strerror(error.errno) if error.errno else str(error))
            unreachable = error.errno in _UNREACHABLE
            if error.errno == errno.ECONNREFUSED and self._answered:
                self._load.failed(self._scraper.restarted(endpoint), why, unreachable=unreachable)
            else:
                self._fail(why, unreachable=unreachable)
            return
        self._connecting, self._connection = None, connection
        self._new_connection = True
        if connection.open:
            connection.ask(self._request)
        else:
            self._fail("it closes connections at once")

    def _disconnect(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def page(self, body: bytes) -> None:
        report = parse(body, self._engine)
        if report.waiting is None and report.running is None and report.kv_usage is None:
            self._fail(f"nothing on {self._path} is known of {self._engine.name}")
            return
        if self._new_connection and self._is_another_process(body):
            self._scraper.restarted(self._endpoint)
            return
        self._new_connection, self._answered = False, True
        self._timer.cancel()
        endpoint = self._endpoint
        self._load.report(endpoint, report, self._began)
        if report.kv_tokens is not None and report.kv_tokens != self._kv_tokens:
            self._kv_tokens = report.kv_tokens
            self._scraper.on_resize(endpoint, report.kv_tokens)
        self._scraper.heard(endpoint)
        if self._load.busy(endpoint):
            self._rest(self._settings.interval)
        else:
            self._rest(min(2 * self._pause, self._longest_pause))
            self.resting = True

    def _is_another_process(self, body: bytes) -> bool:
        """By its start; asked for where a connection begins, since none outlives its process."""
        began = start_time(body)
        if began is None:
            return False
        before, self._process_began = self._process_began, began
        return before is not None and abs(began - before) > SAME_START

    def failed(self, why: str, retry: bool) -> None:
        if retry:
            self._connect()  # a new connection has no answer yet, so this is done once
        else:
            self._fail(why)

    def _too_late(self) -> None:
        self._fail(f"no whole page within {self._settings.timeout:g} s")

    def _fail(self, why: str, *, unreachable: bool = False) -> None:
        self._timer.cancel()
        self._disconnect()
        self._load.failed(self._endpoint, why, unreachable=unreachable)
        self._scraper.heard(self._endpoint)
        self._rest(min(2 * self._pause, self._longest_pause))

    def _rest(self, pause: float) -> None:
        """Scrape again when this long has passed since the last scrape began, but give a slow pod
        half of it to itself."""
        self._pause = pause
        elapsed = self._load.clock() - self._began
        self._timer = self._call_later(max(pause - elapsed, pause / 2), self._scrape)


def check_settings(settings: Metrics) -> None:
    """Raises ValueError: pods cannot be asked by these settings."""
    if settings.idle_interval >= settings.stale_after:
        raise ValueError(
            f"metrics.idleInterval ({settings.idle_interval:g} s) must be shorter than "
            f"metrics.staleAfter ({settings.stale_after:g} s), or a pod that is slow once is "
            "passed over"
        )
    if settings.path and not _PATH.fullmatch(settings.path):
        raise ValueError(f"metrics.path: {settings.path!r} is no path, such as /metrics")
    engines_of(settings)


def _tls(settings: Metrics) -> ssl.SSLContext | None:
    """How pods are asked over TLS; None: without."""
    if settings.scheme == "http":
        return None
    context = ssl.create_default_context()
    if settings.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
