"""`warmpath quota fairness`: what tenants got of busy pods, and what waits, as a picker sees it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

import click
from click.core import ParameterSource

from picker.commands.admin_page import admin_option, ask
from picker.commands.errors import Unreachable
from picker.commands.quota import options
from picker.commands.quota.connection import WATCH_SECONDS, connection, exit_codes
from picker.commands.quota.output import Column, amount, document, listing, safe, table
from picker.config import load

TENANTS = (
    Column("priority", "PRIORITY", right=True),
    Column("tenant", "TENANT", safe),
    Column("weight", "WEIGHT", "{:g}".format, right=True),
    Column("waiting", "WAITING", right=True),
    Column("waitingBytes", "BYTES", amount, right=True, wide=True),
    Column("running", "RUNNING", right=True),
    Column("service", "SERVICE", amount, right=True),
    Column("counter", "COUNTER", amount, right=True),
    Column("lifts", "LIFTS", right=True),
    Column("lifted", "LIFTED", amount, right=True, wide=True),
)

LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # of all addresses


@click.command("fairness")
@admin_option
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Tenants of each priority.",
)
@options.output
@options.watch
def fairness_(admin: str, limit: int, output: str, watch: bool) -> None:
    """Show what tenants got of busy pods, and what waits for its turn.

    Each picker has a queue of its own, which its admin page tells of. Those who wait come first,
    then those who got most. Service is cost over weight, since the picker knows the tenant.

    \b
    Examples:
      warmpath quota fairness
      warmpath quota fairness --admin http://10.0.0.7:9090 -n 5 --watch
    """
    if click.get_current_context().get_parameter_source("admin") is ParameterSource.DEFAULT:
        admin = _admin() or admin
    if not watch:
        click.echo(_render(admin, limit, output), nl=False)
        return
    last = ""
    with suppress(KeyboardInterrupt):
        while True:
            text = _render(admin, limit, output)
            if text != last:
                click.clear()  # of a terminal only
                click.echo(text, nl=False)
                sys.stdout.flush()
                last = text
            time.sleep(WATCH_SECONDS)


def _admin() -> str | None:
    """The admin page of the configuration, where there is one."""
    file = connection().config
    if file is None:
        return None
    with exit_codes():
        listen = load(file).listen
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"http://{LOOPBACK.get(host, host)}:{listen.admin}"


def _render(admin: str, limit: int, output: str) -> str:
    try:
        page = ask(admin, "/debug/fairness", "priorities", {"limit": str(limit)})
    except click.ClickException as problem:
        if isinstance(problem.__cause__, HTTPError) or isinstance(problem, click.UsageError):
            raise
        raise Unreachable(problem.message) from problem
    rows = [
        {"priority": band["priority"], **tenant}
        for band in page["priorities"]
        for tenant in band["tenants"]
    ]
    if output in ("csv", "name"):
        return listing(TENANTS, rows, output, name="tenant")
    shown = [column for column in TENANTS if output == "wide" or not column.wide]
    return document(page, output, "".join(_summary(page)) + "\n" + table(shown, rows))


def _summary(page: dict[str, Any]) -> Iterator[str]:
    """A line for the pods, and one for each priority."""
    yield f"saturation {page['saturation']:.2f}, {page['running']} requests run\n"
    for band in page["priorities"]:
        bound = "?" if band["serviceBound"] is None else amount(band["serviceBound"])
        yield (
            f"priority {band['priority']}: {band['waiting']} requests of {band['waitingTenants']} "
            f"tenants wait; counters differ by {amount(band['counterSpread'])} of at most {bound}, "
            f"service by {amount(band['serviceGap'])}; Jain's index {band['jain']:.2f}\n"
        )
