"""Drives the pool from Kubernetes: an InferencePool, its pods, and its policies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from picker.config import Config, EndpointSpec
from picker.kubernetes.client import Api
from picker.kubernetes.endpoints import Endpoints, Group, group_of
from picker.kubernetes.objects import POOL_GROUP, X_GROUP, InferencePool, XInferencePool
from picker.kubernetes.pace import Pace
from picker.kubernetes.policies import Policies, TakePriorities, TakeRules
from picker.kubernetes.reflector import Phase, Reflector
from picker.kubernetes.resource import Resource
from picker.kubernetes.selection import Selection
from picker.pool import NO_ENDPOINT, Pool

log = logging.getLogger(__name__)

MAX_NAMED = 10  # pods in a line of the log
H2C = "kubernetes.io/h2c"


class KubernetesPool:
    """Keeps a pool as Kubernetes has it. `start`, wait for `first_round`, and `stop`."""

    def __init__(
        self,
        config: Config,
        pool: Pool,
        *,
        on_priorities: TakePriorities | None = None,
        on_rules: TakeRules | None = None,
        pace: Pace = Pace(),  # noqa: B008
    ) -> None:
        """See Policies for `on_priorities` and `on_rules`."""
        self.unused: dict[str, str] = {}  # why a pod is not used, by its name
        self.api: Api | None = None  # once started
        self._settings = config.pool.kubernetes
        self._pool = pool
        self._on_priorities = on_priorities
        self._on_rules = on_rules
        self._pace = pace
        events = config.prefix.events if config.prefix.mode == "events" else None
        self._endpoints = Endpoints(events)
        self._pools: Reflector[Any] | None = None  # of the one InferencePool
        self._selection: Selection | None = None
        self._policies: Policies | None = None
        self._group: Group | None = None  # that the log told of
        self._changed = asyncio.Event()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow.

        Raises:
            ValueError: there are no credentials for Kubernetes.
        """
        settings = self._settings
        self.api = api = await Api.connect(settings)
        notice = self._changed.set
        self._selection = Selection(api, notice, self._pace)
        what = f"the pods with {dict(settings.selector)}"
        if settings.pool:
            what = f"InferencePool {settings.pool}"
            self._pools = _pool_reflector(api, settings.pool, settings.group, notice, self._pace)
            self._pools.start()
            self._policies = Policies(
                api,
                settings,
                notice,
                self._pace,
                on_priorities=self._on_priorities,
                on_rules=self._on_rules,
            )
            self._policies.start()
        log.info("Following %s in namespace %s at %s", what, api.namespace, api.server)
        self._changed.set()
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._selection is not None:
            await self._selection.stop()
        if self._pools is not None:
            await self._pools.stop()
        if self._policies is not None:
            await self._policies.stop()
        if self.api is not None:
            await self.api.close()

    async def first_round(self) -> None:
        """Wait until the pool is as Kubernetes has it."""
        await self._first.wait()

    @property
    def synced(self) -> bool:
        """Whether that was so once."""
        return self._first.is_set()

    @property
    def waiting_for(self) -> str:
        """What the first round waits for; empty once it is over."""
        if self.synced:
            return ""
        needed = [] if self._selection is None else [*self._selection.reflectors]
        errors = (each.error for each in (self._pools, *needed) if each is not None)
        return next(filter(None, errors), "") or self._absence() or "the pods are not known yet"

    @property
    def reflectors(self) -> list[Reflector[Any]]:
        """All that is followed."""
        return [
            *([] if self._pools is None else [self._pools]),
            *([] if self._selection is None else self._selection.reflectors),
            *([] if self._policies is None else self._policies.reflectors),
        ]

    async def _keep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._apply()
            except Exception:  # what comes next may put it right
                log.exception("The pool could not be brought up to date")
            await asyncio.sleep(self._pace.gather)

    def _apply(self) -> None:
        """Bring the pool up to date."""
        assert self._selection is not None, "started"
        if self._policies is not None:
            self._policies.apply()
        absence = self._absence()
        if self._pools is None or self._pools.phase is Phase.SYNCED or absence:
            self._selection.want(None if absence else self._wanted())
        selected = self._selection.pods()
        if absence:
            self._use([], {}, absence)
        elif selected is not None:
            group, found = selected
            self._tell_group(group)
            endpoints = self._endpoints.of(found, group.ports)
            self._use(endpoints.specs, endpoints.unused, NO_ENDPOINT)
            if self._policies is None or self._policies.settled:
                self._first.set()

    def _wanted(self) -> Group:
        settings = self._settings
        if self._pools is None:
            return Group(settings.selector, tuple(settings.target_ports))
        return group_of(self._pools.objects[settings.pool])

    def _absence(self) -> str:
        """Why there is no InferencePool; empty: there is, or it is not known yet."""
        pools, name = self._pools, self._settings.pool
        if pools is None:
            return ""
        if pools.phase is Phase.ABSENT:
            return pools.error
        if pools.phase is not Phase.SYNCED:
            return ""
        pool = pools.objects.get(name)
        if pool is None:
            return f"there is no InferencePool {name} in namespace {pools.resource.namespace}"
        return ""

    def _use(self, specs: list[EndpointSpec], unused: dict[str, str], why_empty: str) -> None:
        """Make these the pool's endpoints, and tell what changes."""
        if self._pool.why_empty != why_empty:
            if why_empty != NO_ENDPOINT:
                log.warning("The pool is empty: %s", why_empty)
            self._pool.why_empty = why_empty
        before = set(self._pool.endpoints.values())
        revision = self._pool.revision
        self._pool.update(specs)
        if self._pool.revision != revision:
            after = self._pool.endpoints.values()
            came = [each for each in after if each not in before]
            left = before.difference(after)
            if came or left:
                log.info(
                    "The pool has %d endpoints%s%s",
                    len(after),
                    _named("came", (f"{each.name} {each.address}" for each in came)),
                    _named("left", (f"{each.name} {each.address}" for each in left)),
                )
        news = [f"{name}: {why}" for name, why in unused.items() if self.unused.get(name) != why]
        if news:
            log.info("%d pods are not used%s", len(unused), _named("of them", news))
        self.unused = unused

    def _tell_group(self, group: Group) -> None:
        if group == self._group:
            return
        self._group = group
        log.info("The pool's pods have %s, and the ports %s", dict(group.labels), group.ports)
        if group.protocol == H2C:
            log.warning("The pool's pods speak %s: their load is asked for by HTTP/1.1", H2C)


def _pool_reflector(
    api: Api, name: str, group: str, on_change: Any, pace: Pace
) -> Reflector[InferencePool] | Reflector[XInferencePool]:
    resource = Resource(POOL_GROUP, "v1", "inferencepools", api.namespace)
    if group == X_GROUP:
        resource = resource._replace(group=X_GROUP, version="v1alpha2")
        return Reflector(api, resource, XInferencePool, on_change, pace, name=name)
    return Reflector(api, resource, InferencePool, on_change, pace, name=name)


def _named(what: str, those: Iterable[str]) -> str:
    """`; came: a, b and 3 more`; nothing where there is nobody."""
    names = list(those)
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"; {what}: {', '.join(names[:MAX_NAMED])}{more}"
