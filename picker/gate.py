"""What a request passes before its pick: who asks, what its quotas allow, when it is its turn.

identity -> quotas.admit -> flow.wait -> (the pick) -> flow.left, quotas.settle

Whoever enters leaves, exactly once, whatever ends the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from picker.config import Config
from picker.engines import LoadReport
from picker.flow import Flow
from picker.flow_gauges import Waits
from picker.identity import Caller, Identities, Owner
from picker.load import Load
from picker.objectives import check_settings as check_flow
from picker.pool import Endpoint, Pool
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.store import Store
from picker.quota.stores import check_settings as check_quota
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
    most_output: int | None = None  # tokens, where the request limits them
    endpoint: Endpoint | None = None  # that it is on
    estimated: int = 0  # tokens of the answer so far, by the pod's pace
    _streamed: int = 0  # those that passed
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

    @property
    def tokens_seen(self) -> int:
        """Of the answer so far: as they passed; where nobody sees them, as estimated."""
        return self._streamed or self.estimated

    def streamed(self, tokens: int) -> None:
        """So many more tokens of the answer have passed."""
        self._streamed += tokens
        self._gate.streamed(self)

    def left(self, usage: Usage | None, *, told: bool = False) -> None:
        """It is over, and used this; None: nothing was served. `told`: its answer said so."""
        if not self._over:
            self._over = True
            self._gate.left(self, usage, told=told)

    @property
    def waited(self) -> float | None:
        """Seconds in the queue; None where there is none."""
        return None if self.visit is None else self.visit.waited

    def spent(self) -> Usage:
        """What it used where its answer did not tell: the prompt, and what was seen or reserved."""
        if self.tokens_seen or self.admission is None:
            return Usage(self.prompt_tokens, None, self.tokens_seen)
        return self.admission.estimate


def needs_gate(config: Config) -> bool:
    """Whether requests have anything to pass before their picks."""
    return config.quota.enabled or config.flow.enabled or config.identity.tells


class Gate:
    """Identity, quotas and flow control of one picker, those that are switched on.

    Raises:
        ValueError: the configuration names what there is not.
    """

    def __init__(self, config: Config, pool: Pool, load: Load) -> None:
        if config.quota.enabled:
            check_quota(config.quota)
        self._queues = config.flow.enabled and config.flow.queue
        if not config.usage and (config.quota.enabled or self._queues):
            raise ValueError("usage: tokens have to be read where quota or flow is enabled")
        self._settings = config.quota
        self.store: Store | None = None  # of quotas, once it has started
        self.quotas: Quotas | None = None  # the same
        self.identities = self._identities(config)
        self._reads_keys = config.identity.keys
        self.flow: Flow | None = None
        self.running = RunningOutput(self._estimated)
        self.waits = Waits()
        self.longest_prompt = 0  # tokens, of the requests that came
        pool.listen(self.running)
        load.on_report = self._told
        self.saturation: Saturation | None = None
        if config.flow.enabled:
            self.saturation = Saturation(pool, load, config.flow.saturation)
            self.flow = Flow(config.flow, self.saturation)

    def check(self, config: Config) -> None:
        """Raises ValueError: `reconfigure` could not use this."""
        self._identities(config)
        check_flow(config.flow)

    def reconfigure(self, config: Config) -> None:
        """Tell callers, and let go, by other settings from now on.

        Raises:
            ValueError: they cannot be used; nothing has changed then.
        """
        self.check(config)
        self.identities = self._identities(config)
        self._reads_keys = config.identity.keys
        if self.flow is not None and self.saturation is not None:
            self.saturation.reconfigure(config.flow.saturation)
            self.flow.reconfigure(config.flow)
        if self.quotas is not None:
            self.quotas.expect(config.quota.expected_output)

    def _identities(self, config: Config) -> Identities:
        if config.identity.claim and config.envoy.profile == "lean":
            raise ValueError("identity.claim: only the standard profile shows claims to the picker")
        if config.identity.keys and not config.quota.enabled:
            raise ValueError("identity.keys: the store of quotas has them: set quota.enabled too")
        return Identities(config.identity, self._owner)

    async def start(self, store: Callable[[], Store]) -> None:
        """Read the limits. `store` of them is opened where they are to hold.

        Raises:
            ValueError: it cannot be.
        """
        if self._settings.enabled:
            self.store = store()
            self.quotas = Quotas(self.store, self._settings)
            await self.quotas.start()

    def refuse_waiting(self) -> None:
        """Refuse what waits for its turn, and all that comes."""
        if self.flow is not None:
            self.flow.close()

    async def stop(self) -> None:
        """Refuse what waits, and settle what has ended."""
        self.refuse_waiting()
        if self.quotas is not None:
            await self.quotas.close()

    async def settled(self) -> None:
        """Wait until the quotas know of all that has ended."""
        if self.quotas is not None:
            await self.quotas.settled()

    def pass_at_once(self, request: LLMRequest) -> Passage | None:
        """Let a request pass that has to wait for nothing; None: it has to `enter`.

        Raises:
            Refusal: it may not.
        """
        if self.quotas is not None:
            return None
        passage = self._passage(request)
        if self.flow is not None and _costs(request):
            passage.visit = self._visit(self.flow, passage, request)
            if not self.flow.go(passage.visit):
                return None
            self.waits.observe(passage.visit.priority, 0.0)
        return passage

    async def enter(self, request: LLMRequest) -> Passage:
        """Wait until a request may go.

        Raises:
            Refusal: it may not.
        """
        if self.quotas is not None and self._reads_keys:
            digest = self.identities.key_digest(request.headers)
            if digest is not None:
                await self.quotas.find_key(digest)  # a new one may not be known here yet
        passage = self._passage(request)
        try:
            if self.quotas is not None:
                passage.admission = await self._admit(self.quotas, passage.caller, request)
            if self.flow is not None and _costs(request):
                visit = passage.visit = self._visit(self.flow, passage, request)
                turn = self.flow.wait(visit)
                if turn is not None:
                    await turn
                self.waits.observe(visit.priority, visit.waited or 0.0)
        except BaseException:  # also of a client that left
            passage.left(None)
            raise
        return passage

    def with_room(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some pods that can take a request; all of them if none can, or nobody waits."""
        if self.saturation is None or not self._queues:
            return slots
        return self.saturation.with_room(slots)

    @property
    def counts_usage(self) -> bool:
        """Whether it matters what each request used."""
        return self._settings.enabled or self._queues

    def _passage(self, request: LLMRequest) -> Passage:
        tokens = request.prompt_tokens
        if tokens > self.longest_prompt:
            self.longest_prompt = tokens
        caller = self.identities.caller(request.headers, request.claim)
        return Passage(caller, tokens, self, most_output=request.most_output)

    @staticmethod
    def _visit(flow: Flow, passage: Passage, request: LLMRequest) -> Visit:
        return flow.visit(
            passage.caller.tenant,
            request.headers,
            prompt_tokens=request.prompt_tokens,
            size=len(request.body),
            most_output=request.most_output,
        )

    @staticmethod
    async def _admit(quotas: Quotas, caller: Caller, request: LLMRequest) -> Admission:
        answer = await quotas.admit(
            Ask(
                caller.subject,
                request.asked_model or request.model or "",
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
        self.running.began(passage, endpoint)
        if self.flow is not None and passage.visit is not None:
            self.flow.picked(passage.visit)

    def moved(self, passage: Passage, served: Endpoint) -> None:
        if passage.endpoint is not None:
            self.running.moved(passage, passage.endpoint, served)
        passage.endpoint = served

    def streamed(self, passage: Passage) -> None:
        if passage.endpoint is not None:  # what is counted need not be estimated
            self.running.ended(passage, passage.endpoint)
        if passage.visit is not None and self.flow is not None:
            self.flow.streamed(passage.visit, passage.tokens_seen)

    def left(self, passage: Passage, usage: Usage | None, *, told: bool) -> None:
        if passage.endpoint is not None:
            self.running.ended(passage, passage.endpoint)
        if passage.visit is not None and self.flow is not None:
            if usage is not None and told:
                self.flow.left(passage.visit, usage.prompt_tokens, usage.completion_tokens)
            else:
                self.flow.left(passage.visit)  # it knows what was seen or estimated
        if self.quotas is not None and passage.admission is not None:
            self.quotas.settle(passage.admission, usage, whole=told)

    def _estimated(self, passage: Passage, tokens: int) -> None:
        if passage.most_output is not None:
            tokens = min(tokens, passage.most_output)
        passage.estimated = max(passage.estimated, tokens)
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


def _costs(request: LLMRequest) -> bool:
    """Whether a pod has to do something for it, so that it waits its turn."""
    return request.method == "POST"
