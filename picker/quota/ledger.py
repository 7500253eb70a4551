"""The books: counters, and the reservations that hold some of them.

Plain data and arithmetic, no clock and no I/O. The memory store is this and a clock; the SQLite
store is this over rows that it loads and writes; `lua/` says the same again for Redis.

Times are Unix seconds: `now` for buckets and expiry, which may be a steadier clock, and `wall` for
the calendar.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from picker.quota.bucket import Counter
from picker.quota.plan import (
    ALL,
    DAY,
    FREE,
    NO_RATE,
    NOTHING,
    Amounts,
    Check,
    Denied,
    Draw,
    Granted,
    Line,
    Plan,
    Spent,
    Standing,
)

EPSILON = 1e-6  # of a token: what rounding of levels may add up to
BUSY_SECONDS = 1.0  # when to ask again for a place among the concurrent: nobody knows
LATE_SECONDS = 168 * 3600.0  # that an expired reservation is remembered: its end may still come
NUM_DENIALS = 1000  # the last ones


class Reservation(msgspec.Struct, array_like=True):
    """What an admitted request holds until its end."""

    id: str
    subject: str
    model: str
    lines: tuple[Line, ...]
    ttl: float  # seconds that it had when it was made, or changed
    expires: float
    expired: bool = False  # its lines hold nothing any more; it is remembered for a while


class Denial(NamedTuple):
    """A request that was refused, or would have been by a limit in shadow."""

    at: float  # Unix seconds
    subject: str  # who asked
    model: str
    limit: str  # `tenant/alice total-tokens/minute`
    amount: int
    wait: float | None
    shadow: bool


@dataclass(slots=True)
class Use:
    """What a subject's requests for a model used on one day."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    denied: int = 0


_Asked = tuple[Check, str, Counter, int, list[tuple[Draw, int]] | None]
"""A check, its counter with its key, what is asked of it, and what of its grants."""

UseKey = tuple[int, str, str]
"""Days since 1970 (UTC), subject, model."""


