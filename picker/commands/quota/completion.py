"""`warmpath quota completion`: the script that completes commands in a shell."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import click
from click.shell_completion import get_completion_class

from picker.commands.quota.connection import Connection
from picker.quota.store import StoreDown

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_WARMPATH_COMPLETE"
SECONDS = 1.0  # that a Tab may take


def subjects(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names in the store that a word may become; none when it cannot be asked."""
    group = ctx
    while "actor" not in group.params:  # nothing has run yet: the options are all there is
        assert group.parent is not None, "the group's context has them"
        group = group.parent
    connection = Connection(**group.params)

    async def names() -> list[str]:
        async with connection.open() as admin:
            records = (await admin.read()).records
        return sorted(name for name in records if name.startswith(incomplete))

    with suppress(ValueError, OSError, StoreDown, click.ClickException):
        return asyncio.run(asyncio.wait_for(names(), SECONDS))
    return []


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_(shell: str) -> None:
    """Print a script for a SHELL that completes `warmpath`, its options, and names of subjects.

    \b
    Examples:
      source <(warmpath quota completion bash)
      warmpath quota completion fish > ~/.config/fish/completions/warmpath.fish
    """
    root = click.get_current_context().find_root()
    kind = get_completion_class(shell)
    assert kind is not None, "click knows all of SHELLS"
    click.echo(kind(root.command, {}, "warmpath", VARIABLE).source())
