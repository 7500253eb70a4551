"""A log of requests against limits, in virtual time: who would have been refused, and by what.

The requests meet the same admission, estimates and ledger as in a picker; only the clock and the
store are made for it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf

import msgspec

from picker.config import Quota
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.model import Subject
from picker.quota.store import Change
from picker.quota.store_memory import MemoryStore
from picker.usage import Usage


class Logged(msgspec.Struct, rename="camel", frozen=True, forbid_unknown_fields=True):
    """A request as it was: a line of the log."""

    at: float  # Unix seconds
    subject: str
    prompt_tokens: int
    completion_tokens: int
    model: str = ""
    cached_tokens: int = 0  # of the prompt
    max_tokens: int | None = None
    seconds: float = 0.0  # that it took


@dataclass(slots=True)
class Outcome:
    """What became of a subject's requests."""

    granted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the limit, or the reason
    tokens: int = 0  # prompt and completion, of those that were granted


async def replay(
    subjects: Mapping[str, Subject], log: Iterable[Logged], quota: Quota
) -> dict[str, Outcome]:
    """Outcomes by subject. A request that is refused is not tried again.

    Args:
        subjects: what is written down.
        quota: the configuration's section, for estimates and defaults.
    """
    requests = sorted(log, key=lambda logged: logged.at)
    now = requests[0].at if requests else 0.0

    def clock() -> float:
        return now

    store = MemoryStore(clock, clock)
    await store.write([Change(name, 0, subject) for name, subject in subjects.items()], [])
    quotas = Quotas(store, quota, clock, life=inf)  # nobody dies here
    await quotas.start()
    outcomes: dict[str, Outcome] = {}
    ends: list[tuple[float, int, Admission, Usage]] = []
    order = count()
    for logged in requests:
        while ends and ends[0][0] <= logged.at:
            now, _, admission, usage = heapq.heappop(ends)
            quotas.settle(admission, usage)
            await quotas.settled()
        now = logged.at
        outcome = outcomes.setdefault(logged.subject, Outcome())
        answer = await quotas.admit(
            Ask(logged.subject, logged.model, logged.prompt_tokens, logged.max_tokens)
        )
        if isinstance(answer, Refused):
            outcome.refused[answer.limit or answer.refusal.message] += 1
            continue
        usage = Usage(logged.prompt_tokens, logged.cached_tokens, logged.completion_tokens)
        outcome.granted += 1
        outcome.tokens += logged.prompt_tokens + logged.completion_tokens
        heapq.heappush(ends, (now + logged.seconds, next(order), answer, usage))
    await quotas.close()
    return outcomes
