"""The virtual token counter: which tenant is served next, so that all get equal service.

Each tenant has a counter of the service that it got, and the one with the least goes next. A tenant
that had nothing waiting is lifted to the others when it comes back, so that it cannot save up
credit by staying away. A request's prompt is charged when it is dispatched, its output while it
comes.

Tenants may be served by other pickers, too: what they got there is added here.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithms 2 (here with
any cost and with weights, section 4.2) and 3 (expected lengths).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from picker.cost import Cost, TokenCost

MAX_IDLE = 100_000  # tenants without any request whose counters are remembered
SLACK = 64  # entries of the heap that may be out of date before it is made anew


@dataclass(slots=True, eq=False)
class Counter:
    """What one tenant was charged. Others may read it."""

    tenant: str
    value: float = 0.0  # virtual tokens: charges over weight, and lifts
    service: float = 0.0  # charges over weight alone, which is what fairness is measured by
    waiting: bool = False  # whether a request of the tenant waits
    arrivals: int = 0  # how often it began to wait
    lifts: int = 0  # how often that raised the value
    lifted: float = 0.0  # by so much in all
    open: int = 0  # dispatched requests that are not settled
    _entry: int = -1  # number of its valid entry in the heap
    _refundable: float = inf  # of what requests were charged before the tenant last arrived


@dataclass(slots=True, eq=False)
class Account:
    """What one dispatched request was charged."""

    counter: Counter
    weight: float
    prompt_tokens: int
    expected: int  # output tokens that were charged in advance
    output_tokens: int = 0  # that came so far
    charged: float = 0.0  # cost, before it is divided by the weight
    _arrival: int = 0  # of the tenant, at which this was dispatched


class VirtualTokenCounter:
    """Counters of tenants that share one queue. All operations are O(log tenants), amortised.

    "Waiting" is having a request in the queue, not having one on a pod. Whoever owns the queue says
    so: `arrive` before a tenant's first request there, `leave` after its last has left it.
    """

    def __init__(
        self,
        cost: Cost | None = None,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        *,
        max_idle: int = MAX_IDLE,
    ) -> None:
        """
        Args:
            cost: of a request; None: one per input token and two per output token.
            weight: of a tenant, above 0: service is shared in this proportion.
            max_idle: tenants without requests that are remembered. One that is forgotten starts
                again at the level of those who wait.
        """
        self._cost = TokenCost() if cost is None else cost
        self.weight = weight
        self._max_idle = max_idle
        self._counters: dict[str, Counter] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # the longest idle first
        # Values when they were written, with a number that no other entry has. Charges make an
        # entry too low, which is put right when it comes to the top; refunds write another.
        self._heap: list[tuple[float, int, Counter]] = []
        self._entries = 0
        self._last: Counter | None = None  # of the tenant that last stopped waiting
        # Told of each charge here: the tenant, by how much its service grew, and whether that is
        # of a request that goes just now.
        self.on_charge: Callable[[str, float, bool], None] | None = None
        self.num_waiting = 0  # tenants
        self.lifts = 0  # of all tenants, also of those that are forgotten

    def __iter__(self) -> Iterator[Counter]:
        """All that are remembered."""
        return iter(self._counters.values())

    def __len__(self) -> int:
        return len(self._counters)

    def find(self, tenant: str) -> Counter | None:
        return self._counters.get(tenant)

    # The queue

    def arrive(self, tenant: str) -> None:
        """The tenant, which had nothing in the queue, gets something there: the counter's lift."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._counters[tenant] = Counter(tenant)
        elif not counter.open:
            self._idle.pop(tenant, None)
        assert not counter.waiting
        self._lift(counter)
        counter.waiting = True
        self.num_waiting += 1
        self._push(counter)

    def leave(self, tenant: str) -> None:
        """The tenant has nothing in the queue any more."""
        counter = self._counters[tenant]
        assert counter.waiting
        counter.waiting = False
        counter._entry = -1
        self.num_waiting -= 1
        self._last = counter
        if not counter.open:
            self._rest(counter)

    def least(self) -> str | None:
        """The waiting tenant with the smallest counter, which is to be served next."""
        counter = self._least()
        return None if counter is None else counter.tenant

    @property
    def spread(self) -> float:
        """The greatest difference between counters of waiting tenants. O(tenants)."""
        values = [counter.value for counter in self._counters.values() if counter.waiting]
        return max(values) - min(values) if values else 0.0

    # Charges

    def dispatch(self, tenant: str, prompt_tokens: int, expected: int = 0) -> Account:
        """A request of a waiting tenant leaves the queue; `expected` output tokens are charged."""
        counter = self._counters[tenant]
        assert counter.waiting
        counter.open += 1
        account = Account(
            counter, self.weight(tenant), prompt_tokens, expected, 0, 0.0, counter.arrivals
        )
        self._charge(account, self._cost(prompt_tokens, expected), goes=True)
        return account

    def output(self, account: Account, tokens: int) -> None:
        """The request has so many output tokens by now; fewer than before change nothing.

        So an answer that begins again, after a preemption or on another pod, is not charged twice.
        """
        if tokens > account.output_tokens:
            account.output_tokens = tokens
            if tokens > account.expected:
                self._charge(account, self._cost(account.prompt_tokens, tokens))

    def settle(
        self, account: Account, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> None:
        """The request is over, with these tokens; None: those that are known. Once only."""
        prompt = account.prompt_tokens if prompt_tokens is None else prompt_tokens
        output = account.output_tokens if output_tokens is None else output_tokens
        account.prompt_tokens, account.output_tokens = prompt, output
        self._close(account, self._cost(prompt, output))

    def cancel(self, account: Account) -> None:
        """The request got no service at all. Instead of `settle`."""
        self._close(account, 0.0)

    def _close(self, account: Account, cost: float) -> None:
        counter = account.counter
        self._charge(account, cost)
        counter.open -= 1
        assert counter.open >= 0
        if not counter.open and not counter.waiting:
            self._rest(counter)

    def _charge(self, account: Account, cost: float, *, goes: bool = False) -> None:
        """Bring what a request was charged to `cost`. `goes`: it is dispatched."""
        more = (cost - account.charged) / account.weight
        account.charged = cost
        counter = account.counter
        counter.service += more
        if self.on_charge is not None and (more or goes):
            self.on_charge(counter.tenant, more, goes)
        if more >= 0:
            counter.value += more
            return
        if account._arrival != counter.arrivals:
            more = -min(-more, counter._refundable)
            counter._refundable += more
        counter.value += more
        if counter.waiting:
            self._push(counter)

    # Other pickers

    def charge_elsewhere(self, tenant: str, more: float, *, came: bool) -> None:
        """The tenant's service grew by this at another picker.

        Args:
            more: over the tenant's weight; below 0 it is a refund.
            came: a request of the tenant came there, which lifts the counter as one here does.
        """
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._counters[tenant] = Counter(tenant)
            came = True
        if came and not counter.waiting:
            self._lift(counter)
        counter.service += more
        if more < 0:  # nobody knows of which request: see `_lift`
            more = -min(-more, counter._refundable)
        counter._refundable += more
        counter.value += more
        if counter.waiting:
            if more < 0:
                self._push(counter)
        elif not counter.open:
            self._idle.pop(tenant, None)
            self._rest(counter)

    def adopt(self, tenant: str, value: float) -> None:
        """The counter of a tenant at another picker, for one that knows none of its tenants yet."""
        if tenant not in self._counters:
            counter = self._counters[tenant] = Counter(tenant, value)
            self._rest(counter)

    # Inside

    def _lift(self, counter: Counter) -> None:
        """The tenant comes after it had nothing waiting."""
        level = self._level()
        if level is None:
            counter._refundable = inf
        else:
            behind = level - counter.value
            if behind > 0:
                counter.value = level
                counter.lifts += 1
                self.lifts += 1
                counter.lifted += behind
            # A refund of what was charged before would have left more to lift: it must not
            # take the counter below this level again.
            counter._refundable = counter.value - level
        counter.arrivals += 1

    def _level(self) -> float | None:
        """What a tenant that comes is lifted to."""
        least = self._least() or self._last
        return None if least is None else least.value

    def _least(self) -> Counter | None:
        heap = self._heap
        while heap:
            value, number, counter = heap[0]
            if counter._entry != number:
                heapq.heappop(heap)
            elif value < counter.value:
                self._entries = counter._entry = self._entries + 1
                heapq.heapreplace(heap, (counter.value, counter._entry, counter))
            else:
                return counter
        return None

    def _push(self, counter: Counter) -> None:
        self._entries = counter._entry = self._entries + 1
        if len(self._heap) > 2 * self.num_waiting + SLACK:
            self._heap = [entry for entry in self._heap if entry[2]._entry == entry[1]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (counter.value, counter._entry, counter))

    def _rest(self, counter: Counter) -> None:
        """The tenant has no request anywhere."""
        self._idle[counter.tenant] = None
        if len(self._idle) > self._max_idle:
            tenant, _ = self._idle.popitem(last=False)
            del self._counters[tenant]
