"""The picker's own pages: metrics, health, and why things are as they are.

For operators, on loopback unless configured otherwise. No page changes anything, and what a page
costs is bounded, because it is made on the loop that picks.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import REGISTRY, generate_latest

from picker.admin_access import guard
from picker.config import Config, as_data
from picker.document import plain
from picker.exposition import CONTENT_TYPE
from picker.fairness_view import FairnessView
from picker.flow_gauges import FlowGauges
from picker.gate import Gate
from picker.gauges import PoolGauges
from picker.journal import SIZE, Journal, detail, summary
from picker.load import Load
from picker.metrics import PickerMetrics
from picker.pool import Pool
from picker.prefix.gauges import EventGauges
from picker.prefix.match import PrefixProducer
from picker.prefix.view import EventsView
from picker.quota.gauges import QuotaGauges
from picker.quota.stores import without_password
from picker.refusal import Refusal
from picker.reload import Reloads
from picker.replicas.gauges import ReplicaGauges
from picker.replicas.replicas import Replicas
from picker.request import parse
from picker.tls import ServerTls

if TYPE_CHECKING:
    from picker.kubernetes.cluster import Cluster
    from picker.kubernetes.follow import KubernetesPool
    from picker.kubernetes.view import KubernetesView
    from picker.prefix.precise import EventsPrefix

DEFAULT_LIMIT = 100  # picks on a page
PIECES_AT_ONCE = 20  # of a metrics page, about 0.3 ms
MAX_LOOKUP = 4 << 20  # bytes of a body; longer ones get no tokens either
LOOKUPS_AT_ONCE = 4
LOOKUP_PATH = "/v1/chat/completions"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Views:
    """What the pages show."""

    pool: Pool
    load: Load
    prefix: PrefixProducer
    events: EventsPrefix | None  # the same, where it follows KV events
    journal: Journal
    metrics: PickerMetrics
    config: Callable[[], Config]  # the one in force
    not_ready: Callable[[], str | None]  # why no request is welcome; None when it is
    replicas: Replicas | None = None  # where there are other pickers
    gate: Gate | None = None  # where there are quotas or flow control
    reloads: Reloads = field(default_factory=Reloads)
    tls: ServerTls | None = None  # of the gRPC port, where it has it
    cluster: Cluster | None = None  # where Kubernetes is asked who leads, or who reads
    kubernetes: KubernetesPool | None = None  # where the pods are found there
    started: float = field(default_factory=time.time)  # Unix seconds


def make_app(views: Views) -> web.Application:
    """The application of the admin port."""
    pages = Pages(views)
    middlewares = [answer_refusals]
    if views.cluster is not None and views.cluster.reviews is not None:
        middlewares.append(guard(views.cluster.reviews))
    app = web.Application(middlewares=middlewares, client_max_size=MAX_LOOKUP)
    app.add_routes(
        [
            web.get("/", pages.index),
            web.get("/metrics", pages.metrics),
            web.get("/healthz", pages.healthz),
            web.get("/readyz", pages.readyz),
            web.get("/config", pages.config),
            web.get("/debug/config", pages.reloads),
            web.get("/debug/state", pages.state),
            web.get("/debug/decisions", pages.decisions),
            web.get("/debug/index", pages.prefix_index),
            web.get("/debug/fairness", pages.fairness),
            web.post("/debug/lookup", pages.lookup),
        ]
    )
    return app


class Pages:
    """One method a page."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._gauges = PoolGauges(views.pool, views.load, views.prefix)
        self._events = None if views.events is None else EventsView(views.events, views.pool)
        self._gate = views.gate
        self._fairness = _fairness_view(views)
        self._kubernetes = _kubernetes_view(views)
        self._lookups = 0  # under way

    async def index(self, request: web.Request) -> web.Response:
        """What there is."""
        text = (
            f"Warmpath {version('warmpath')}, endpoint picker of pool {self._views.pool.name}\n\n"
            "/metrics                          for Prometheus\n"
            "/healthz  /readyz                 for probes\n"
            "/config                           the configuration in force (?format=json)\n"
            "/debug/config                     whether the file's last change was taken over\n"
            "/debug/state                      the pods, as the picker sees them\n"
            f"/debug/decisions?limit={DEFAULT_LIMIT}        the last picks, newest first\n"
            "/debug/decisions?request_id=ID    one pick, with the scores of every candidate\n"
            "/debug/index                      what pods told by KV events that they hold\n"
            f"/debug/fairness?limit={DEFAULT_LIMIT}         what tenants got, and what waits\n"
            "/debug/lookup?path=PATH           POST a request's body: who holds its prompt\n"
        )
        return web.Response(text=text)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text: the picker's numbers, and those of its process."""
        page = bytearray()
        all_pages = [
            self._gauges.page(),
            self._views.metrics.page(),
            self._views.reloads.page(),
        ]
        if self._events is not None:
            all_pages.append(EventGauges(self._events).page())
        if self._fairness is not None:
            all_pages.append(FlowGauges(self._fairness).page())
        if self._gate is not None and self._gate.quotas is not None:
            all_pages.append(QuotaGauges(self._gate.quotas).page())
        if self._views.tls is not None:
            all_pages.append(self._views.tls.page())
        if self._views.cluster is not None and self._views.cluster.leader is not None:
            all_pages.append(self._views.cluster.leader.page())
        if self._kubernetes is not None:
            all_pages.append(self._kubernetes.page())
        if (replicas := self._views.replicas) is not None:
            all_pages.append(ReplicaGauges(replicas).page())
        for pages in all_pages:
            for number, piece in enumerate(pages):
                page += piece.encode()
                if number % PIECES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # picks go first: many models make a long page
        page += generate_latest(REGISTRY)
        return web.Response(body=bytes(page), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while the process answers."""
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        """200 while requests are welcome, 503 and the reason otherwise."""
        why = self._views.not_ready()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    async def config(self, request: web.Request) -> web.Response:
        data = as_data(self._views.config())
        data["quota"]["store"] = without_password(data["quota"]["store"])
        if request.query.get("format") == "json":
            return _json(data)
        return web.Response(text=plain(data), content_type="application/yaml")

    async def reloads(self, request: web.Request) -> web.Response:
        """Whether the file's last change was taken over, or why not."""
        return _json(self._views.reloads.state())

    async def state(self, request: web.Request) -> web.Response:
        """The pods as the picker sees them now. `null` is a number that a pod does not tell."""
        views = self._views
        replicas = views.replicas
        canonical = msgspec.json.encode(as_data(views.config()), order="deterministic")
        pods = []
        for address, endpoint in views.pool.endpoints.items():
            load = views.load.describe(endpoint)
            pods.append(
                {
                    "address": address,
                    "name": endpoint.name,
                    "labels": dict(endpoint.labels),
                    "fresh": load.fresh,
                    "loadAgeSeconds": load.age,
                    "scrapeError": load.error,
                    "waiting": load.waiting,
                    "running": load.running,
                    "kvUsage": load.kv_usage,
                    "inflightRequests": load.inflight,
                    "inflightTokens": load.inflight_tokens,
                    "elsewhereRequests": load.elsewhere.requests,
                    "elsewhereTokens": load.elsewhere.tokens,
                    "kvTokens": load.kv_tokens,
                    "runningAdapters": sorted(load.adapters.running),
                    "waitingAdapters": sorted(load.adapters.waiting),
                }
            )
        return _json(
            {
                "version": version("warmpath"),
                "startedAt": views.started,
                "notReady": views.not_ready(),
                "configDigest": hashlib.sha256(canonical).hexdigest()[:16],
                "pool": {"name": views.pool.name, "revision": views.pool.revision, "pods": pods},
                "prefixIndex": {"blocks": views.prefix.blocks},
                "journal": {"picks": len(views.journal)},
                "gate": self._gate_state(),
                "kubernetes": None if self._kubernetes is None else self._kubernetes.state(),
                "replicas": replicas and replicas.state(),
            }
        )

    async def decisions(self, request: web.Request) -> web.Response:
        """The last picks, newest first; with `request_id`, that pick with all its scores."""
        journal = self._views.journal
        request_id = request.query.get("request_id")
        if request_id is not None:
            pick = journal.find(request_id)
            if pick is None:
                raise Refusal(
                    404, "pick_not_found", f"the last {len(journal)} picks have no such request id"
                )
            return _json({"decisions": [detail(pick)]})
        limit = _limit(request.query.get("limit"))
        picks = [summary(pick) for pick, _ in zip(reversed(journal), range(limit), strict=False)]
        return _json({"decisions": picks})

    async def fairness(self, request: web.Request) -> web.Response:
        """What waits, and what tenants got, by priority; `limit` tenants of each at most."""
        limit = _limit(request.query.get("limit"))
        if self._fairness is None:
            raise Refusal(404, "no_flow", "there is no flow control: flow.enabled is false")
        return _json(self._fairness.page(limit))

    def _gate_state(self) -> dict[str, object] | None:
        """What requests pass before their picks; None where that is nothing."""
        if self._gate is None:
            return None
        flow, quotas = self._gate.flow, self._gate.quotas
        return {
            "flow": flow and {"waiting": flow.waiting, "running": flow.running},
            "quota": quotas and {"storeUp": quotas.store_up, "owed": quotas.owed},
        }

    async def prefix_index(self, request: web.Request) -> web.Response:
        """The index of KV events, and those who feed it."""
        tokenizer = self._views.config().prefix.tokenizer
        return _json(await self._precise().all(self._views.metrics, tokenizer))

    async def lookup(self, request: web.Request) -> web.Response:
        """Which pod holds how much of a prompt. The body is a request's, as a client sends it."""
        view = self._precise()
        if self._lookups >= LOOKUPS_AT_ONCE:
            raise Refusal(429, "busy", f"{LOOKUPS_AT_ONCE} lookups are under way", retry_after=1)
        self._lookups += 1
        try:
            path = request.query.get("path", LOOKUP_PATH)
            asked = parse("POST", path, _prompt_headers(request), await _body(request))
            if not asked.prompt:
                raise Refusal(400, "no_prompt", f"there is no prompt in this body for {path}")
            return _json(await view.find(asked))
        finally:
            self._lookups -= 1

    def _precise(self) -> EventsView:
        if self._events is None:
            mode = self._views.config().prefix.mode
            raise Refusal(404, "no_index", f"no KV events are followed: prefix.mode is {mode}")
        return self._events


def _kubernetes_view(views: Views) -> KubernetesView | None:
    if views.kubernetes is None:
        return None
    from picker.kubernetes.view import KubernetesView  # its package need not be installed

    return KubernetesView(views.kubernetes)


def _fairness_view(views: Views) -> FairnessView | None:
    if views.gate is None or views.gate.flow is None:
        return None
    settings = views.config().flow
    return FairnessView(views.gate, views.gate.flow, views.pool, views.load, settings)


@web.middleware
async def answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except Refusal as refusal:
        return web.Response(body=refusal.body, status=refusal.status, headers=refusal.headers)
    return response


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        why = f"a lookup takes at most {MAX_LOOKUP} bytes"
        raise Refusal(413, "body_too_large", why) from None


def _prompt_headers(request: web.Request) -> dict[str, str]:
    """What is JSON whatever a client calls it, and the key by which pods may be asked."""
    key = request.headers.get("authorization")
    return {"content-type": JSON} | ({} if key is None else {"authorization": key})


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= SIZE):
        raise Refusal(400, "bad_limit", f"limit must be a number from 1 to {SIZE}")
    return int(text)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


class AdminServer:
    """Listens on the admin port."""

    def __init__(self, views: Views, host: str, port: int) -> None:
        self._runner = web.AppRunner(make_app(views), access_log=None, shutdown_timeout=1.0)
        self._host = host
        self._port = port

    async def start(self) -> int:
        """Listen; gives the port.

        Raises:
            OSError: it cannot be had.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        await self._runner.cleanup()
