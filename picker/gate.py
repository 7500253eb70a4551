"""What a request passes before its pick: who asks, what its quotas allow, when it is its turn.

identity -> quotas.admit -> flow.wait -> (the pick) -> flow.left, quotas.settle

Whoever enters leaves, exactly once, whatever ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picker.config import Config
from picker.engines import LoadReport
from picker.flow import Flow
from picker.identity import Caller, Identities, Owner
from picker.load import Load
from picker.pool import Endpoint, Pool
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.store import Store
from picker.request import LLMRequest
from picker.running_output import RunningOutput
from picker.saturation import Saturation
from picker.usage import Usage
from picker.waiting import Visit


@dataclass(slots=True, eq=False)
class Passage:
    """One request, from its entry to its end. Whatever ends it, `left` counts once."""

    caller: Caller
    prompt_tokens: int  # counted or estimated
    _gate: Gate
    admission: Admission | None = None
    visit: Visit | None = None
    tokens_seen: int = 0  # of the answer, as it passed; 0 where nobody sees it
    endpoint: Endpoint | None = None  # that it is on
    _over: bool = False

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What the client is told of its limits: `x-ratelimit-*`."""
        return [] if self.admission is None else self.admission.headers

    def picked(self, endpoint: Endpoint) -> None:
        """The load counts it on an endpoint from now on."""
        self._gate.picked(self, endpoint)

    def moved(self, served: Endpoint) -> None:
        """Another endpoint than the picked one answers it."""
        self._gate.moved(self, served)

    def streamed(self, tokens: int) -> None:
        """So many more tokens of the answer have passed."""
        self.tokens_seen += tokens
        self._gate.streamed(self)

    def left(self, usage: Usage | None) -> None:
        """It is over, and used this; None: nothing was served."""
        if not self._over:
            self._over = True
            self._gate.left(self, usage)

    def spent(self) -> Usage:
        """What it used where its answer did not tell: the prompt, and what was seen or reserved."""
        if self.tokens_seen or self.admission is None:
            return Usage(self.prompt_tokens, None, self.tokens_seen)
        return self.admission.estimate


class Gate:
    """Identity, quotas and flow control of one picker, those that are switched on.

    Raises:
        ValueError: the configuration names what there is not.
    """

    def __init__(self, config: Config, pool: Pool, load: Load) -> None:
        self._settings = config.quota
        self.quotas: Quotas | None = None  # once it has started
        self.identities = Identities(config.identity, self._owner)
        self.flow: Flow | None = None
        self.running = RunningOutput(self._estimated)
        self.saturation: Saturation | None = None
        if config.flow.enabled:
            self.saturation = Saturation(pool, load, config.flow.saturation)
            self.flow = Flow(config.flow, self.saturation)
            pool.listen(self.running)
            load.on_report = self._told
        self._settling: set[asyncio.Task[None]] = set()

    async def start(self, store: Callable[[], Store]) -> None:
        """Read the limits. `store` of them is opened where they are to hold.

        Raises:
            ValueError: it cannot be.
        """
        if self._settings.enabled:
            self.quotas = Quotas(store(), self._settings)
            await self.quotas.start()

    async def stop(self) -> None:
        """Refuse what waits, and settle what has ended."""
        if self.flow is not None:
            self.flow.close()
        await asyncio.gather(*self._settling)
        if self.quotas is not None:
            await self.quotas.close()

    async def enter(self, request: LLMRequest) -> Passage:
        """Wait until a request may go.

        Raises:
            Refusal: it may not.
        """
        caller = await self._caller(request)
        passage = Passage(caller, request.prompt_tokens, self)
        try:
            if self.quotas is not None:
                passage.admission = await self._admit(self.quotas, caller, request)
            if self.flow is not None:
                visit = passage.visit = self.flow.visit(
                    caller.tenant,
                    request.headers,
                    prompt_tokens=request.prompt_tokens,
                    size=len(request.body),
                    most_output=request.most_output,
                )
                turn = self.flow.wait(visit)
                if turn is not None:
                    await turn
        except BaseException:  # also of a client that left
            passage.left(None)
            raise
        return passage

    def with_room(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some pods that can take a request; all of them if none can."""
        return slots if self.saturation is None else self.saturation.with_room(slots)

    async def _caller(self, request: LLMRequest) -> Caller:
        digest = self.identities.key_digest(request.headers)
        if self.quotas is not None and digest is not None:
            await self.quotas.find_key(digest)  # a new one may not be known here yet
        return self.identities.caller(request.headers, request.claim)

    @staticmethod
    async def _admit(quotas: Quotas, caller: Caller, request: LLMRequest) -> Admission:
        answer = await quotas.admit(
            Ask(
                caller.subject,
                request.model or "",
                request.prompt_tokens,
                request.most_output,
                caller.digest,
            )
        )
        if isinstance(answer, Refused):
            raise answer.refusal
        return answer

    # What its passages do

    def picked(self, passage: Passage, endpoint: Endpoint) -> None:
        passage.endpoint = endpoint
        if self.flow is not None and passage.visit is not None:
            self.flow.picked(passage.visit)
            self.running.began(passage, endpoint)

    def moved(self, passage: Passage, served: Endpoint) -> None:
        if passage.endpoint is not None:
            self.running.moved(passage, passage.endpoint, served)
        passage.endpoint = served

    def streamed(self, passage: Passage) -> None:
        if passage.visit is not None and self.flow is not None:
            if passage.endpoint is not None:  # what is counted need not be estimated
                self.running.ended(passage, passage.endpoint)
            self.flow.streamed(passage.visit, passage.tokens_seen)

    def left(self, passage: Passage, usage: Usage | None) -> None:
        if passage.visit is not None and self.flow is not None:
            if passage.endpoint is not None:
                self.running.ended(passage, passage.endpoint)
            if usage is None:
                self.flow.left(passage.visit)
            else:
                self.flow.left(passage.visit, usage.prompt_tokens, usage.completion_tokens)
        if self.quotas is not None and passage.admission is not None:
            settling = asyncio.create_task(self.quotas.settle(passage.admission, usage))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)

    def _estimated(self, passage: Passage, tokens: int) -> None:
        if passage.visit is not None and self.flow is not None:
            self.flow.streamed(passage.visit, tokens)

    def _told(self, endpoint: Endpoint, report: LoadReport) -> None:
        """A pod told its load."""
        self.running.told(endpoint, report)
        if self.flow is not None:
            self.flow.wake()

    def _owner(self, digest: str) -> Owner | None:
        """Whose an API key is."""
        if self.quotas is None:
            return None
        policy = self.quotas.policy
        subject = policy.key_subject(digest)
        if subject is None:
            return None
        above = (name for name, _ in policy.ancestry(subject))
        tenant = next((name for name in above if name.startswith("tenant/")), subject)
        return Owner(subject, tenant.removeprefix("tenant/"))
