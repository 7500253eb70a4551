"""`warmpath quota store`: the store itself."""

from __future__ import annotations

import asyncio

import click

from picker.commands.errors import CheckFailed
from picker.commands.quota import options
from picker.commands.quota.connection import TIMEOUT, ask, connection, exit_codes, show
from picker.commands.quota.counters import counter
from picker.commands.quota.output import Column, listing
from picker.quota.administration import Administration
from picker.quota.store import Conflict, Store
from picker.quota.stores import open_store

STATUS = (Column("name", "NAME"), Column("value", "VALUE"))
FAULTS = (
    Column("counter", "COUNTER"),
    Column("value", "VALUE", right=True),
    Column("settled", "SETTLED", right=True),
    Column("open", "OPEN", right=True),
)


@click.group("store")
def store_() -> None:
    """Look after the store itself."""


@store_.command("status")
@options.output
@options.watch
def status(output: str, watch: bool) -> None:
    """Show which store it is, and how much is in it.

    \b
    Example:
      warmpath quota store status
    """

    async def render(admin: Administration) -> str:
        rows = [{"name": name, "value": value} for name, value in (await admin.status()).items()]
        return listing(STATUS, rows, output)

    show(render, watch)


@store_.command("verify")
@options.output
def verify(output: str) -> None:
    """Check the books: each counter is what was settled plus what runs. Exit code 3 if not.

    \b
    Example:
      warmpath quota store verify
    """
    faults = ask(lambda admin: admin.verify())
    rows = [
        {
            "counter": counter(fault.key),
            "value": fault.value,
            "settled": fault.settled,
            "open": fault.open,
        }
        for fault in faults
    ]
    if faults or output != "table":
        click.echo(listing(FAULTS, rows, output), nl=False)
    if faults:
        raise CheckFailed(f"{len(faults)} counters do not balance")
    click.echo("all counters balance", err=True)


@store_.command("migrate")
@click.option("--to", "target", required=True, metavar="URL", help="An empty store.")
def migrate(target: str) -> None:
    """Copy everything into another, empty store: records, counters, what runs, audit and books.

    Stop the pickers meanwhile, or what they count is lost; afterwards name the new store in their
    configuration.

    \b
    Example:
      warmpath quota --store sqlite:///quota.db store migrate --to redis://127.0.0.1:6379/0
    """
    with exit_codes():
        if target == connection().store_url:
            raise click.UsageError("--to names the store that is to be copied")
        told = asyncio.run(_migrate(connection().open_store(), open_store(target, timeout=TIMEOUT)))
    click.echo(told, err=True)


async def _migrate(source: Store, target: Store) -> str:
    try:
        dump = await source.dump()
        await target.restore(dump)
    except Conflict as problem:
        raise click.ClickException(
            f"the store at --to is not empty: it has {problem.subject}"
        ) from problem
    finally:
        await source.close()
        await target.close()
    return (
        f"copied {len(dump.records)} subjects, {len(dump.counters)} counters, "
        f"{len(dump.reservations)} reservations and {len(dump.audit)} audit entries"
    )
