"""`warmpath quota keys`: API keys, of which only a hash is kept."""

from __future__ import annotations

import time

import click

from picker.commands.quota import completion, options
from picker.commands.quota.connection import ask, show
from picker.commands.quota.output import Column, clock, document, iso, listing
from picker.commands.quota.records import as_data, state, told, unknown
from picker.quota.administration import Administration
from picker.quota.editor import Why, Written

COLUMNS = (
    Column("key", "KEY"),
    Column("parent", "PARENT"),
    Column("hint", "ENDS IN"),
    Column("created", "CREATED", clock),
    Column("expires", "EXPIRES", clock),
    Column("state", "STATE"),
    Column("digest", "SHA-256", wide=True),
    Column("revision", "REVISION", right=True, wide=True),
)


_secret_output = click.option(
    "-o",
    "--output",
    type=click.Choice(("table", "json", "yaml")),  # others would not tell it, or not what it is
    default="table",
    show_default=True,
    help="How to print it.",
)


@click.group("keys")
def keys_() -> None:
    """Create, list, rotate and revoke API keys."""


@keys_.command()
@click.argument("parent", type=options.subject_name, shell_complete=completion.subjects)
@click.option("--id", "id", metavar="ID", help="To be called key/ID.  [default: a new one]")
@click.option("--expires", type=options.later, metavar="WHEN", help="As 90d or 2026-04-01.")
@_secret_output
@options.writing
def create(parent: str, id: str | None, expires: float | None, output: str, why: Why) -> None:
    """Make a key for a PARENT, such as a tenant, and print it: it is never shown again.

    \b
    Example:
      warmpath quota keys create tenant/alice --id alice-ci --expires 90d
    """

    async def work(admin: Administration) -> tuple[Written, str, bool]:
        known = parent in (await admin.read()).records
        return *await admin.create_key(parent, id, expires=expires, why=why), known

    written, secret, known = ask(work, create=True)
    _told(written, secret, output, why)
    if not known:
        unknown(parent)


@keys_.command("list")
@click.argument(
    "parent", type=options.subject_name, shell_complete=completion.subjects, required=False
)
@options.output
@options.watch
def list_(parent: str | None, output: str, watch: bool) -> None:
    """List the keys of a PARENT, or all.

    \b
    Example:
      warmpath quota keys list tenant/alice
    """

    async def render(admin: Administration) -> str:
        policy = await admin.read()
        now = time.time()
        rows = [
            {
                "key": name,
                "parent": subject.parent,
                "hint": subject.key.hint,
                "created": iso(subject.key.created),
                "expires": None if subject.expires is None else iso(subject.expires),
                "state": state(subject, now) or "ok",
                "digest": subject.key.digest,
                "revision": revision,
            }
            for name, (revision, subject) in sorted(policy.records.items())
            if subject.key is not None and parent in (None, subject.parent)
        ]
        return listing(COLUMNS, rows, output)

    show(render, watch)


@keys_.command()
@click.argument("key", type=options.subject_name, shell_complete=completion.subjects)
@_secret_output
@options.writing
def rotate(key: str, output: str, why: Why) -> None:
    """Print another secret for a KEY; the old one is refused from now on.

    \b
    Example:
      warmpath quota keys rotate key/alice-ci
    """
    _told(*ask(lambda admin: admin.rotate_key(key, why=why)), output, why)


@keys_.command()
@click.argument("key", type=options.subject_name, shell_complete=completion.subjects)
@options.output
@options.writing
def revoke(key: str, output: str, why: Why) -> None:
    """Refuse a KEY from now on. Its record stays, for the books.

    \b
    Example:
      warmpath quota keys revoke key/alice-ci
    """
    told(ask(lambda admin: admin.revoke_key(key, why=why)), output, why)


def _told(written: Written, secret: str, output: str, why: Why) -> None:
    """The secret is the data; what else there is to say goes to stderr."""
    if output in ("json", "yaml"):
        told_secret = None if why.dry_run else secret
        click.echo(document({"secret": told_secret, **as_data(written)}, output, ""), nl=False)
        return
    told(written, output, why)
    if not why.dry_run:  # which opens nothing
        click.echo(secret)
