"""LLMRequest in, endpoint out: one owner of each step, and of what follows a pick.

prefix.prepare -> subset -> prefix.match -> schedule -> load.credit, prefix.learn      when picked
load.release, metrics, journal                                       when it ends
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picker.gate import Gate, Passage
from picker.journal import Journal
from picker.load import Load
from picker.metrics import PickerMetrics
from picker.pool import Endpoint, Pool
from picker.prefix.match import By, PrefixProducer, Prepare
from picker.refusal import Refusal
from picker.request import LLMRequest, parse
from picker.rewrites import Rewrites
from picker.schedule import RETRY_SECONDS, Decision, Scheduler
from picker.sessions import Sessions
from picker.splice import ModelRewrite, Splice, ask_for_usage, name_model
from picker.usage import Usage

log = logging.getLogger(__name__)

MAX_PATH = 256  # characters that a pick keeps: picks are kept by the thousand


class Outcome(StrEnum):
    """How a picked request ended."""

    COMPLETED = "completed"  # the end of its response was seen, with a status below 500
    FAILED = "failed"  # the end was seen, with a status of 500 or more
    ABORTED = "aborted"  # it ended before its response did


@dataclass(slots=True, eq=False)
class Pick:
    """One request on its way. Whatever ends it, `end` does the work that follows exactly once."""

    request_id: str
    model: str | None  # that its pod is asked for
    path: str
    prompt_tokens: int
    decision: Decision
    endpoint: Endpoint  # the chosen one, then the one that really serves
    uncached_tokens: int  # of the prompt, on that endpoint
    prompt_blocks: int  # of the prefix index
    matched_blocks: int  # of those, on that endpoint
    matched_by: By
    picked_at: float  # Unix seconds
    _director: Director
    _session: bytes  # its key
    splice: Splice | None = None  # asks for its usage, in its body on its way
    rewrite: ModelRewrite | None = None  # names the model there, where another was asked for
    passage: Passage | None = None  # through the gate, while it runs, where there is one
    tenant: str | None = None  # the same, to be kept
    waited: float | None = None  # seconds in the queue of flow control, where there is one
    status: int | None = None
    first_token_seconds: float | None = None
    usage: Usage | None = None
    outcome: Outcome | None = None
    seconds: float | None = None  # from the pick to the end
    _credited_tokens: int = 0
    _sent_at: float = -math.inf  # by the load's clock, as long as it may be waiting
    _use: Any = None  # of the prefix, while the pick may move
    _started: float = field(default_factory=time.monotonic)

    @property
    def destination(self) -> str:
        """`x-gateway-destination-endpoint`: the endpoint, and those to fall back to."""
        return ",".join(self.decision.endpoints)

    @property
    def asked_model(self) -> str | None:
        """By the client."""
        return self.model if self.rewrite is None else self.rewrite.asked

    @property
    def predicted_tokens(self) -> int:
        """Of the prompt, those that the endpoint's cache is expected to hold."""
        return self.prompt_tokens - self.uncached_tokens

    def response_started(self, status: int, served_by: str | None = None) -> None:
        """The response's headers came; `served_by` is the endpoint they came from, if told.

        Only the first call counts.
        """
        if self.outcome is None and self.status is None:
            self.status = status
            if served_by is not None and served_by != self.endpoint.address:
                self._director.moved(self, served_by)
            self._use = None  # it moves no more

    @property
    def client_headers(self) -> list[tuple[str, str]]:
        """For its answer: what the client is told of its limits."""
        return [] if self.passage is None else self.passage.headers

    def streamed(self, tokens: int) -> None:
        """So many more tokens of its answer passed."""
        if self.passage is not None and self.outcome is None:
            self.passage.streamed(tokens)

    def first_token(self, after: float | None = None) -> None:
        """The first bytes of the response's body came, `after` seconds from the pick."""
        if self.outcome is None and self.first_token_seconds is None:
            elapsed = time.monotonic() - self._started
            self.first_token_seconds = elapsed if after is None else after
            self._director.prefilled(self)

    def end(
        self, outcome: Outcome, usage: Usage | None = None, *, after: float | None = None
    ) -> None:
        """The request is over, `after` seconds from the pick. Only the first call counts.

        `usage` is what the response told; an answer other than a 2xx has none to tell.
        """
        if self.outcome is None:
            self.outcome = outcome
            if self.status is None or self.status < 300:
                self.usage = usage
            self.seconds = time.monotonic() - self._started if after is None else after
            self._director.ended(self)


