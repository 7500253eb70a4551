"""`warmpath explain`: why the last picks went where they went."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

import click

EXAMPLES = """\b
Examples:
  warmpath explain
  warmpath explain -n 50 -o json
  warmpath explain 6f9a1c0e-2f0b-4c57-9a53-0d2f5a1f7f10
  warmpath explain --admin http://10.0.0.7:9090
"""
SECONDS = 5.0  # for the picker to answer
MAX_BYTES = 16 << 20  # of its answer
LIST_COLUMNS = (
    "when",
    "request id",
    "model",
    "pod",
    "prompt",
    "matched",
    "cached",
    "first token",
    "total",
    "status",
)
LEFT = ("when", "request id", "model", "pod", "candidate", "status")  # aligned; numbers right


@click.command(epilog=EXAMPLES)
@click.argument("request_id", required=False)
@click.option(
    "--admin",
    default="http://127.0.0.1:9090",
    show_default=True,
    envvar="WARMPATH_ADMIN",
    show_envvar=True,
    help="The picker's admin page.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 1024),
    default=10,
    show_default=True,
    help="How many of the last picks to show.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print the answer.",
)
def explain(request_id: str | None, admin: str, limit: int, output: str) -> None:
    """Show why the last picks went where they went, newest first.

    With a REQUEST_ID (the header x-request-id), show every candidate of that request with its
    scores. The picker keeps its last 1,024 picks.
    """
    query = {"limit": str(limit)} if request_id is None else {"request_id": request_id}
    decisions = _ask(admin, query)
    if output == "json":
        click.echo(json.dumps(decisions, indent=2))
    elif not decisions:
        click.echo("the picker has picked nothing yet")
    elif request_id is None:
        _print_table(LIST_COLUMNS, [_row(decision) for decision in decisions])
    else:
        _print_one(decisions[0])


def _ask(admin: str, query: dict[str, str]) -> list[dict[str, Any]]:
    """The decisions that an admin page gives; failures are one line and exit code 1."""
    if "://" not in admin:
        admin = f"http://{admin}"
    if not admin.startswith(("http://", "https://")):
        raise click.UsageError(f"--admin {admin}: write http://HOST:PORT")
    url = f"{admin.rstrip('/')}/debug/decisions?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:  # noqa: S310  # http(s) only
            decisions: list[dict[str, Any]] = json.loads(answer.read(MAX_BYTES))["decisions"]
            return decisions
    except urllib.error.HTTPError as refused:
        raise click.ClickException(_why(refused, admin)) from refused
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as problem:
        reason = getattr(problem, "reason", problem)
        raise click.ClickException(
            f"no picker answers at {admin}: {reason} (start one with `warmpath pick`, or name its "
            "admin page with --admin)"
        ) from problem


def _why(refused: urllib.error.HTTPError, admin: str) -> str:
    try:
        return str(json.loads(refused.read(MAX_BYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{admin} answers {refused.code}: it is not the admin page of a picker"


def _row(decision: dict[str, Any]) -> list[str]:
    usage = decision["usage"] or {}
    pod = decision["endpoint"]
    if pod != decision["picked"][0]:
        pod += f" (not {decision['picked'][0]})"
    return [
        time.strftime("%H:%M:%S", time.localtime(decision["pickedAt"])),
        _safe(decision["requestId"]),
        _safe(decision["model"] or "-"),
        pod,
        _count(usage.get("promptTokens", decision["promptTokens"])),
        _count(decision["matchedTokens"]),
        _count(usage.get("cachedTokens")),
        _milliseconds(decision["firstTokenSeconds"]),
        _milliseconds(decision["seconds"]),
        _status(decision),
    ]


def _print_one(decision: dict[str, Any]) -> None:
    """A pick's own numbers, then a row per candidate."""
    for label, value in zip(LIST_COLUMNS, _row(decision), strict=True):
        click.echo(f"{label:<14}{value}")
    click.echo(f"{'path':<14}{_safe(decision['path'])}")
    fallbacks = ", ".join(decision["picked"][1:]) or "-"
    click.echo(f"{'fallbacks':<14}{fallbacks}")
    for drop in decision["dropped"]:
        click.echo(f"{'dropped':<14}{drop['endpoints']} by filter {drop['filter']}")
    click.echo()
    weights = decision["weights"]
    rows = [
        [
            candidate["endpoint"]
            + (" *" if candidate["endpoint"] == decision["picked"][0] else ""),
            _count(candidate["matchedTokens"]),
            *(_score(candidate["scores"][name], weights[name]) for name in weights),
            _decimal(candidate["total"]),
        ]
        for candidate in decision["candidates"]
    ]
    _print_table(["candidate", "matched", *weights, "total"], rows)
    left_out = decision["considered"] - len(rows)
    if left_out > 0:
        click.echo(f"{left_out} candidates with lower totals are left out")


def _print_table(headings: Sequence[str], rows: list[list[str]]) -> None:
    """On a terminal as wide as it is; elsewhere as wide as the cells."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        cells = [headings, *rows]
        console.width = max(
            console.width, sum(max(map(len, c)) + 3 for c in zip(*cells, strict=True))
        )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        justify: JustifyMethod = "left" if heading in LEFT else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: what clients sent is no markup
    console.print(table)


def _safe(text: str) -> str:
    """A client's word without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _status(decision: dict[str, Any]) -> str:
    outcome, status = decision["outcome"], decision["status"]
    if outcome is None:
        return "running"
    return f"{status or '-'} {outcome}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.1f} ms"


def _score(score: float | None, weight: float) -> str:
    return "-" if score is None else f"{score:.3f} x {weight:g} = {score * weight:.3f}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
