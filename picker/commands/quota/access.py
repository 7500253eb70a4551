"""`warmpath quota block`, `unblock`, `expire`, `grant` and `revoke`."""

from __future__ import annotations

import secrets

import click

from picker.commands.quota import options
from picker.commands.quota.connection import ask
from picker.commands.quota.records import told
from picker.quota.editor import Why
from picker.quota.model import Grant


@click.command("block")
@options.subject
@click.argument("because")
@options.output
@options.writing
def block_(subject: str, because: str, output: str, why: Why) -> None:
    """Refuse all requests of a SUBJECT and of all below it, and tell them BECAUSE of what.

    \b
    Example:
      warmpath quota block tenant/mallory "unpaid since March"
    """
    told(ask(lambda admin: admin.block(subject, because, why=why), create=True), output, why)


@click.command("unblock")
@options.subject
@options.output
@options.writing
def unblock_(subject: str, output: str, why: Why) -> None:
    """Take requests of a SUBJECT again.

    \b
    Example:
      warmpath quota unblock tenant/mallory --reason "paid"
    """
    told(ask(lambda admin: admin.unblock(subject, why=why)), output, why)


@click.command("expire")
@options.subject
@click.argument("when", type=options.later, required=False)
@click.option("--never", is_flag=True, help="No longer at any time.")
@options.output
@options.writing
def expire_(subject: str, when: float | None, never: bool, output: str, why: Why) -> None:
    """Refuse all requests of a SUBJECT and of all below it, from WHEN on.

    \b
    Examples:
      warmpath quota expire tenant/trial 14d
      warmpath quota expire key/3f9c 2026-04-01T00:00Z
      warmpath quota expire tenant/trial --never
    """
    if (when is None) != never:
        raise click.UsageError("say when, as 14d or 2026-04-01, or --never")
    told(ask(lambda admin: admin.expire(subject, when, why=why), create=True), output, why)


@click.command("grant")
@options.subject
@click.argument("limit", type=options.limit_name)
@click.argument("amount", type=options.amount)
@click.option(
    "--expires", type=options.later, required=True, metavar="WHEN", help="As 2h or 2026-04-01."
)
@click.option(
    "--id", "id", metavar="ID", help="Its name: a grant that is there already stays as it is."
)
@options.model
@options.output
@options.writing
def grant_(
    subject: str,
    limit: str,
    amount: int,
    expires: float,
    id: str | None,
    model: str,
    output: str,
    why: Why,
) -> None:
    """Add AMOUNT to a LIMIT of a SUBJECT, to be drawn on once when the limit is met.

    \b
    Example:
      warmpath quota grant tenant/alice total-tokens/minute 50k --expires 2h --id launch
    """
    name = id or secrets.token_hex(4)
    grant = Grant(name, limit, amount, expires, model, why.reason)
    told(ask(lambda admin: admin.grant(subject, grant, why=why)), output, why)


@click.command("revoke")
@options.subject
@click.argument("id")
@options.output
@options.writing
def revoke_(subject: str, id: str, output: str, why: Why) -> None:
    """Take the grant ID of a SUBJECT back.

    \b
    Example:
      warmpath quota revoke tenant/alice launch
    """
    told(ask(lambda admin: admin.revoke_grant(subject, id, why=why)), output, why)
