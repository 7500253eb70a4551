"""What an administrator can see: how limits stand, what would pass, who used what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from picker.quota.bucket import Counter
from picker.quota.ledger import Ledger, Use, UseKey
from picker.quota.model import Limit
from picker.quota.plan import Barred, Check, Denied, Plan, line_of
from picker.quota.policy import Policy
from picker.quota.store import Count, Store
from picker.quota.unhurried import unhurried

MAX_ASKED = 1000  # counters at once: requests wait for a store that looks them up
FOREVER = 10.0**9  # seconds, of a reservation that is never made


@dataclass(frozen=True, slots=True)
class View:
    """How one limit of one subject stands."""

    subject: str
    limit: Limit
    used: float  # with what is reserved
    reserved: int
    remaining: int
    resets: float | None  # seconds until nothing is used, if no more comes; None: nobody knows
    granted: int  # left of its grants
    default: bool  # the limit is that of KIND/*


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request would pass, and how its limits stand without it."""

    passes: bool
    binding: View | None  # the limit that refuses it
    wait: float | None  # seconds until it would pass; None: it passes, or never does
    barred: Barred | None
    views: list[View]


async def views(store: Store, policy: Policy, subject: str, model: str = "") -> list[View]:
    """All limits that a subject's requests meet: its own, those above, and the model's."""
    wall = store.wall()
    return await _views(store, policy, policy.plan(subject, model, wall).checks, wall)


async def own_views(store: Store, policy: Policy, subjects: Iterable[str]) -> list[View]:
    """Limits of subjects, for all models and for each, without those above them."""
    wall = store.wall()
    checks: list[Check] = []
    async for subject in unhurried(subjects):
        _, known = next(policy.ancestry(subject))
        for model in sorted({limit.model for limit in known.limits}):
            checks += [
                check
                for check in policy.plan(subject, model, wall).checks
                if check.subject == subject and check.limit.model == model
            ]
    return await _views(store, policy, checks, wall)


async def verdict(
    store: Store,
    policy: Policy,
    subject: str,
    model: str = "",
    *,
    prompt_tokens: int,
    output_tokens: int,
) -> Verdict:
    """Whether a request would pass now. Nothing is charged."""
    wall = store.wall()
    plan = policy.plan(subject, model, wall)
    ledger = await _scratch(store, plan, wall)
    found = await _views(store, policy, plan.checks, wall)
    if plan.barred is not None:
        return Verdict(False, None, None, plan.barred, found)
    amounts = (1, prompt_tokens, output_tokens, prompt_tokens + output_tokens, 1)
    answer = ledger.reserve("would", plan, amounts, model, FOREVER, wall, wall)
    if isinstance(answer, Denied):
        return Verdict(False, found[answer.check], answer.wait, None, found)
    return Verdict(True, None, None, None, found)


async def uses(store: Store, policy: Policy, since: int, subject: str = "") -> dict[UseKey, Use]:
    """The books of a subject and of all below it, or of everybody, from a day on."""
    found = await store.uses(since)
    if not subject:
        return found
    return {
        key: use
        for key, use in found.items()
        if subject in (name for name, _ in policy.ancestry(key[1]))
    }


async def _views(store: Store, policy: Policy, checks: Sequence[Check], wall: float) -> list[View]:
    """How limits stand."""
    keys = [line_of(check, wall).key for check in checks]
    draws = [draw for check in checks for draw in check.grants]
    asked = keys + [draw.key for draw in draws]
    told: list[Count] = []
    for start in range(0, len(asked), MAX_ASKED):
        told += await store.counts(asked[start : start + MAX_ASKED])
    counts, drawn = told[: len(keys)], told[len(keys) :]
    left = {
        draw.key: max(0, draw.amount - count.value)
        for draw, count in zip(draws, drawn, strict=True)
    }
    found = []
    async for check, count in unhurried(zip(checks, counts, strict=True)):
        record = policy.records.get(check.subject)
        used = count.value if count.level is None else count.level
        found.append(
            View(
                check.subject,
                check.limit,
                used,
                count.value - count.settled,
                max(0, math.floor(check.capacity - used)),
                _resets(check, count, wall),
                sum(left[draw.key] for draw in check.grants),
                record is None or check.limit not in record.subject.limits,
            )
        )
    return found


def _resets(check: Check, count: Count, wall: float) -> float | None:
    if check.calendar is not None:
        return check.calendar.span(wall)[1] - wall
    if count.level is not None:
        return count.level / check.rate if check.rate > 0 else None
    return None if count.value else 0.0


async def _scratch(store: Store, plan: Plan, wall: float) -> Ledger:
    """A ledger with the counters of a plan as they are, to try things on."""
    ledger = Ledger()
    lines = [line_of(check, wall) for check in plan.checks]
    keys = [line.key for line in lines] + [
        draw.key for check in plan.checks for draw in check.grants
    ]
    for key, count in zip(keys, await store.counts(keys), strict=True):
        ledger.counters[key] = counter = Counter(count.value, count.settled)
        if count.level is not None:
            counter.rate, counter.level, counter.at = 0.0, count.level, wall
    return ledger
