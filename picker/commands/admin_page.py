"""A picker's admin page as commands ask it, and what they print of it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence, Set
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

TOKEN = "WARMPATH_ADMIN_TOKEN"  # noqa: S105  # the variable: a flag would show it to everybody
SECONDS = 5.0  # for the picker to answer
MAX_BYTES = 16 << 20  # of its answer
MISSING = "-"


def admin_option(command: F) -> F:
    """`--admin`, given as `admin`."""
    return click.option(
        "--admin",
        default="http://127.0.0.1:9090",
        show_default=True,
        envvar="WARMPATH_ADMIN",
        show_envvar=True,
        help="The picker's admin page.",
    )(command)


def output_option(command: F) -> F:
    """`-o`, given as `output`: table or json."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to print the answer.",
    )(command)


def ask(
    admin: str,
    path: str,
    key: str,
    query: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> dict[str, Any]:
    """What an admin page answers to a GET, or to a POST of a body.

    Args:
        key: that a picker's answer has.

    Raises:
        click.ClickException: no picker answers, or it refuses; in one line, with exit code 1.
    """
    if "://" not in admin:
        admin = f"http://{admin}"
    if not admin.startswith(("http://", "https://")):
        raise click.UsageError(f"--admin {admin}: write http://HOST:PORT")
    url = admin.rstrip("/") + path
    if query:
        url += "?" + urllib.parse.urlencode(query)
    request = urllib.request.Request(url, body)  # noqa: S310  # http(s) only
    if token := os.environ.get(TOKEN):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            found = json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as refused:
        raise click.ClickException(_why(refused, admin)) from refused
    except (OSError, HTTPException, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        raise click.ClickException(
            f"no picker answers at {admin}: {reason} (start one with `warmpath pick`, or name its "
            "admin page with --admin)"
        ) from problem
    if not isinstance(found, dict) or key not in found:
        raise click.ClickException(_no_picker(admin, "something else"))
    return found


def _why(refused: urllib.error.HTTPError, admin: str) -> str:
    if refused.code == HTTPStatus.UNAUTHORIZED:
        return f"{admin} asks for a token: put one that may read it into {TOKEN}"
    try:
        return str(json.loads(refused.read(MAX_BYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _no_picker(admin, str(refused.code))


def _no_picker(admin: str, answer: str) -> str:
    return f"{admin} answers {answer}: it is not the admin page of a picker"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Set[str]) -> None:
    """On a terminal as wide as it is; elsewhere as wide as the cells.

    Columns with a heading in `left` are aligned there, the others to the right.
    """
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
        justify: JustifyMethod = "left" if heading in left else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: what clients sent is no markup
    console.print(table)


def safe(text: str) -> str:
    """Somebody else's word without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"
