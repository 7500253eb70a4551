"""`warmpath quota describe`: all that holds for a subject."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from picker.commands.quota import options
from picker.commands.quota.connection import show
from picker.commands.quota.limits import COLUMNS, rows_of, used_percent
from picker.commands.quota.output import (
    Column,
    amount,
    clock,
    document,
    duration,
    iso,
    listing,
    safe,
    table,
)
from picker.quota.administration import Administration
from picker.quota.model import Subject
from picker.quota.policy import Policy
from picker.quota.views import View

NUM_DENIALS = 5  # that are shown
BINDS = Column("binding", " ", lambda binding: "*" if binding else " ")
LIMITS = (BINDS, *(column for column in COLUMNS if not column.wide and column.key != "state"))
GRANTS = (
    Column("subject", "SUBJECT"),
    Column("id", "GRANT"),
    Column("limit", "LIMIT"),
    Column("model", "MODEL"),
    Column("amount", "AMOUNT", amount, right=True),
    Column("expires", "EXPIRES", clock),
    Column("reason", "REASON", safe),
)
DENIALS = (
    Column("at", "WHEN", clock),
    Column("limit", "REFUSED BY"),
    Column("amount", "ASKED", amount, right=True),
    Column("waitSeconds", "RETRY AFTER", duration, right=True),
)


@click.command("describe")
@options.subject
@options.model
@options.output
@options.watch
def describe_(subject: str, model: str, output: str, watch: bool) -> None:
    """Show all that holds for a SUBJECT's requests: its own limits and those of all above it.

    A star marks the limit that binds: the one that is used most, so that it refuses first. What is
    not written down can be described, too: limits of tenant/* hold for all tenants without their
    own.

    \b
    Examples:
      warmpath quota describe tenant/alice
      warmpath quota describe tenant/alice --model llama -o json
    """

    async def render(admin: Administration) -> str:
        facts = await _facts(admin, subject, model)
        if output == "csv":
            return listing((BINDS, *COLUMNS), facts["limits"], output)
        if output == "name":
            return f"{subject}\n"
        return document(facts, output, _text(facts, wide=output == "wide"))

    show(render, watch)


async def _facts(admin: Administration, subject: str, model: str) -> dict[str, Any]:
    policy = await admin.read()
    views = await admin.views(subject, model)
    open_now = await admin.reservations(subject)
    denied = await admin.denials()
    ancestry = list(policy.ancestry(subject))
    own = ancestry[0][1]
    now = time.time()
    record = policy.records.get(subject)
    refusals = [_refusal(name, known, now) for name, known in ancestry]
    return {
        "subject": subject,
        "revision": record.revision if record else 0,
        "state": next((refusal for refusal in refusals if refusal), "ok"),
        "ancestors": [name for name, _ in ancestry[1:]],
        "children": policy.children(subject),
        "expires": None if own.expires is None else iso(own.expires),
        "key": None if own.key is None else {"hint": own.key.hint, "created": iso(own.key.created)},
        "reservations": len(open_now),
        "limits": _limits(policy, views, now),
        "grants": [
            {
                "subject": name,
                "id": grant.id,
                "limit": grant.limit,
                "model": grant.model,
                "amount": grant.amount,
                "expires": iso(grant.expires),
                "reason": grant.reason,
            }
            for name, known in ancestry
            for grant in known.grants
        ],
        "denials": [
            {
                "at": iso(denial.at),
                "limit": denial.limit,
                "amount": denial.amount,
                "waitSeconds": denial.wait,
            }
            for denial in denied
            if denial.subject == subject
        ][:NUM_DENIALS],
    }


def _refusal(name: str, known: Subject, now: float) -> str:
    """Why a subject's requests are all refused; empty when they are not."""
    if known.blocked is not None:
        return f"blocked at {name}: {safe(known.blocked)}"
    if known.expires is not None and known.expires <= now:
        return f"expired at {name}"
    return ""


def _limits(policy: Policy, views: Sequence[View], now: float) -> list[dict[str, Any]]:
    binding = bound_by(views)
    found = []
    for view in views:
        record = policy.records.get(view.subject)
        (row,) = rows_of(view.subject, record, [view], now)
        found.append({"binding": view is binding, **row})
    return found


def bound_by(views: Sequence[View]) -> View | None:
    """The limit that is used most, of those that refuse at all; the first of several."""
    return max(
        (view for view in views if not view.limit.shadow),
        key=used_percent,
        default=None,
    )


def _text(facts: dict[str, Any], wide: bool) -> str:
    key = facts["key"]
    told = {
        "Subject": facts["subject"],
        "State": facts["state"],
        "Ancestors": " > ".join(facts["ancestors"]),
        "Children": ", ".join(facts["children"]),
        "Expires": clock(facts["expires"]) if facts["expires"] else "",
        "API key": f"...{key['hint']}, made {clock(key['created'])}" if key else "",
        "Running": f"{facts['reservations']} requests" if facts["reservations"] else "",
        "Revision": facts["revision"] or "nothing is written of it",
    }
    text = "".join(f"{name + ':':<12}{value}\n" for name, value in told.items() if value)
    if facts["limits"]:
        text += "\n" + table((BINDS, *COLUMNS) if wide else LIMITS, facts["limits"])
    else:
        text += "\nNo limit holds for it.\n"
    for columns, key in ((GRANTS, "grants"), (DENIALS, "denials")):
        if facts[key]:
            text += "\n" + table(columns, facts[key])
    return text
