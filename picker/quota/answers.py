"""What clients are told: rate limit headers as OpenAI has them, and refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from picker.quota.ledger import label
from picker.quota.model import shown_quantity
from picker.quota.plan import INPUT, OUTPUT, REQUESTS, TOTAL, Barred, Check, Denied, Standing
from picker.refusal import Refusal

Headers = list[tuple[str, str]]

FAMILIES = {"requests": (REQUESTS,), "tokens": (INPUT, OUTPUT, TOTAL)}
RETRY_STORE = 1  # seconds: it is tried again that often


def limit_headers(checks: Sequence[Check], standings: Sequence[Standing]) -> Headers:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` of the limits with least left.

    A limit in shadow is nobody's business; concurrency has no such header.
    """
    headers: Headers = []
    for family, whats in FAMILIES.items():
        tightest: tuple[float, int, int, float] | None = None
        for check, (used, reset) in zip(checks, standings, strict=True):
            if check.what in whats and not check.shadow:
                left = max(0, math.floor(check.capacity - used))
                share = left / check.capacity if check.capacity else 0.0
                if tightest is None or share < tightest[0]:
                    tightest = share, check.capacity, left, reset
        if tightest is not None:
            _, limit, left, reset = tightest
            headers += [
                (f"x-ratelimit-limit-{family}", str(limit)),
                (f"x-ratelimit-remaining-{family}", str(left)),
                (f"x-ratelimit-reset-{family}", duration(reset)),
            ]
    return headers


def over_limit(checks: Sequence[Check], denied: Denied) -> Refusal:
    """429: the limit that bound, and when the request would pass."""
    check = checks[denied.check]
    if check.limit.window:
        what = f"at most {check.limit}"
    else:
        what = f"at most {shown_quantity(check.capacity)} requests at once"
    message = f"{label(check)}: {what}; {math.floor(denied.standings[denied.check][0])} are used"
    if denied.amount > 1:
        message += f", this request needs {denied.amount}"
    return Refusal(
        429,
        "quota_exceeded",
        f"over the limit of {message}",
        retry_after=None if denied.wait is None else max(1, math.ceil(denied.wait)),
        headers=limit_headers(checks, denied.standings),
    )


def barred(found: Barred) -> Refusal:
    """403: not for now, but until somebody changes it."""
    return Refusal(403, "subject_barred", f"{found.subject} takes no requests: {found.reason}")


def unavailable() -> Refusal:
    """503: nobody can tell whether a limit holds that must hold."""
    message = "limits cannot be checked at the moment"
    return Refusal(503, "quota_unavailable", message, retry_after=RETRY_STORE)


def duration(seconds: float) -> str:
    """As OpenAI writes them: `12ms`, `1.5s`, `6m0s`, `23h59m1s`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
