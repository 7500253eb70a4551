"""May a request pass, and what did it use: the quotas of one picker.

admit -> lease | store.reserve -> | over the limit: 429, barred: 403
                   | store down: shares of the limits, or 503
settle -> lease | store.settle -> | store down: kept until it is back
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import msgspec

from picker.config import Quota
from picker.identity import unknown_key
from picker.quota import answers
from picker.quota.estimate import Outputs
from picker.quota.leases import Lease, Leases
from picker.quota.ledger import label
from picker.quota.link import Link
from picker.quota.model import fit_name
from picker.quota.outage import Owed, Shares
from picker.quota.plan import FREE, Amounts, Denied, Granted, Plan, Spent
from picker.quota.policy import Policy
from picker.quota.renewals import LIFE_SECONDS, Renewals
from picker.quota.store import Store, StoreDown
from picker.refusal import Refusal
from picker.usage import Usage

MAX_RELOADS = 10  # of a policy that changes while a request is looked at
UNKNOWN_SECONDS = 0.2  # that a key is known to be nobody's; then the store is asked again
MAX_UNKNOWN = 10_000  # such keys; the oldest go first


class Ask(msgspec.Struct, frozen=True):
    """A request that wants to pass.

    Args:
        subject: whose it is: `tenant/alice`, or `key/ID`.
        model: that it names; empty where it names none.
        prompt_tokens: counted or estimated.
        max_tokens: that its answer may have at most; None where it does not say.
        digest: of the API key that it came with, checked again with the limits.
    """

    subject: str
    model: str = ""
    prompt_tokens: int = 0
    max_tokens: int | None = None
    digest: str | None = None


@dataclass(slots=True, eq=False)
class Admission:
    """A request that may pass. It holds what it reserved until `Quotas.settle`."""

    id: str  # of its reservation
    ask: Ask
    degraded: bool  # the store is down: nobody else knows of this request yet
    _amounts: Amounts
    _plan: Plan
    _granted: Granted
    _at: float  # the store's time
    _settled: bool = False

    @property
    def estimate(self) -> Usage:
        """What was reserved: to settle with where an answer tells no usage."""
        return Usage(self._amounts[1], 0, self._amounts[2])

    @property
    def headers(self) -> answers.Headers:
        """`x-ratelimit-*`, for the answer."""
        return answers.limit_headers(self._plan.checks, self._granted.standings)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that may not pass."""

    refusal: Refusal  # for the client
    limit: str | None = None  # that bound, `tenant/alice total-tokens/minute`
    retry_after: float | None = None  # seconds until it would pass, if nothing else came


@dataclass(slots=True)
class Numbers:
    """Counts since the start, for metrics."""

    granted: int = 0
    leased: int = 0  # of those, without asking the store
    degraded: int = 0  # of those, while it was down
    shadowed: int = 0  # of those, that a limit in shadow would have refused
    denied: Counter[str] = field(default_factory=Counter)  # by the limit's name
    barred: int = 0
    unavailable: int = 0  # refused because the store was down


