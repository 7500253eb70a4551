"""Takes part in the election of one picker of several: the others serve, but are not ready.

For pools that were made for the reference picker, whose replicas are one active and some that
wait. `election.py` decides; this asks the API server and keeps the times.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator

from picker.config import Config, LeaderElection
from picker.exposition import Spec, write
from picker.kubernetes.client import Api
from picker.kubernetes.election import Election
from picker.kubernetes.errors import ApiError
from picker.kubernetes.lease import LeaseObject

log = logging.getLogger(__name__)

NAME = "epp-{namespace}-{pool}.gateway-api-inference-extension.sigs.k8s.io"  # the reference's
JITTER = 1.2  # pauses are up to so much longer, so that candidates do not come together
RESIGN_SECONDS = 2.0  # to hand the lease over, at the end
MAX_SHOWN = 200  # characters of a holder's name

MASTER = Spec(  # named as client-go's, which dashboards of controllers know
    "gauge",
    "leader_election_master_status",
    ("name",),
    "1 for the picker that leads, by the name of its Lease.",
)


class Leader:
    """One candidate. `start` when it could lead, `stop` when it no longer can."""

    def __init__(self, api: Api, config: Config, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever we begin or cease to lead."""
        settings = config.leader_election
        pool = config.pool.kubernetes.pool or config.pool.name
        self._settings = settings
        self._name = settings.lease or NAME.format(namespace=api.namespace, pool=pool)
        self._lease = LeaseObject(api, self._name)
        self._on_change = on_change
        self._election = Election(
            f"{socket.gethostname()}_{uuid.uuid4()}",
            duration=float(math.ceil(settings.duration)),
            deadline=settings.renew_deadline,
        )
        self._told = False  # whether we led when it was last looked at
        self._problem = ""  # of the last attempt
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None  # of leading, unless it is renewed

    @property
    def leads(self) -> bool:
        """Whether we lead at this moment, also when this process stood still until now."""
        return self._election.leads(time.monotonic())

    @property
    def why_not(self) -> str:
        """Why we do not lead."""
        holder = self._election.holder
        if holder and holder != self._election.identity:
            return f"{_shown(holder)} leads"
        return self._problem or "no picker leads yet"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Lead no more, and let the next one lead at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        resignation = self._election.resign()
        self._told = False
        self._look("")
        self._on_change()
        if resignation is None:
            return
        try:
            async with asyncio.timeout(RESIGN_SECONDS):
                if await self._lease.write(resignation) is not None:
                    log.info("Lease %s is free", self._name)
        except (ApiError, TimeoutError) as problem:
            log.warning("Lease %s could not be handed over: %s", self._name, problem)

    def page(self) -> Iterator[str]:
        """Its metric as Prometheus' text."""
        yield from write(MASTER, [((self._name,), int(self.leads))])

    async def _run(self) -> None:
        settings = self._settings
        log.info("Standing for election as %s, by Lease %s", self._election.identity, self._name)
        before = None
        while True:
            problem = ""
            try:
                async with asyncio.timeout(settings.renew_deadline / 2):
                    await self._attempt()
            except (ApiError, TimeoutError) as error:
                problem = str(error) or "Kubernetes' API does not answer in time"
                if problem != self._problem:
                    log.warning("The Lease cannot be kept: %s", problem)
            except Exception:
                log.exception("The Lease cannot be kept")
            self._problem = problem
            self._look(problem or f"{_shown(self._election.holder)} has the lease")
            if not self.leads and self._election.holder != before:
                before = self._election.holder
                log.info("Following: %s", self.why_not)
            await asyncio.sleep(settings.retry * random.uniform(1.0, JITTER))

    async def _attempt(self) -> None:
        """Look at the lease, and write it if that is our turn."""
        election, lease = self._election, self._lease
        if not self.leads:  # else we know it: we wrote it
            election.read(await lease.read(), time.monotonic())
        asked = time.monotonic()
        proposal = election.proposal(asked)
        if proposal is None:
            return
        written = await lease.write(proposal)
        if written is not None:
            election.wrote(written, asked, time.monotonic())
        else:
            election.read(await lease.read(), time.monotonic())

    def _look(self, why: str) -> None:
        """Tell of a change; `why` we lead no more, if that is so."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        leads = self.leads
        if leads:
            rest = self._election.until - time.monotonic()
            late = f"the lease was not renewed for {self._settings.renew_deadline:g} s"
            self._end = asyncio.get_running_loop().call_later(rest + 0.001, self._expired, late)
        if leads == self._told:
            return
        self._told = leads
        if leads:
            log.info("Leading: Lease %s is ours", self._name)
        else:
            log.warning("No longer leading: %s", why)
        self._on_change()

    def _expired(self, why: str) -> None:
        self._look(f"{why}: {self._problem}" if self._problem else why)


def check_settings(settings: LeaderElection) -> None:
    """Raises ValueError when times do not go together."""
    if not settings.renew_deadline < settings.duration:
        raise ValueError(
            "leaderElection.renewDeadline must be less than 'leaderElection.duration': else two "
            "pickers may lead"
        )
    if not settings.retry * JITTER < settings.renew_deadline:
        raise ValueError(
            f"leaderElection.retry must be less than 'leaderElection.renewDeadline' by a factor of "
            f"{JITTER}"
        )


def _shown(holder: str) -> str:
    cut = holder[:MAX_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in cut) or "nobody"
