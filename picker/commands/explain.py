"""`warmpath explain`: why the last picks went where they went."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from picker.commands.admin_page import admin_option, ask, count, output_option, print_table, safe

EXAMPLES = """\b
Examples:
  warmpath explain
  warmpath explain -n 50 -o json
  warmpath explain 6f9a1c0e-2f0b-4c57-9a53-0d2f5a1f7f10
  warmpath explain --admin http://10.0.0.7:9090
"""
LIST_COLUMNS = (
    "when",
    "request id",
    "model",
    "pod",
    "prompt",
    "predicted",
    "cached",
    "first token",
    "total",
    "status",
)
GATE_COLUMNS = ("tenant", "waited")  # of a picker with quotas or flow control
LEFT = {"when", "request id", "model", "pod", "candidate", "status", "tenant"}
BY = {"events": "KV events", "approximate": "what was sent", "none": "nothing"}


@click.command(epilog=EXAMPLES)
@click.argument("request_id", required=False)
@admin_option
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 1024),
    default=10,
    show_default=True,
    help="How many of the last picks to show.",
)
@output_option
def explain(request_id: str | None, admin: str, limit: int, output: str) -> None:
    """Show why the last picks went where they went, newest first.

    With a REQUEST_ID (the header x-request-id), show every candidate of that request with its
    scores. The picker keeps its last 1,024 picks.
    """
    query = {"limit": str(limit)} if request_id is None else {"request_id": request_id}
    decisions = _decisions(admin, query)
    if output == "json":
        click.echo(json.dumps(decisions, indent=2))
    elif not decisions:
        click.echo("the picker has picked nothing yet")
    elif request_id is None:
        gated = any(decision["tenant"] is not None for decision in decisions)
        rows = [[*_row(each), *(_passage(each) if gated else [])] for each in decisions]
        print_table([*LIST_COLUMNS, *(GATE_COLUMNS if gated else ())], rows, LEFT)
    else:
        _print_one(decisions[0])


def _decisions(admin: str, query: dict[str, str]) -> list[dict[str, Any]]:
    decisions: list[dict[str, Any]] = ask(admin, "/debug/decisions", "decisions", query)[
        "decisions"
    ]
    return decisions


def _row(decision: dict[str, Any]) -> list[str]:
    usage = decision["usage"] or {}
    pod = decision["endpoint"]
    if pod != decision["picked"][0]:
        pod += f" (not {decision['picked'][0]})"
    return [
        time.strftime("%H:%M:%S", time.localtime(decision["pickedAt"])),
        safe(decision["requestId"]),
        safe(decision["model"] or "-"),
        pod,
        count(usage.get("promptTokens", decision["promptTokens"])),
        _predicted(decision),
        count(usage.get("cachedTokens")),
        _milliseconds(decision["firstTokenSeconds"]),
        _milliseconds(decision["seconds"]),
        _status(decision),
    ]


def _print_one(decision: dict[str, Any]) -> None:
    """A pick's own numbers, then a row per candidate."""
    for label, value in zip(LIST_COLUMNS, _row(decision), strict=True):
        click.echo(f"{label:<14}{value}")
    if decision["tenant"] is not None:
        for label, value in zip(GATE_COLUMNS, _passage(decision), strict=True):
            click.echo(f"{label:<14}{value}")
    if decision["targetModel"] != decision["model"]:
        click.echo(f"{'sent as':<14}{safe(decision['targetModel'])}")
    click.echo(f"{'path':<14}{safe(decision['path'])}")
    click.echo(f"{'matched by':<14}{BY.get(decision['matchedBy'], '?')}")
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
            count(candidate["matchedTokens"]),
            *(_score(candidate["scores"][name], weights[name]) for name in weights),
            _decimal(candidate["total"]),
        ]
        for candidate in decision["candidates"]
    ]
    print_table(["candidate", "matched", *weights, "total"], rows, LEFT)
    left_out = decision["considered"] - len(rows)
    if left_out > 0:
        click.echo(f"{left_out} candidates with lower totals are left out")


def _passage(decision: dict[str, Any]) -> list[str]:
    """Whose it is, and how long it waited for its turn."""
    return [safe(decision["tenant"] or "-"), _milliseconds(decision["waitedSeconds"])]


def _predicted(decision: dict[str, Any]) -> str:
    """Guessed ones are marked."""
    guessed = decision["matchedBy"] == "approximate"
    return ("~" if guessed else "") + count(decision["predictedTokens"])


def _status(decision: dict[str, Any]) -> str:
    outcome, status = decision["outcome"], decision["status"]
    if outcome is None:
        return "running"
    return f"{status or '-'} {outcome}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.1f} ms"


def _score(score: float | None, weight: float) -> str:
    return "-" if score is None else f"{score:.3f} x {weight:g} = {score * weight:.3f}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
