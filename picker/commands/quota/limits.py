"""`warmpath quota get`, `set` and `unset`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import click
from msgspec.structs import replace

from picker.commands.errors import NotFound
from picker.commands.quota import completion, options
from picker.commands.quota.connection import ask, show
from picker.commands.quota.output import Column, amount, duration, listing, percent, yes
from picker.commands.quota.records import state, told, unknown
from picker.quota.administration import Administration
from picker.quota.editor import Why, Written
from picker.quota.model import CALENDAR, FAILURES, KINDS, Limit, OnFailure, Subject
from picker.quota.policy import Record
from picker.quota.views import View

DEFAULT = "default"  # of the pickers' configuration

COLUMNS = (
    Column("subject", "SUBJECT"),
    Column("parent", "PARENT", wide=True),
    Column("limit", "LIMIT"),
    Column("model", "MODEL"),
    Column("amount", "AMOUNT", amount, right=True),
    Column("used", "USED", amount, right=True),
    Column("reserved", "RESERVED", amount, right=True),
    Column("remaining", "REMAINING", amount, right=True),
    Column("usedPercent", "USED%", percent, right=True),
    Column("resetsInSeconds", "RESETS", duration, right=True),
    Column("state", "STATE"),
    Column("granted", "GRANTED", amount, right=True, wide=True),
    Column("zone", "ZONE", wide=True),
    Column("onFailure", "ON FAILURE", wide=True),
    Column("default", "DEFAULT", yes, wide=True),
    Column("revision", "REVISION", right=True, wide=True),
)
"""Of a limit and how it stands."""


def rows_of(
    name: str, record: Record | None, views: Sequence[View], now: float
) -> list[dict[str, Any]]:
    """A row for each limit of a subject; one without limits has one row all the same."""
    subject = Subject() if record is None else record.subject
    common = {
        "subject": name,
        "parent": subject.parent,
        "revision": 0 if record is None else record.revision,
    }
    refused = state(subject, now)
    if not views:
        nothing: dict[str, Any] = {column.key: None for column in COLUMNS}
        return [nothing | common | {"state": refused or "no limits"}]
    return [common | _row(view) | {"state": refused or _state(view)} for view in views]


def _row(view: View) -> dict[str, Any]:
    limit = view.limit
    return {
        "limit": limit.name,
        "model": limit.model,
        "amount": limit.amount,
        "used": round(view.used),
        "reserved": view.reserved,
        "remaining": view.remaining,
        "usedPercent": used_percent(view),
        "resetsInSeconds": None if view.resets is None else round(view.resets, 3),
        "granted": view.granted,
        "zone": limit.zone,
        "onFailure": limit.on_failure,
        "default": view.default,
    }


def used_percent(view: View) -> float:
    """Of a limit, with what is reserved; of a limit of nothing all is used."""
    return round(100 * view.used / view.limit.amount, 1) if view.limit.amount else 100.0


def _state(view: View) -> str:
    if view.limit.shadow:
        return "shadow"
    if view.remaining > 0:
        return "ok"
    return "on grants" if view.granted > 0 else "used up"


@click.command("get")
@click.argument("subjects", nargs=-1, type=options.subject_name, shell_complete=completion.subjects)
@click.option("--kind", type=click.Choice((*KINDS, "model")), help="Only subjects of this kind.")
@click.option("--model", type=options.model_name, help="Only limits for this model.")
@click.option(
    "--over",
    type=click.FloatRange(min=0),
    metavar="PERCENT",
    help="Only limits that are used to so much or more.",
)
@click.option(
    "--sort",
    type=click.Choice(["name", "used"]),
    default="name",
    show_default=True,
    help="By subject, or what is used most first.",
)
@options.output
@options.watch
def get_(
    subjects: tuple[str, ...],
    kind: str | None,
    model: str | None,
    over: float | None,
    sort: str,
    output: str,
    watch: bool,
) -> None:
    """List the limits of all SUBJECTS, or of some, and what is used of them.

    \b
    Examples:
      warmpath quota get
      warmpath quota get --over 80 --sort used
      warmpath quota get tenant/alice -o json
    """

    async def render(admin: Administration) -> str:
        names_only = output == "name" and model is None and over is None and sort == "name"
        rows = await _rows(admin, subjects, counted=not names_only)
        rows = [
            row
            for row in rows
            if kind in (None, row["subject"].partition("/")[0])
            and model in (None, row["model"])
            and (over is None or (row["usedPercent"] or 0) >= over)
        ]
        if sort == "used":
            rows.sort(key=lambda row: -(row["usedPercent"] or 0))
        return listing(COLUMNS, rows, output)

    show(render, watch)


async def _rows(
    admin: Administration, subjects: Sequence[str], *, counted: bool
) -> list[dict[str, Any]]:
    records = (await admin.read()).records
    for name in subjects:
        if name not in records:
            raise NotFound(f"nothing is written of {name}: `describe` tells what holds for it")
    names = subjects or sorted(records)
    views: dict[str, list[View]] = {}
    for view in await admin.own_views(names) if counted else ():
        views.setdefault(view.subject, []).append(view)
    now = time.time()
    return [
        row for name in names for row in rows_of(name, records.get(name), views.get(name, ()), now)
    ]


@click.command("set")
@options.subject
@click.argument("limits", nargs=-1, type=options.limit)
@click.option(
    "--parent",
    type=options.parent_name,
    shell_complete=completion.subjects,
    metavar="SUBJECT",
    help="Whose limits hold, too; '' takes it away.",
)
@options.model
@click.option("--zone", metavar="ZONE", help="Time zone of days and months, as Europe/Berlin.")
@click.option("--shadow/--no-shadow", default=None, help="Count, and refuse nothing.")
@click.option(
    "--on-failure",
    type=click.Choice((*FAILURES, DEFAULT)),
    help="While the store is down: a share of it, no limit, no requests, or as pickers have it.",
)
@options.output
@options.writing
def set_(
    subject: str,
    limits: tuple[Limit, ...],
    parent: str | None,
    model: str,
    zone: str | None,
    shadow: bool | None,
    on_failure: str | None,
    output: str,
    why: Why,
) -> None:
    """Add LIMITS to a SUBJECT, or replace those of the same name; others stay.

    A limit is WHAT=AMOUNT/WINDOW, or concurrency=AMOUNT. One that is there keeps its zone, whether
    it is in shadow, and what holds on failure, unless they are given. What KIND/* says holds for
    all subjects of a kind; a limit of their own takes the place of the one of that name.

    \b
    Examples:
      warmpath quota set tenant/alice total-tokens=100k/minute requests=10/second
      warmpath quota set tenant/alice output-tokens=2M/day --model llama --zone Europe/Berlin
      warmpath quota set org/acme output-tokens=5M/month concurrency=64
    """
    if not limits and parent is None:
        raise click.UsageError("name a limit, as total-tokens=100k/minute, or a --parent")
    if zone and not any(limit.window in CALENDAR for limit in limits):
        raise click.UsageError(f"--zone is of days and months: none of these has any, {zone!r}")

    given = {"zone": zone, "shadow": shadow, "on_failure": on_failure}
    keep = [name for name, value in given.items() if value is None]
    made = [
        replace(
            limit,
            model=model,
            zone=zone or "" if limit.window in CALENDAR else "",
            shadow=bool(shadow),
            on_failure=cast(OnFailure, "" if on_failure in (None, DEFAULT) else on_failure),
        )
        for limit in limits
    ]

    async def work(admin: Administration) -> tuple[Written, bool]:
        written = await admin.set(subject, made, parent=parent, keep=keep, why=why)
        return written, not parent or parent in (await admin.read()).records

    written, known = ask(work, create=True)
    told(written, output, why)
    if not known:
        unknown(parent)


@click.command("unset")
@options.subject
@click.argument("limits", nargs=-1, type=options.limit_name)
@click.option("--all", "whole", is_flag=True, help="All that is written of the subject.")
@options.model
@options.output
@options.writing
def unset_(
    subject: str, limits: tuple[str, ...], whole: bool, model: str, output: str, why: Why
) -> None:
    """Remove LIMITS of a SUBJECT, by their names; with --all, its whole record.

    \b
    Examples:
      warmpath quota unset tenant/alice total-tokens/minute
      warmpath quota unset tenant/alice --all
    """
    if bool(limits) == whole:
        raise click.UsageError("name limits, as total-tokens/minute, or say --all")
    names = None if whole else limits
    written = ask(lambda admin: admin.unset(subject, names, model=model, why=why))
    if written.before is None:
        raise NotFound(f"nothing is written of {subject}")
    told(written, output, why)
