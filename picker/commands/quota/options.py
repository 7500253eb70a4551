"""Options and arguments that commands of `warmpath quota` share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar

import click

from picker.commands.quota.completion import subjects
from picker.commands.quota.output import FORMATS
from picker.quota.editor import Why
from picker.quota.model import Limit, QuotaError, check_model, parse_limit, quantity, split

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
T = TypeVar("T")

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

# What words mean. Each is click's `type=`, and says itself what is wrong.


def _told(read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader whose QuotaErrors are usage errors."""

    @wraps(read)
    def told(text: str) -> T:
        try:
            return read(text)
        except QuotaError as problem:
            raise click.BadParameter(str(problem)) from problem

    return told


@_told
def subject_name(text: str) -> str:
    """`tenant/alice`."""
    split(text)
    return text


@_told
def parent_name(text: str) -> str:
    """`org/acme`, or nothing: no parent any more."""
    if text:
        split(text)
    return text


@_told
def limit(text: str) -> Limit:
    """`total-tokens=100k/minute`."""
    return parse_limit(text)


@_told
def limit_name(text: str) -> str:
    """`total-tokens/minute`, as a limit is called without its amount."""
    what, slash, window = text.partition("/")
    return parse_limit(f"{what}=1{slash}{window}").name


@_told
def amount(text: str) -> int:
    """`500`, `10k`, `1.5M`."""
    return quantity(text)


@_told
def change(text: str) -> int:
    """`10k`, `+10k` or `-10k`."""
    size = quantity(text[1:] if text[:1] in ("+", "-") else text)
    return -size if text[0] == "-" else size


@_told
def model_name(text: str) -> str:
    check_model(text)
    return text


def _when(text: str, sign: int) -> float:
    """`2h`, `2026-04-01`, `2026-04-01T09:30+02:00`."""
    if match := re.fullmatch(r"([0-9]{1,6})([smhdw])", text):
        return float(round(time.time()) + sign * int(match[1]) * UNITS[match[2]])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time: write 30m, 2h, 7d, 2026-04-01 or 2026-04-01T09:30Z"
        ) from None
    at = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return float(round(at.timestamp()))


def later(text: str) -> float:
    """A time in Unix seconds; `2h` is from now."""
    return _when(text, 1)


def since(text: str) -> float:
    """A time in Unix seconds; `2h` is ago."""
    return _when(text, -1)


# What several commands take.


def subject(command: Decorated) -> Decorated:
    return click.argument("subject", type=subject_name, shell_complete=subjects)(command)


def some_subject(command: Decorated) -> Decorated:
    return click.argument("subject", type=subject_name, shell_complete=subjects, required=False)(
        command
    )


def output(command: Decorated) -> Decorated:
    """`-o`, how to print rows."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="How to print it.",
    )(command)


def watch(command: Decorated) -> Decorated:
    """`-w`, print again whenever it has changed."""
    return click.option(
        "-w", "--watch", is_flag=True, help="Print again when it has changed, until Ctrl-C."
    )(command)


def model(command: Decorated) -> Decorated:
    return click.option(
        "--model",
        type=model_name,
        default="",
        metavar="MODEL",
        help="For this model only.",
    )(command)


def writing(command: Callable[..., None]) -> Callable[..., None]:
    """What all have in common that write a record; the command takes it as one `why`."""
    return click.option(
        "--if-revision",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only if the subject is still at this revision, else exit code 4.",
    )(correcting(command))


def correcting(command: Callable[..., None]) -> Callable[..., None]:
    """What all have in common that write anything; the command takes it as one `why`."""

    @wraps(command)
    def gathered(
        *arguments: Any,
        reason: str,
        request_id: str,
        dry_run: bool,
        if_revision: int | None = None,
        **options: Any,
    ) -> None:
        why = Why(reason=reason, request_id=request_id, if_revision=if_revision, dry_run=dry_run)
        command(*arguments, why=why, **options)

    for option in (
        click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing."),
        click.option("--request-id", default="", metavar="ID", help="For the audit log."),
        click.option("--reason", default="", metavar="TEXT", help="For the audit log."),
    ):
        gathered = option(gathered)
    return gathered