class Director:
    """Routes requests over one pool."""

    def __init__(
        self,
        *,
        pool: Pool,
        load: Load,
        prefix: PrefixProducer,
        scheduler: Scheduler,
        sessions: Sessions,
        metrics: PickerMetrics,
        journal: Journal,
        models: frozenset[str] = frozenset(),
        gate: Gate | None = None,
        ignore_subset: bool = False,
        rewrites: Rewrites | None = None,
    ) -> None:
        """
        Args:
            ignore_subset: pick among all endpoints, whatever subset a gateway names.
            gate: what requests pass before their picks, and which counts their tokens. The server
                of a stream whose client did not ask for its usage is asked by us, and what it adds
                to the stream is taken out again.
        """
        self._gate = gate
        self.counts_usage = gate is not None and gate.counts_usage
        self._ignore_subset = ignore_subset
        self._pool = pool
        self._load = load
        self._prefix = prefix
        self._scheduler = scheduler
        self._sessions = sessions
        self._metrics = metrics
        self._journal = journal
        self._models = models
        self.rewrites = rewrites or Rewrites()
        self._faults: set[tuple[type[Exception], str]] = set()  # that were logged

    def route(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        subset: tuple[str, ...] | None = None,
        claim: str | None = None,
    ) -> Pick | Coroutine[None, None, Pick]:
        """The endpoint for a request as it came: `request.parse`, rewrite, gate, then `pick`.

        Returns the pick itself where nothing has to be waited for, which is what most requests
        meet and spares them a task.

        Raises:
            Refusal: theirs, from here or from what is awaited. It is counted.
        """
        try:
            request = parse(method, path, headers, body, subset=subset, claim=claim)
            if self.rewrites.active:
                self.rewrites.apply(request)
            tokens = self._prefix.prepare(request)
            passage = None
            if tokens is None and self._gate is not None:
                passage = self._gate.pass_at_once(request)
        except Exception as problem:
            raise self._refusal(problem) from None
        if passage is not None:
            return self._pick_passed(request, passage)
        if tokens is None and self._gate is None:
            return self.pick(request)
        return self._pick_later(request, tokens)

    async def _pick_later(self, request: LLMRequest, tokens: Prepare | None) -> Pick:
        if tokens is not None:
            await tokens()
        if self._gate is None:
            return self.pick(request)
        try:
            passage = await self._gate.enter(request)
        except Exception as problem:
            raise self._refusal(problem) from None
        return self._pick_passed(request, passage)

    def _pick_passed(self, request: LLMRequest, passage: Passage) -> Pick:
        try:
            return self.pick(request, passage)
        except Refusal:
            passage.left(None)
            raise

    def pick(self, request: LLMRequest, passage: Passage | None = None) -> Pick:
        """The endpoint for a request, credited with its load.

        Raises:
            Refusal: 404 for a model that is not served, 503 when no endpoint may serve it, 500
                when a part of the picker failed, such as a scorer. It is counted.
        """
        started = time.perf_counter()
        try:
            pick = self._pick(request)
        except Exception as problem:
            raise self._refusal(problem) from None
        if passage is not None:
            pick.passage = passage
            pick.tenant, pick.waited = passage.caller.tenant, passage.waited
            passage.picked(pick.endpoint)
        self._metrics.picked(pick, time.perf_counter() - started)
        return pick

    def reconfigure(
        self, scheduler: Scheduler, models: frozenset[str], *, ignore_subset: bool
    ) -> None:
        """Pick by these from now on; what is picked stays as it is."""
        self._scheduler = scheduler
        self._models = models
        self._ignore_subset = ignore_subset

    def refused(self, refusal: Refusal) -> None:
        """Count a refusal; those that `route` and `pick` raise are counted already."""
        self._metrics.refused(refusal)

    def _refusal(self, problem: Exception) -> Refusal:
        """What the client is told of a problem. Each fault in code is logged once."""
        if isinstance(problem, Refusal):
            refusal = problem
        else:
            refusal = Refusal(500, "internal_error", "the request could not be routed")
            fault = type(problem), _raised_at(problem)
            if fault not in self._faults:
                self._faults.add(fault)
                log.error("A request could not be routed", exc_info=problem)
        self.refused(refusal)
        return refusal

    def _pick(self, request: LLMRequest) -> Pick:
        if self._models and request.model is not None and request.model not in self._models:
            known = ", ".join(sorted(self._models)[:10])
            raise Refusal(404, "model_not_found", f"the model is not served here; known: {known}")
        rows = self._candidates(request)
        match = self._prefix.match(request)
        session = self._sessions.key(request.headers)
        pods = self._load.pods(rows, match.tokens, self._sessions.find(session))
        decision = self._scheduler.schedule(request, pods)
        endpoint = self._pool.endpoints[decision.endpoints[0]]
        uncached = max(0, request.prompt_tokens - round(float(match.cached[endpoint.slot])))
        pick = Pick(
            request_id=request.id,
            model=request.model,
            path=request.path.partition("?")[0][:MAX_PATH],  # a query may hold secrets
            prompt_tokens=request.prompt_tokens,
            decision=decision,
            endpoint=endpoint,
            uncached_tokens=uncached,
            prompt_blocks=match.num_blocks,
            matched_blocks=int(match.blocks[endpoint.slot]),
            matched_by=match.by_of(endpoint.slot),
            picked_at=time.time(),
            _director=self,
            _session=session,
            splice=self._splice(request),
            rewrite=None if request.asked_model is None else _rewrite(request),
            _credited_tokens=uncached,
        )
        self._load.credit(endpoint, uncached)
        cold = match.num_blocks > 0 and not match.blocks.any()
        pick._sent_at = self._load.picked(endpoint, cold)
        # Now and not with the response, so that a burst of equal prompts stays together.
        pick._use = self._prefix.learn(match, endpoint)
        self._sessions.keep(session, endpoint)
        self._journal.record(pick)
        return pick

    def _candidates(self, request: LLMRequest) -> NDArray[np.intp]:
        """Slots of the endpoints that may serve a request."""
        if not self._pool.endpoints:
            raise Refusal(503, "no_endpoints", self._pool.why_empty, retry_after=5)
        if request.subset is None or self._ignore_subset:
            return self._with_room(self._pool.slots)
        rows = self._pool.among(request.subset)
        if not len(rows):
            why = "no endpoint of the pool is in the subset"
            raise Refusal(503, "empty_subset", why, retry_after=RETRY_SECONDS)
        return self._with_room(rows)

    def _with_room(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """What was let go because one endpoint had room is not for another."""
        return rows if self._gate is None else self._gate.with_room(rows)

    def _splice(self, request: LLMRequest) -> Splice | None:
        if not request.stream or not self.counts_usage:
            return None
        return ask_for_usage(request.body, request.stream_options)

    def moved(self, pick: Pick, address: str) -> None:
        """Another endpoint than the picked one serves a pick: all that it brought goes there.

        An endpoint that is not of the pool changes nothing.
        """
        served = self._pool.endpoints.get(address)
        if served is None:
            return
        picked, pick.endpoint = pick.endpoint, served
        self._load.release(picked, pick._credited_tokens)
        self._load.moved(picked, served, pick._sent_at)
        pick._sent_at = -math.inf
        pick.matched_blocks, tokens = self._prefix.moved(pick._use, picked, served)
        pick.uncached_tokens = max(0, pick.prompt_tokens - tokens)
        pick._credited_tokens = pick.uncached_tokens if pick.first_token_seconds is None else 0
        self._load.credit(served, pick._credited_tokens)
        self._sessions.keep(pick._session, served)
        if pick.passage is not None:
            pick.passage.moved(served)
        self._metrics.moved()

    def prefilled(self, pick: Pick) -> None:
        self._load.release_tokens(pick.endpoint, pick._credited_tokens)
        self._waits_no_more(pick)

    def ended(self, pick: Pick) -> None:
        self._load.release(pick.endpoint, pick._credited_tokens)
        self._waits_no_more(pick)
        pick._use = None  # the journal keeps the pick, not its keys
        if pick.passage is not None:
            pick.passage.left(_used(pick, pick.passage), told=pick.usage is not None)
            pick.passage = None
        self._metrics.ended(pick)

    def _waits_no_more(self, pick: Pick) -> None:
        pick._credited_tokens = 0
        self._load.waits_no_more(pick.endpoint, pick._sent_at)
        pick._sent_at = -math.inf


def _rewrite(request: LLMRequest) -> ModelRewrite:
    asked, model, value = request.asked_model, request.model, request.model_value
    assert asked is not None and model is not None and value is not None
    return ModelRewrite(asked, name_model(request.body, value, model))


_TOO_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # as pods say it


def _used(pick: Pick, passage: Passage) -> Usage | None:
    """What a request used, for its quotas; None: nothing that it has to pay for.

    A client that leaves pays for its prompt and for what was made for it until then. Whom we or the
    pods failed pays nothing, and one whose request was wrong no tokens: it is a request all the
    same.
    """
    if pick.usage is not None:
        return pick.usage
    if pick.outcome is Outcome.FAILED or pick.status in _TOO_BUSY:
        return None
    if pick.status is not None and pick.status >= 300:
        return Usage(0, None, 0)
    if pick.outcome is Outcome.ABORTED:
        return Usage(passage.prompt_tokens, None, passage.tokens_seen)
    return passage.spent()


def _raised_at(problem: Exception) -> str:
    """The line of code, as `file:line`."""
    trace = traceback.extract_tb(problem.__traceback__)
    return f"{trace[-1].filename}:{trace[-1].lineno}" if trace else ""
