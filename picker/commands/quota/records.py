"""What is written of a subject, as lines that people read and compare."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from picker.commands.quota.output import Column, document, iso, listing, safe
from picker.quota.editor import REVOKED, Why, Written
from picker.quota.model import Limit, Subject, shown_quantity

WRITTEN = (Column("name", "NAME"), Column("revision", "REVISION", right=True))


def lines(subject: Subject | None) -> list[str]:
    """A record, one thing a line."""
    return [] if subject is None else list(_lines(subject))


def changes(before: Subject | None, after: Subject | None) -> list[str]:
    """What went (`- `) and what came (`+ `)."""
    old, new = lines(before), lines(after)
    return [f"- {line}" for line in old if line not in new] + [
        f"+ {line}" for line in new if line not in old
    ]


def limit_line(limit: Limit) -> str:
    """`total-tokens=100k/minute for llama, shadow`."""
    text = str(limit)
    if limit.model:
        text += f" for {limit.model}"
    if limit.zone:
        text += f" in {limit.zone}"
    if limit.shadow:
        text += ", shadow"
    if limit.on_failure:
        text += f", on failure {limit.on_failure}"
    return text


def told(written: Written, output: str, why: Why) -> None:
    """Say what a write did: to people on stderr, to programs on stdout."""
    if output in ("name", "csv"):
        click.echo(listing(WRITTEN, [as_data(written)], output), nl=False)
    elif output in ("json", "yaml"):
        click.echo(document(as_data(written), output, ""), nl=False)
    else:
        changed = changes(written.before, written.after)
        if not changed:
            status = "nothing changes"
        elif why.dry_run:
            status = "dry run, nothing is written"
        else:
            status = f"revision {written.revision}" if written.revision else "nothing is left of it"
        click.echo(f"{written.name}: {status}", err=True)
        for line in changed:
            click.echo(line, err=True)


def unknown(name: str | None) -> None:
    """Nothing is written of a subject that was named as another's parent: it may be misspelt."""
    click.echo(f"note: nothing is written of {name} itself", err=True)


def state(subject: Subject, now: float) -> str:
    """Why all requests of a subject are refused, in a word; empty when they are not."""
    if subject.blocked is not None:
        return "revoked" if subject.key is not None and subject.blocked == REVOKED else "blocked"
    expired = subject.expires is not None and subject.expires <= now
    return "expired" if expired else ""


def as_data(written: Written) -> dict[str, object]:
    return {
        "name": written.name,
        "revision": written.revision,
        "before": msgspec.to_builtins(written.before),
        "after": msgspec.to_builtins(written.after),
    }


def _lines(subject: Subject) -> Iterator[str]:
    if subject.parent:
        yield f"parent {subject.parent}"
    for limit in subject.limits:
        yield limit_line(limit)
    for grant in subject.grants:
        model = f" for {grant.model}" if grant.model else ""
        reason = f": {safe(grant.reason)}" if grant.reason else ""
        amount = shown_quantity(grant.amount)
        yield f"grant {grant.id}: {amount} {grant.limit}{model} until {iso(grant.expires)}{reason}"
    if subject.blocked is not None:
        yield f"blocked: {safe(subject.blocked)}"
    if subject.expires is not None:
        yield f"expires {iso(subject.expires)}"
    if subject.key is not None:
        key = subject.key
        yield f"API key ...{key.hint}, hash {key.digest[:8]}..., made {iso(key.created)}"
