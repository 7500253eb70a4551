"""The picker put together from a configuration: every part made, started and ended in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from picker import optional
from picker.admin import Views
from picker.config import Config, EndpointSpec, PoolSection, Rewrite
from picker.director import Director
from picker.flow import Flow
from picker.gate import Gate, needs_gate
from picker.journal import Journal
from picker.kubernetes import settings as kubernetes
from picker.load import Load
from picker.metrics import PickerMetrics
from picker.pool import Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.prefix.match import PrefixProducer
from picker.quota.admin_server import QuotaAdminServer
from picker.quota.store import Store
from picker.quota.stores import open_store
from picker.reload import Reloads, in_force
from picker.replicas.known import Known
from picker.replicas.peers import check_settings as check_replicas
from picker.replicas.replicas import Replicas, is_one_of_many, read_secret
from picker.rewrites import Rewrites
from picker.schedule import Scheduler
from picker.scrape import Scraper
from picker.scrape import check_settings as check_metrics
from picker.server import LAST_WORDS_SECONDS
from picker.servers import Ports, Servers
from picker.sessions import Sessions
from picker.tls import ServerTls
from picker.tls import check_settings as check_tls

log = logging.getLogger(__name__)

STARTING = "starting"  # not ready yet, and nothing is wrong


class Service:
    """One picker.

    `start`, `until_ready`, then serve; `reload` at any time; `drain` for an orderly end, and `stop`
    in every case.

    Raises:
        ValueError: the configuration names what there is not.
    """

    def __init__(self, config: Config) -> None:
        check_tls(config.listen.tls)
        check_replicas(config.replicas)
        self.config = config
        kubernetes.check(config)
        self._pool = Pool(_pool_name(config))
        self._load = Load(self._pool, config.metrics.stale_after)
        self._events = optional.events_prefix(self._pool, config.prefix)
        if self._events is None:
            self._prompts = ApproximatePrefix(self._pool, config.prefix)
        else:
            self._prompts = self._events.approximate
        self._prefix: PrefixProducer = self._events or self._prompts
        self._scraper = Scraper(self._pool, self._load, config.metrics, self._prefix.resized)
        self._gate: Gate | None = None
        if needs_gate(config):
            self._gate = Gate(config, self._pool, self._load)
        self._metrics = PickerMetrics()
        self._pool.listen(self._metrics)
        self._journal = Journal()
        self._replicas: Replicas | None = None  # where there are other pickers
        scheduler = Scheduler(config.scheduling)
        self.rewrites = Rewrites(config.rewrites, config.rewrite_headers)
        self._sessions = Sessions(config.sessions, enabled=scheduler.uses_sessions)
        self.director = Director(
            pool=self._pool,
            load=self._load,
            prefix=self._prefix,
            scheduler=scheduler,
            sessions=self._sessions,
            metrics=self._metrics,
            journal=self._journal,
            models=frozenset(config.models),
            gate=self._gate,
            rewrites=self.rewrites,
            ignore_subset=config.pool.ignore_subset,
        )
        self._pool.update(config.pool.endpoints)
        self.reloads = Reloads()
        self._cluster_rules: Sequence[Rewrite] = ()  # as Kubernetes has them
        self._cluster = optional.cluster(config, self._tell)
        self._kubernetes = optional.kubernetes_pool(
            config, self._pool, self._flow, self._take_rules
        )
        self._not_ready: str | None = STARTING  # for a reason of our own
        self._servers: Servers | None = None
        self._tls: ServerTls | None = None  # of the gRPC port, where it has it
        self._watching: asyncio.Task[None] | None = None  # its files
        self._store: Store | None = None  # of quotas

    @property
    def not_ready(self) -> str | None:
        """Why requests are not welcome; None when they are."""
        if self._not_ready is None and self._cluster is not None:
            return self._cluster.why_not_leading
        if self._not_ready == STARTING and self._kubernetes is not None:
            return self._kubernetes.waiting_for or STARTING
        return self._not_ready

    def _tell(self) -> None:
        """Probes and watchers, whether we are ready."""
        if self._servers is not None:
            ready = self.not_ready is None
            self._servers.health.set_ready(ready)
            self._servers.lean.ready = ready

    @property
    def num_endpoints(self) -> int:
        return len(self._pool.endpoints)

    @property
    def waiting(self) -> int:
        """Requests in the queue of flow control."""
        return 0 if self._flow is None else self._flow.waiting

    @property
    def _flow(self) -> Flow | None:
        return None if self._gate is None else self._gate.flow

    async def start(self) -> Ports:
        """Listen and look at the pods. The service answers now, but is not ready yet, and its
        HTTP port is still closed.

        Raises:
            OSError: a port cannot be had. What has started is left for `stop`.
            ValueError: a file that the configuration names cannot be used, or there are no
                credentials for Kubernetes.
        """
        if self._gate is not None:
            await self._gate.start(self._quota_store)  # before anybody can ask
        listen = self.config.listen
        if self._cluster is not None:
            await self._cluster.connect()
        if listen.tls.mode != "none":
            self._tls = ServerTls(listen)
            self._watching = asyncio.create_task(self._tls.watch())
        self._replicas = self._make_replicas()
        self._servers = Servers(
            self.director,
            self.config,
            self._pool,
            self._views(),
            still=lambda: self.not_ready is None,
            synced=lambda: self._kubernetes is None or self._kubernetes.synced,
            tls=self._tls,
            quota=self._quota_admin(),
            replicas=self._replicas,
        )
        ports = await self._servers.start()
        await self._prefix.start()
        if self._replicas is not None:
            await self._replicas.start()
        await self._scraper.start()
        if self._kubernetes is not None:
            await self._kubernetes.start()
        return ports

    async def until_ready(self) -> None:
        """Wait until it is known which pods there are, and each has told its load, and what it
        holds, or failed to.

        From then on the service is ready.
        """
        if self._kubernetes is not None:
            await self._kubernetes.first_round()
            self._tell()  # that the pool is known
        await self._scraper.first_round()
        await self._prefix.first_round()
        if self._replicas is not None:
            await self._replicas.first_round()
        assert self._servers is not None, "started"
        await self._servers.lean.serve()
        self._not_ready = None
        if self._cluster is not None:
            self._cluster.stand()
        self._tell()

    async def drain(self) -> None:
        """No longer ready, and `config.drain_delay` later nothing new is taken; what runs has
        `config.drain` to end. What still waits for its turn then is refused."""
        assert self._servers is not None, "started"
        delay, seconds = self.config.drain_delay, self.config.drain
        self._not_ready = "draining"
        self._tell()
        log.info("No longer ready; requests are taken for another %g s", delay)
        if self._cluster is not None:  # so that another leads while we drain
            await asyncio.gather(self._cluster.resign(), asyncio.sleep(delay))
        else:
            await asyncio.sleep(delay)
        log.info("Draining: nothing new is taken, and what runs has %g s to end", seconds)
        refusing = None
        if self._gate is not None:  # early enough for the answers to be read
            until = max(0.0, seconds - LAST_WORDS_SECONDS)
            refusing = asyncio.get_running_loop().call_later(until, self._gate.refuse_waiting)
        lean = asyncio.ensure_future(self._servers.lean.drain())
        try:
            await asyncio.gather(lean, self._servers.ext_proc.drain(lean))
        finally:
            if refusing is not None:
                refusing.cancel()
        log.info("Drained")

    async def stop(self) -> None:
        """End everything now."""
        self._not_ready = "stopped"
        if self._watching is not None:
            self._watching.cancel()
        if self._cluster is not None:
            await self._cluster.close()
        if self._kubernetes is not None:
            await self._kubernetes.stop()
        if self._replicas is not None:
            await self._replicas.stop()
        await self._scraper.stop()
        await self._prefix.stop()
        if self._servers is not None:
            await self._servers.stop()
        if self._gate is not None:
            await self._gate.stop()
        if self._store is not None:
            await self._store.close()

    def reload(self, config: Config) -> None:
        """Take over a configuration, as far as that needs no restart; the rest is told.

        Requests that were picked end under what they began with.

        Where the pods are found in Kubernetes, the file has none to take over.

        Raises:
            ValueError: it cannot be used; nothing has changed then.
        """
        old = self.config
        new, waiting = in_force(old, config)
        scheduler = Scheduler(new.scheduling)
        Rewrites(new.rewrites)
        check_metrics(new.metrics)
        if self._gate is not None:
            self._gate.check(new)
        if not kubernetes.is_used(new):
            self._list(new.pool.endpoints)
        # From here on nothing fails.
        self.config = new
        self._sessions.reconfigure(new.sessions, enabled=scheduler.uses_sessions)
        self.director.reconfigure(
            scheduler, frozenset(new.models), ignore_subset=new.pool.ignore_subset
        )
        if new.rewrites != old.rewrites:
            self._take_rules(self._cluster_rules)
        self._load.stale_after = new.metrics.stale_after
        if new.metrics != old.metrics:
            self._scraper.reconfigure(new.metrics)
        if self._gate is not None:
            self._gate.reconfigure(new)
        if self._servers is not None:
            self._servers.ext_proc.reconfigure(new)
            self._servers.lean.reconfigure(new)
        self.reloads.succeeded(waiting)
        if new != old:
            log.info("The configuration has changed")
        if waiting:
            log.warning(
                "Changed in the file, but only a restart applies it: %s", ", ".join(waiting)
            )

    def _list(self, endpoints: list[EndpointSpec]) -> None:
        """Make these the endpoints. Raises ValueError."""
        before = set(self._pool.endpoints)
        self._pool.update(endpoints)
        after = set(self._pool.endpoints)
        if before != after:
            log.info(
                "The pool has %d endpoints: %d came, %d left",
                len(after),
                len(after - before),
                len(before - after),
            )

    def _take_rules(self, rules: Sequence[Rewrite]) -> None:
        """Rewrite by the cluster's rules, after those of the file, which win."""
        self._cluster_rules = rules
        self.rewrites.update([*self.config.rewrites, *rules])

    def _make_replicas(self) -> Replicas | None:
        """Our part among the pickers of the pool, where there are others."""
        if not is_one_of_many(self.config.replicas):
            return None
        secret = read_secret(self.config.replicas)
        naming = 0
        if self._events is not None and secret:
            from picker.prefix import keys  # its package need not be installed

            naming = keys.share(secret)
        known = Known(
            self._pool,
            self._load,
            self._prompts,
            self._sessions,
            self._flow,
            None if self._events is None else self._events.index,
            naming,
        )
        return Replicas(self.config, known, secret, self._handed)

    def _handed(self, entry: bytes) -> None:
        """Another picker got an entry of Envoy's access log that is ours."""
        assert self._servers is not None, "listening"
        self._servers.access_log.handed(entry)

    def _quota_admin(self) -> QuotaAdminServer | None:
        """Lets the configured administer quotas."""
        quota, listen = self.config.quota, self.config.listen
        if not quota.admin.tokens:
            return None
        return QuotaAdminServer(self._quota_store(), quota, listen.host, listen.quota)

    def _quota_store(self) -> Store:
        """The one store: requests and administrators meet there."""
        if self._store is None:
            self._store = open_store(self.config.quota.store, float(self.config.quota.timeout))
        return self._store

    def _views(self) -> Views:
        return Views(
            pool=self._pool,
            load=self._load,
            prefix=self._prefix,
            events=self._events,
            journal=self._journal,
            metrics=self._metrics,
            config=lambda: self.config,
            not_ready=lambda: self.not_ready,
            replicas=self._replicas,
            gate=self._gate,
            tls=self._tls,
            reloads=self.reloads,
            kubernetes=self._kubernetes,
            cluster=self._cluster,
        )


def _pool_name(config: Config) -> str:
    """As set; unless that is, the InferencePool's."""
    is_set = config.pool.name != PoolSection().name
    return config.pool.name if is_set else config.pool.kubernetes.pool or config.pool.name


def check_config(config: Config) -> None:
    """Raises ValueError when no service can be made of a configuration.

    Files that it names are not looked at: what is wrong with them is no reason to refuse a change.
    """
    Service(config)


def check_start(config: Config) -> None:
    """`check_config`, and that the files can be used that a start needs. Raises ValueError."""
    check_config(config)
    if config.listen.tls.mode != "none":
        ServerTls(config.listen)
    if is_one_of_many(config.replicas):
        read_secret(config.replicas)
