"""`warmpath quota adjust`, `reset`, `reservations` and `release`: what is counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from picker.commands.errors import NotFound
from picker.commands.quota import options
from picker.commands.quota.connection import ask, show
from picker.commands.quota.output import Column, amount, duration, listing
from picker.quota.administration import Administration
from picker.quota.editor import Corrected, Why
from picker.quota.store import Count

CORRECTED = (
    Column("limit", "LIMIT"),
    Column("model", "MODEL"),
    Column("before", "BEFORE", amount, right=True),
    Column("after", "AFTER", amount, right=True),
)
RESERVED = (
    Column("id", "ID"),
    Column("subject", "SUBJECT"),
    Column("model", "MODEL"),
    Column("counter", "LIMIT"),
    Column("amount", "AMOUNT", amount, right=True),
    Column("expiresInSeconds", "EXPIRES", duration, right=True),
)


@click.command("adjust", context_settings={"ignore_unknown_options": True})  # -5k is none
@options.subject
@click.argument("limit", type=options.limit_name)
@click.argument("amount", type=options.change)
@options.model
@options.output
@options.correcting
def adjust_(subject: str, limit: str, amount: int, model: str, output: str, why: Why) -> None:
    """Add AMOUNT to what is used of a LIMIT; below zero it gives back.

    \b
    Examples:
      warmpath quota adjust tenant/alice total-tokens/day +5k
      warmpath quota adjust tenant/alice total-tokens/day -5k
    """
    _told(ask(lambda admin: admin.adjust(subject, limit, amount, model=model, why=why)), output)


@click.command("reset")
@options.subject
@click.argument("limit", type=options.limit_name, required=False)
@click.option("--all", "whole", is_flag=True, help="All limits of the subject.")
@options.model
@options.output
@options.correcting
def reset_(subject: str, limit: str | None, whole: bool, model: str, output: str, why: Why) -> None:
    """Start a LIMIT of a SUBJECT anew, as if nothing had been used; what runs stays reserved.

    \b
    Examples:
      warmpath quota reset tenant/alice total-tokens/day --reason "our fault"
      warmpath quota reset tenant/alice --all
    """
    if (limit is None) != whole:
        raise click.UsageError("name a limit, as total-tokens/day, or say --all")
    _told(ask(lambda admin: admin.reset(subject, limit, model=model, why=why)), output)


def _told(corrected: Sequence[Corrected], output: str) -> None:
    rows = [
        {
            "limit": each.limit.name,
            "model": each.limit.model,
            "before": round(_used(each.before)),
            "after": round(_used(each.after)),
        }
        for each in corrected
    ]
    click.echo(listing(CORRECTED, rows, output), nl=False)


def _used(count: Count) -> float:
    return float(count.value if count.level is None else count.level)


@click.command("reservations")
@options.some_subject
@options.output
@options.watch
def reservations_(subject: str | None, output: str, watch: bool) -> None:
    """List what running requests hold, of one SUBJECT or of all, oldest first.

    \b
    Example:
      warmpath quota reservations tenant/alice
    """

    async def render(admin: Administration) -> str:
        now = time.time()
        rows = []
        for held in await admin.reservations(subject or ""):
            for line in held.lines:
                rows.append(
                    {
                        "id": held.id,
                        "subject": held.subject,
                        "model": held.model,
                        "counter": counter(line.key),
                        "amount": line.amount,
                        "expiresInSeconds": round(held.expires - now, 3),
                    }
                )
        return listing(RESERVED, rows, output)

    show(render, watch)


def counter(key: str) -> str:
    """A counter's key for people: its parts that say something."""
    return " ".join(part for part in key.split("\t") if part)


@click.command("release")
@click.argument("id")
@options.correcting
def release_(id: str, why: Why) -> None:
    """Give back what the reservation ID holds, of a request that will never end.

    \b
    Example:
      warmpath quota release 5d1f-17
    """
    if not ask(lambda admin: admin.release(id, why=why)):
        raise NotFound(f"no reservation {id} is open")
    click.echo(f"{id}: released", err=True)
