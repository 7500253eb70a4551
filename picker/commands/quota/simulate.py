"""`warmpath quota simulate`: a log of requests against limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from picker.commands.quota import options
from picker.commands.quota.connection import ask, connection, exit_codes
from picker.commands.quota.files import read
from picker.commands.quota.output import Column, amount, listing, percent, safe
from picker.quota.model import QuotaError, Subject, split
from picker.quota.replay import Logged, Outcome, replay

COLUMNS = (
    Column("subject", "SUBJECT"),
    Column("requests", "REQUESTS", amount, right=True),
    Column("granted", "GRANTED", amount, right=True),
    Column("refused", "REFUSED", amount, right=True),
    Column("refusedPercent", "REFUSED%", percent, right=True),
    Column("tokens", "TOKENS", amount, right=True),
    Column("mostBy", "MOST BY", safe),
)
MAX_LINE = 1 << 16  # characters
LATEST = 32_503_680_000.0  # Unix seconds: the year 3000, so that months after it can be told


@click.command("simulate")
@click.argument("log", type=click.File(encoding="utf-8"))
@click.option(
    "-f",
    "--file",
    type=click.File(encoding="utf-8"),
    help="Limits to try, as `export` prints them.  [default: the store's]",
)
@options.output
def simulate_(log: Any, file: Any, output: str) -> None:
    """Replay a LOG of requests in virtual time, and show who would have been refused.

    A line of the log is a JSON object: at (Unix seconds), subject, promptTokens, completionTokens,
    and optionally model, cachedTokens, maxTokens and seconds (that it took). Estimates are made as
    a picker with this configuration makes them.

    \b
    Example:
      warmpath quota simulate requests.jsonl -f proposed.yaml
    """
    with exit_codes():
        logged = list(_parsed(log))
        section = connection().section
    subjects = _written() if file is None else read(file)
    outcomes = asyncio.run(replay(subjects, logged, section))
    rows = [_row(name, outcome) for name, outcome in sorted(outcomes.items())]
    click.echo(listing(COLUMNS, rows, output), nl=False)


def _written() -> dict[str, Subject]:
    policy = ask(lambda admin: admin.read())
    return {name: record.subject for name, record in policy.records.items()}


def _parsed(log: Any) -> Iterator[Logged]:
    decode = msgspec.json.Decoder(Logged).decode
    number = 0
    while line := log.readline(MAX_LINE):
        number += 1
        if not line.strip():
            continue
        try:
            logged = decode(line)
            split(logged.subject)
        except ValueError as problem:
            raise QuotaError(f"{log.name}:{number}: {problem}") from problem
        if min(logged.prompt_tokens, logged.completion_tokens, logged.seconds) < 0:
            raise QuotaError(f"{log.name}:{number}: nothing can be below zero")
        if not 0 <= logged.at <= LATEST or logged.seconds > LATEST - logged.at:
            raise QuotaError(f"{log.name}:{number}: {logged.at:g} is no time: write Unix seconds")
        yield logged


def _row(name: str, outcome: Outcome) -> dict[str, Any]:
    refused = outcome.refused.total()
    requests = outcome.granted + refused
    most = outcome.refused.most_common(1)
    return {
        "subject": name,
        "requests": requests,
        "granted": outcome.granted,
        "refused": refused,
        "refusedPercent": round(100 * refused / requests, 1),
        "tokens": outcome.tokens,
        "mostBy": most[0][0] if most else None,
    }