class Quotas:
    """Admission and settlement for one picker, over one store.

    Args:
        steady: seconds that never jump.
        life: seconds that a reservation outlives its picker, which renews it.
    """

    def __init__(
        self,
        store: Store,
        config: Quota,
        steady: Callable[[], float] = time.monotonic,
        life: float = LIFE_SECONDS,
    ) -> None:
        self.numbers = Numbers()
        self.policy = Policy(config.on_failure)
        self._store = store
        self._config = config
        self._steady = steady
        self._ttl = float(config.reservation_ttl)
        self._life = min(life, self._ttl)
        self._cached_cost = config.cached_cost
        self._name = secrets.token_hex(6)
        self._ids = count()
        self._outputs = Outputs(config.expected_output)
        self._link = Link(store, self.policy, steady)
        self._renewals = Renewals(self._link, life=self._life, most=self._ttl, steady=steady)
        self._shares = Shares(config.replicas, store.wall, steady)
        self._unknown: OrderedDict[str, float] = OrderedDict()  # digests, by when they were sought
        self._leases: Leases | None = None
        if config.leases.enabled:
            self._leases = Leases(
                store,
                self._finish,
                self._renewals.add,
                name=self._name,
                period=float(config.leases.period),
                share=config.leases.share,
                ttl=self._life,
                steady=steady,
            )

    def expect(self, tokens: int) -> None:
        """Reserve so many tokens from now on where nothing tells how long an answer will be."""
        self._outputs.default = tokens

    async def start(self) -> None:
        """Read the limits. A store that is down is waited for in the background."""
        with suppress(StoreDown):
            await self._link.read()

    async def close(self) -> None:
        """Give back what is held, and settle what can be; then close the store."""
        if self._leases is not None:
            await self._leases.close()
        await self._renewals.close()
        await self._link.close()

    @property
    def store_up(self) -> bool:
        """Whether the store answers. The gauge to alert on."""
        return self._link.up

    @property
    def owed(self) -> int:
        """Settlements that wait for the store."""
        return len(self._link.debts)

    @property
    def lost(self) -> int:
        """Settlements that were given up because too many waited."""
        return self._link.debts.lost

    async def admit(self, ask: Ask) -> Admission | Refused:
        """Reserve what a request may use of every limit that it meets, or refuse it."""
        output = self._outputs.expected(ask.subject, ask.model, ask.max_tokens)
        prompt = ask.prompt_tokens
        amounts = (1, prompt, output, prompt + output, 1)
        id = f"{self._name}-{next(self._ids)}"
        if not fit_name(ask.model):  # no limit can name it
            ask = msgspec.structs.replace(ask, model="")
        try:
            for _ in range(MAX_RELOADS):
                answer = await self._try(id, ask, amounts)
                if answer is not None:
                    return answer
                await self._link.read()
        except StoreDown:
            pass
        return await self._degraded(f"{id}-here", ask, amounts)

    def settle(
        self, admission: Admission | str, usage: Usage | None, *, whole: bool = True
    ) -> None:
        """A request has ended: replace what it reserved by what it used, once and soon.

        Args:
            admission: or the id of one, which another picker may have made.
            usage: what the answer told; None when nothing was served: all is given back.
            whole: it is that of a whole answer, which tells how long the next ones may be.
        """
        spent = self._spent(usage)
        if isinstance(admission, str):
            self._renewals.drop(admission)
            self._link.settle(Owed(admission, spent))
            return
        if admission._settled:
            return
        admission._settled = True
        ask = admission.ask
        if usage is not None and whole:
            self._outputs.learn(ask.subject, ask.model, usage.completion_tokens)
        if self._leases is not None and self._leases.settle(admission.id, spent):
            return
        if admission.degraded:
            self._shares.settle(admission.id, spent)
        else:
            self._renewals.drop(admission.id)
        reserved = not admission.degraded
        plan, at = admission._plan, admission._at
        owed = Owed(admission.id, spent, reserved, ask.subject, ask.model, plan, at)
        self._link.settle(owed)

    async def settled(self) -> None:
        """Wait until the store has been told of all that ended, or does not answer."""
        await self._link.settled()

    async def find_key(self, digest: str) -> str | None:
        """Whose API key has a digest; keys that are new are looked for in the store.

        Raises:
            Refusal: 503: the store is down, so that nobody can tell.
        """
        found = self.policy.key_subject(digest)
        if found is not None:
            return found
        now = self._steady()
        sought = self._unknown.get(digest)
        if sought is not None and now - sought < UNKNOWN_SECONDS:
            return None
        try:
            await self._link.read()  # those who seek at the same time share it
        except StoreDown:
            raise self._unavailable().refusal from None
        found = self.policy.key_subject(digest)
        if found is None:
            self._unknown[digest] = now
            self._unknown.move_to_end(digest)
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
        return found

    async def _try(self, id: str, ask: Ask, amounts: Amounts) -> Admission | Refused | None:
        """The answer by the limits as they are known; None when they are no longer the store's.

        Raises:
            StoreDown: it says nothing.
        """
        wall = self._store.wall()
        plan = self.policy.plan(ask.subject, ask.model, wall)
        if _bar(self.policy, plan, ask) is not None:
            await self._link.read()  # it may be barred no longer
            plan = self.policy.plan(ask.subject, ask.model, wall)
            if (refusal := _bar(self.policy, plan, ask)) is not None:
                self.numbers.barred += 1
                return Refused(refusal)
        if self._leases is not None:
            granted = self._leases.take(id, plan, amounts, ask.model)
            if granted is not None:
                self.numbers.leased += 1
                return self._grant(id, ask, amounts, plan, granted, wall)
            await self._link.ask(self._leases.make, plan, amounts, ask.model)
        answer = await self._link.reserve(id, plan, amounts, ask.model, self._life)
        self._shares.rest()
        if isinstance(answer, Granted):
            self._renewals.add(id)
            return self._grant(id, ask, amounts, plan, answer, wall)
        if isinstance(answer, Denied):
            return self._deny(plan, answer)
        return None

    async def _degraded(self, id: str, ask: Ask, amounts: Amounts) -> Admission | Refused:
        """The answer while the store is down."""
        if not self._link.known:
            return self._unavailable()
        wall = self._store.wall()
        plan = self.policy.plan(ask.subject, ask.model, wall)
        if (refusal := _bar(self.policy, plan, ask)) is not None:
            self.numbers.barred += 1
            return Refused(refusal)
        answer = await self._shares.reserve(id, plan, amounts, ask.model, self._ttl)
        if answer is None:
            return self._unavailable()
        if isinstance(answer, Denied):
            return self._deny(plan, answer)
        self.numbers.degraded += 1
        return self._grant(id, ask, amounts, plan, answer, wall, degraded=True)

    def _grant(
        self,
        id: str,
        ask: Ask,
        amounts: Amounts,
        plan: Plan,
        granted: Granted,
        at: float,
        *,
        degraded: bool = False,
    ) -> Admission:
        self.numbers.granted += 1
        if granted.shadowed:
            self.numbers.shadowed += 1
        return Admission(id, ask, degraded, amounts, plan, granted, at)

    def _deny(self, plan: Plan, denied: Denied) -> Refused:
        check = plan.checks[denied.check]
        self.numbers.denied[check.limit.name] += 1
        return Refused(answers.over_limit(plan.checks, denied), label(check), denied.wait)

    def _unavailable(self) -> Refused:
        self.numbers.unavailable += 1
        return Refused(answers.unavailable())

    def _spent(self, usage: Usage | None) -> Spent:
        """What limits and books count of a usage: cached prompt tokens may cost less."""
        if usage is None:
            return FREE
        prompt, output = usage.prompt_tokens, usage.completion_tokens
        cached = min(usage.cached_tokens or 0, prompt)
        counted = prompt - cached + math.ceil(cached * self._cached_cost)
        return Spent((1, counted, output, counted + output, 0), prompt, cached, output)

    def _finish(self, lease: Lease) -> None:
        """Settle a lease that is over."""
        self._renewals.drop(lease.id)
        plan = lease.plan
        owed = Owed(lease.id, lease.spent, True, plan.subject, lease.model, plan, lease.at)
        self._link.settle(owed)


def _bar(policy: Policy, plan: Plan, ask: Ask) -> Refusal | None:
    """Why a subject's requests do not pass at all."""
    if ask.digest is not None and policy.key_subject(ask.digest) != ask.subject:
        return unknown_key()
    return None if plan.barred is None else answers.barred(plan.barred)
