"""A director over the real parts, with a clock that tests set."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from picker.config import Config, EndpointSpec, Prefix, Scheduling
from picker.director import Director
from picker.engines import LoadReport
from picker.gate import Gate
from picker.journal import Journal
from picker.load import Load
from picker.metrics import PickerMetrics
from picker.pool import Endpoint, Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.prefix.match import PrefixProducer
from picker.request import LLMRequest, parse
from picker.schedule import Scheduler
from picker.sessions import Sessions

IDLE = LoadReport(waiting=0, running=0, kv_usage=0.0)


class Core:
    """Everything between a request and its end, without servers and scrapes."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        models: Sequence[str] = (),
        scorers: dict[str, float] | None = None,
        journal_size: int = 1024,
        max_models: int = 1000,
        gate: Config | None = None,
        producer: Callable[[Pool], PrefixProducer] | None = None,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            gate: what requests pass before their picks, by its identity, quota and flow.
            producer: of the prefix index; None: the approximate one.
            seed: of the choice among equal pods; None: another each time.
        """
        self.now = 1000.0
        config = Config()
        random = np.random.default_rng(seed)
        scheduler = Scheduler(Scheduling(scorers=dict(scorers or {})), random=random)
        self.pool = Pool("test")
        self.load = Load(self.pool, clock=lambda: self.now)
        self.prefix: PrefixProducer = (
            ApproximatePrefix(self.pool, Prefix()) if producer is None else producer(self.pool)
        )
        self.metrics = PickerMetrics(max_models)
        self.pool.listen(self.metrics)
        self.journal = Journal(journal_size)
        self.sessions = Sessions(config.sessions, enabled=scheduler.uses_sessions)
        self.gate = None if gate is None else Gate(gate, self.pool, self.load)
        self.director = Director(
            pool=self.pool,
            load=self.load,
            prefix=self.prefix,
            scheduler=scheduler,
            sessions=self.sessions,
            metrics=self.metrics,
            journal=self.journal,
            models=frozenset(models),
            gate=self.gate,
        )
        self.update(addresses)

    def update(self, addresses: Sequence[str]) -> None:
        """The pool has these endpoints, and all are idle and fresh."""
        self.pool.update([EndpointSpec(address=address) for address in addresses])
        for endpoint in self.pool.endpoints.values():
            self.load.report(endpoint, IDLE, self.now)

    def endpoint(self, address: str) -> Endpoint:
        return self.pool.endpoints[address]

    def inflight(self) -> list[tuple[int, int]]:
        """Requests and tokens credited to each endpoint."""
        loads = [self.load.describe(endpoint) for endpoint in self.pool.endpoints.values()]
        return [(load.inflight, load.inflight_tokens) for load in loads]

    def page(self) -> str:
        """The metrics page."""
        return "".join(self.metrics.page())


def completion(
    prompt: str | list[int], model: str = "llama", subset: Sequence[str] | None = None, id: str = ""
) -> LLMRequest:
    body = json.dumps({"model": model, "prompt": prompt}).encode()
    headers = {"content-type": "application/json"} | ({"x-request-id": id} if id else {})
    given = None if subset is None else tuple(subset)
    return parse("POST", "/v1/completions?key=secret", headers, body, subset=given)