class Ledger:
    """Counters by key, reservations by id, and the books of use."""

    def __init__(self) -> None:
        self.counters: dict[str, Counter] = {}
        self.reservations: dict[str, Reservation] = {}
        self.uses: dict[UseKey, Use] = {}
        self.denials: deque[Denial] = deque(maxlen=NUM_DENIALS)
        self._by_expiry: dict[float, OrderedDict[str, None]] = {}  # ids, by their time to live
        self._next_due = math.inf  # nothing expires before that

    # What a store with rows of its own overrides.

    def counter(self, key: str) -> Counter:
        """A counter; a new one stands at zero."""
        counter = self.counters.get(key)
        if counter is None:
            counter = self.counters[key] = Counter()
        return counter

    def reservation(self, id: str) -> Reservation | None:
        return self.reservations.get(id)

    def changed(self, key: str) -> None:
        """A counter is not what it was."""

    def keep(self, reservation: Reservation) -> None:
        """Add a reservation: of those with the same time to live, the last to expire."""
        self.reservations[reservation.id] = reservation
        queue = self._by_expiry.get(reservation.ttl)
        if queue is None:
            queue = self._by_expiry[reservation.ttl] = OrderedDict()
        queue[reservation.id] = None
        if reservation.expires < self._next_due:
            self._next_due = reservation.expires

    def drop(self, reservation: Reservation) -> None:
        del self.reservations[reservation.id]
        del self._by_expiry[reservation.ttl][reservation.id]

    def due(self, now: float) -> list[Reservation]:
        """Reservations whose time is over."""
        found = []
        self._next_due = math.inf
        for queue in self._by_expiry.values():
            for id in queue:
                reservation = self.reservations[id]
                if reservation.expires > now:
                    self._next_due = min(self._next_due, reservation.expires)
                    break
                found.append(reservation)
        return found

    # What all stores do.

    def reserve(
        self, id: str, plan: Plan, amounts: Amounts, model: str, ttl: float, now: float, wall: float
    ) -> Granted | Denied:
        """Charge every limit, or none if one of them refuses. All in one step."""
        if now >= self._next_due:
            self.expire(now)
        asked: list[_Asked] = []
        refusing, wait = -1, -1.0
        shadowed: tuple[int, ...] = ()
        for check in plan.checks:
            key = check.key
            if check.calendar is not None:
                key = f"{key}\t{check.calendar.span(wall)[0]}"
            counter = self.counters.get(key) or self.counter(key)
            if counter.rate != check.rate:
                self._retune(key, counter, check.rate, now)
            if check.rate >= 0:
                counter.leak(now)
                used = counter.level
            else:
                used = counter.value
            need = amounts[check.what]
            if need > check.capacity:  # more than there ever is: it passes when nothing is used
                need = check.capacity or 1
            over = used + need - check.capacity
            draws: list[tuple[Draw, int]] | None = None
            if over > EPSILON and need:
                draws, missing = self._draw(check, need, over, wall)
                if not missing:
                    need -= sum(amount for _, amount in draws)
                elif check.shadow:
                    draws = None
                    shadowed = (*shadowed, len(asked))
                else:
                    takes = _wait(check, over, wall)
                    if takes > wait:
                        refusing, wait = len(asked), takes
            asked.append((check, key, counter, need, draws))
        if refusing >= 0:
            return self._deny(plan, refusing, wait, asked, model, wall)
        lines = []
        standings = []
        for check, key, counter, need, draws in asked:
            counter.value += need
            if check.rate >= 0:
                seq = counter.charge(need) if need else counter.seq
                reset = counter.level / check.rate if check.rate else 0.0
                counter.until = now + reset
                lines.append(Line(key, need, check.what, seq, False, check.rate, 0.0))
                standings.append((counter.level, reset))
            elif check.calendar is not None:
                end = check.calendar.span(wall)[1]
                counter.until = end + DAY
                lines.append(Line(key, need, check.what, 0, False, NO_RATE, end + DAY))
                standings.append((counter.value, end - wall))
            else:
                lines.append(Line(key, need, check.what, 0, False, NO_RATE, 0.0))
                standings.append((counter.value, BUSY_SECONDS))
            self.changed(key)
            if draws:
                lines += [self._hold(draw, amount, check.what) for draw, amount in draws]
        self.keep(Reservation(id, plan.subject, model, tuple(lines), ttl, now + ttl))
        for index in shadowed:
            self._note(plan, index, asked[index][3], None, model, wall, shadow=True)
        return Granted(tuple(standings), shadowed)

    def settle(self, id: str, spent: Spent, now: float, wall: float) -> bool:
        """Replace what a request reserved by what it used. False when that was done before."""
        self.expire(now)
        reservation = self.reservation(id)
        if reservation is None:
            return False
        self.drop(reservation)
        self._resize(reservation, spent.amounts, now, final=True)
        self._use(reservation.subject, reservation.model, spent, wall)
        return True

    def charge(
        self,
        id: str,
        subject: str,
        model: str,
        lines: Sequence[Line],
        spent: Spent,
        now: float,
        wall: float,
    ) -> None:
        """Charge what was used without a reservation here."""
        held = tuple(replace(line, amount=0, seq=0) for line in lines)
        reservation = Reservation(id, subject, model, held, 0.0, now)
        self._resize(reservation, spent.amounts, now, final=True)
        self._use(subject, model, spent, wall)

    def shrink(self, id: str, amounts: Amounts, ttl: float, now: float) -> bool:
        """Let a reservation hold `amounts` at most, for a new time to live.

        False when there is no such reservation any more.
        """
        self.expire(now)
        reservation = self.reservation(id)
        if reservation is None or reservation.expired:
            return False
        self.drop(reservation)
        self._resize(reservation, amounts, now, final=False)
        reservation.ttl, reservation.expires = ttl, now + ttl
        self.keep(reservation)
        return True

    def renew(self, ids: Sequence[str], ttl: float, now: float) -> None:
        """Give open reservations a new time to live."""
        for id in ids:
            self.shrink(id, ALL, ttl, now)

    def expire(self, now: float) -> None:
        """Give back what reservations hold that have outlived their time.

        Nobody knows whether these requests run on or died with their picker. Should an end still
        come, all that the request used is charged then, as debt where others have used what was
        given back.
        """
        if now < self._next_due:
            return
        for reservation in self.due(now):
            self.drop(reservation)
            if not reservation.expired:
                self._resize(reservation, NOTHING, now, final=False)
                reservation.expired = True
                reservation.ttl, reservation.expires = LATE_SECONDS, now + LATE_SECONDS
                self.keep(reservation)

    def adjust(self, key: str, amount: int, rate: float, until: float, now: float) -> None:
        """Charge a counter by hand, or give it credit. A bucket takes credit down to zero."""
        self._recharge(Line(key, 0, 0, self.counter(key).seq, False, rate, until), amount, now)

    def reset(self, key: str, now: float) -> None:
        """Nothing is used; open reservations still hold what they hold, but of a bucket nothing."""
        counter = self.counter(key)
        counter.value -= counter.settled
        counter.settled = 0
        if counter.rate >= 0:
            counter.leak(now)
            counter.empty()
        self.changed(key)

    def _hold(self, draw: Draw, amount: int, what: int) -> Line:
        """Draw on a grant."""
        counter = self.counter(draw.key)
        counter.value += amount
        counter.until = draw.expires + DAY
        self.changed(draw.key)
        return Line(draw.key, amount, what, 0, True, NO_RATE, counter.until)

    def _draw(
        self, check: Check, need: int, over: float, wall: float
    ) -> tuple[list[tuple[Draw, int]], int]:
        """What grants give of what is too much, and what is missing then."""
        missing = min(need, math.ceil(over - EPSILON))
        draws = []
        for draw in check.grants:
            if draw.expires > wall and (left := draw.amount - self.counter(draw.key).value) > 0:
                taken = min(left, missing)
                draws.append((draw, taken))
                missing -= taken
                if not missing:
                    break
        return draws, missing

    def _resize(
        self, reservation: Reservation, amounts: Amounts, now: float, *, final: bool
    ) -> None:
        """Make a reservation's lines hold no more than `amounts`, or settle them when final.

        Draws on grants give back first. What is more than all lines held is the limit's debt.
        """
        kept: list[int] = []
        start = left = 0  # where the limit's own line is, and what its lines do not hold yet
        for line in reservation.lines:
            if not line.draws:
                if left and final:
                    kept[start] += left
                start, left = len(kept), amounts[line.what]
            kept.append(left if left < line.amount else line.amount)
            left -= kept[-1]
        if left and final:
            kept[start] += left
        for line, amount in zip(reservation.lines, kept, strict=True):
            if amount != line.amount or (final and amount):
                self._recharge(line, amount, now, final=final)
        if not final:
            reservation.lines = tuple(
                replace(line, amount=amount)
                for line, amount in zip(reservation.lines, kept, strict=True)
            )

    def _recharge(self, line: Line, amount: int, now: float, *, final: bool = True) -> None:
        """Charge a line's counter the difference to what the line holds."""
        difference = amount - line.amount
        counter = self.counters.get(line.key) or self.counter(line.key)
        if counter.rate < 0 <= line.rate:  # it was forgotten since
            counter.rate, counter.at = line.rate, now
        if line.until > counter.until:
            counter.until = line.until
        counter.value += difference
        if final:
            counter.settled += amount
        if counter.rate >= 0 and difference and not line.draws:
            counter.leak(now)
            if difference > 0:
                counter.charge(difference)
                counter.until = max(counter.until, now + _leak_time(counter))
            else:
                counter.give_back(-difference, line.seq)
        self.changed(line.key)

    def _retune(self, key: str, counter: Counter, rate: float, now: float) -> None:
        """A limit was changed, or is new."""
        if counter.rate >= 0:
            counter.leak(now)
        counter.rate, counter.at = rate, now
        self.changed(key)

    def _deny(
        self,
        plan: Plan,
        refusing: int,
        wait: float,
        asked: list[_Asked],
        model: str,
        wall: float,
    ) -> Denied:
        amount = asked[refusing][3]
        told = None if math.isinf(wait) else wait
        self._note(plan, refusing, amount, told, model, wall, shadow=False)
        return Denied(refusing, told, amount, self._standings(asked, wall))

    def _note(
        self,
        plan: Plan,
        index: int,
        amount: int,
        wait: float | None,
        model: str,
        wall: float,
        *,
        shadow: bool,
    ) -> None:
        limit = label(plan.checks[index])
        self.denials.append(Denial(wall, plan.subject, model, limit, amount, wait, shadow))
        if not shadow:
            self._day(plan.subject, "", wall).denied += 1  # a model's name may be anything here

    def _use(self, subject: str, model: str, spent: Spent, wall: float) -> None:
        if spent == FREE:
            return
        use = self._day(subject, model, wall)
        use.requests += spent.amounts[0]
        use.prompt_tokens += spent.prompt_tokens
        use.cached_tokens += spent.cached_tokens
        use.completion_tokens += spent.completion_tokens

    def _day(self, subject: str, model: str, wall: float) -> Use:
        key = int(wall // DAY), subject, model
        use = self.uses.get(key)
        if use is None:
            use = self.uses[key] = Use()
        return use

    def _standings(self, asked: list[_Asked], wall: float) -> tuple[Standing, ...]:
        found: list[Standing] = []
        for check, _, counter, _, _ in asked:
            if check.rate >= 0:
                found.append((counter.level, _leak_time(counter)))
            elif check.calendar is not None:
                found.append((counter.value, check.calendar.span(wall)[1] - wall))
            else:
                found.append((counter.value, BUSY_SECONDS if counter.value else 0.0))
        return tuple(found)


def label(check: Check) -> str:
    """A limit as people name it: `tenant/alice total-tokens/minute`."""
    of = f" for {check.limit.model}" if check.limit.model else ""
    return f"{check.subject} {check.limit.name}{of}"


def _wait(check: Check, over: float, wall: float) -> float:
    """Seconds until a request passes that is so much too much now."""
    if not check.capacity:
        return math.inf
    if check.calendar is not None:
        return check.calendar.span(wall)[1] - wall
    return over / check.rate if check.rate > 0 else BUSY_SECONDS


def _leak_time(counter: Counter) -> float:
    return counter.level / counter.rate if counter.rate > 0 else 0.0
