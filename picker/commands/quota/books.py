"""`warmpath quota usage`, `top`, `denials` and `audit`: what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from typing import Any

import click

from picker.commands.quota import options
from picker.commands.quota.connection import show
from picker.commands.quota.limits import used_percent
from picker.commands.quota.output import (
    Column,
    amount,
    clock,
    duration,
    iso,
    listing,
    percent,
    safe,
    yes,
)
from picker.quota.administration import Administration
from picker.quota.ledger import Use, UseKey
from picker.quota.plan import DAY

TOKENS = (
    Column("requests", "REQUESTS", amount, right=True),
    Column("promptTokens", "PROMPT", amount, right=True),
    Column("cachedTokens", "CACHED", amount, right=True),
    Column("completionTokens", "COMPLETION", amount, right=True),
    Column("totalTokens", "TOTAL", amount, right=True),
    Column("denied", "DENIED", amount, right=True),
)
PARTS = {
    "day": Column("day", "DAY"),
    "subject": Column("subject", "SUBJECT"),
    "model": Column("model", "MODEL"),
}
ORDERS = {
    "tokens": "totalTokens",
    "input": "promptTokens",
    "output": "completionTokens",
    "requests": "requests",
    "denials": "denied",
    "used": "usedPercent",
}
DENIED = (
    Column("at", "WHEN", clock),
    Column("subject", "SUBJECT"),
    Column("model", "MODEL", safe),
    Column("limit", "REFUSED BY"),
    Column("amount", "ASKED", amount, right=True),
    Column("waitSeconds", "RETRY AFTER", duration, right=True),
    Column("shadow", "SHADOW", yes),
)
AUDIT = (
    Column("at", "WHEN", clock),
    Column("actor", "WHO", safe),
    Column("action", "WHAT"),
    Column("subject", "SUBJECT"),
    Column("reason", "REASON", safe),
    Column("requestId", "REQUEST ID", safe),
    Column("revision", "REVISION", right=True),
    Column("before", "BEFORE", safe, wide=True),
    Column("after", "AFTER", safe, wide=True),
)


@click.command("usage")
@options.some_subject
@click.option(
    "--since",
    type=options.since,
    default="0d",
    show_default="today",
    metavar="WHEN",
    help="From this day (UTC) on: 7d, 2026-03-01.",
)
@click.option(
    "--by",
    default="subject,model",
    show_default=True,
    metavar="PARTS",
    help="Some of day, subject and model, with commas.",
)
@options.output
@options.watch
def usage_(subject: str | None, since: float, by: str, output: str, watch: bool) -> None:
    """Show what a SUBJECT and all below it used, or what all did.

    \b
    Examples:
      warmpath quota usage tenant/alice
      warmpath quota usage org/acme --since 30d --by day -o csv
    """
    parts = by.split(",")
    if unknown := set(parts) - PARTS.keys():
        raise click.UsageError(f"--by {min(unknown)!r}: write some of {', '.join(PARTS)}")
    columns = [PARTS[part] for part in parts]

    async def render(admin: Administration) -> str:
        rows = sums(await admin.uses(day_of(since), subject or ""), parts)
        return listing([*columns, *TOKENS], rows, output)

    show(render, watch)


@click.command("top")
@click.option(
    "--by",
    type=click.Choice(list(ORDERS)),
    default="tokens",
    show_default=True,
    help="What is compared; `used` is the share of a limit.",
)
@click.option(
    "--since",
    type=options.since,
    default="0d",
    show_default="today",
    metavar="WHEN",
    help="From this day (UTC) on: 7d, 2026-03-01.",
)
@click.option("-n", "--limit", type=click.IntRange(1), default=10, show_default=True, help="Rows.")
@options.output
@options.watch
def top_(by: str, since: float, limit: int, output: str, watch: bool) -> None:
    """Show who uses most, and how much of the limit that is used most.

    \b
    Examples:
      warmpath quota top
      warmpath quota top --by denials --since 7d -n 3
    """

    async def render(admin: Administration) -> str:
        nearest: dict[str, tuple[float, str]] = {}
        for view in await admin.own_views(sorted((await admin.read()).records)):
            share = used_percent(view), view.limit.name
            nearest[view.subject] = max(nearest.get(view.subject, share), share)
        rows = {
            row["subject"]: dict(row) for row in sums(await admin.uses(day_of(since)), ["subject"])
        }
        if by == "used":
            for name in nearest:
                rows.setdefault(name, sum_of({"subject": name}, ()))
        for name, row in rows.items():
            row["usedPercent"], row["of"] = nearest.get(name, (None, None))
        key = ORDERS[by]
        ordered = sorted(rows.values(), key=lambda row: (-(row[key] or 0), row["subject"]))
        return listing([PARTS["subject"], *TOKENS, *MOST], ordered[:limit], output)

    show(render, watch)


MOST = (Column("usedPercent", "USED%", percent, right=True), Column("of", "OF"))


def day_of(at: float) -> int:
    """Days since 1970 (UTC) of a time in Unix seconds."""
    return int(at // DAY)


def sums(uses: Mapping[UseKey, Use], parts: Iterable[str]) -> list[dict[str, Any]]:
    """The books added up, a row for each day, subject and model, as far as those are asked for."""
    groups: dict[tuple[Any, ...], list[Use]] = {}
    for (day, subject, model), use in uses.items():
        page = {"day": _date(day), "subject": subject, "model": model}
        groups.setdefault(tuple(page[part] for part in parts), []).append(use)
    return [
        sum_of(dict(zip(parts, group, strict=True)), pages)
        for group, pages in sorted(groups.items())
    ]


def sum_of(row: dict[str, Any], pages: Iterable[Use]) -> dict[str, Any]:
    totals = {"requests": 0, "promptTokens": 0, "cachedTokens": 0, "completionTokens": 0}
    denied = 0
    for page in pages:
        totals["requests"] += page.requests
        totals["promptTokens"] += page.prompt_tokens
        totals["cachedTokens"] += page.cached_tokens
        totals["completionTokens"] += page.completion_tokens
        denied += page.denied
    total = totals["promptTokens"] + totals["completionTokens"]
    return {**row, **totals, "totalTokens": total, "denied": denied}


def _date(day: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()


@click.command("denials")
@options.some_subject
@click.option("-n", "--limit", type=click.IntRange(1), default=20, show_default=True, help="Rows.")
@options.output
@options.watch
def denials_(subject: str | None, limit: int, output: str, watch: bool) -> None:
    """Show who was refused last, newest first: of a SUBJECT, or by its limits, or all.

    \b
    Example:
      warmpath quota denials tenant/alice -n 5
    """

    async def render(admin: Administration) -> str:
        found = await admin.denials()
        rows = [
            {
                "at": iso(denial.at),
                "subject": denial.subject,
                "model": denial.model,
                "limit": denial.limit,
                "amount": denial.amount,
                "waitSeconds": denial.wait,
                "shadow": denial.shadow,
            }
            for denial in found
            if subject in (None, denial.subject) or denial.limit.startswith(f"{subject} ")
        ]
        return listing(DENIED, rows[:limit], output, name="subject")

    show(render, watch)


@click.command("audit")
@options.some_subject
@click.option(
    "-n", "--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Rows."
)
@options.output
@options.watch
def audit_(subject: str | None, limit: int, output: str, watch: bool) -> None:
    """Show who changed what, newest first, of one SUBJECT or of all.

    \b
    Example:
      warmpath quota audit tenant/alice -o json
    """

    async def render(admin: Administration) -> str:
        rows = [
            {
                "at": iso(entry.at),
                "actor": entry.actor,
                "action": entry.action,
                "subject": entry.subject,
                "reason": entry.reason,
                "requestId": entry.request_id,
                "revision": entry.revision,
                "before": entry.before,
                "after": entry.after,
            }
            for entry in await admin.audit(subject or "", limit)
        ]
        return listing(AUDIT, rows, output, name="subject")

    show(render, watch)
