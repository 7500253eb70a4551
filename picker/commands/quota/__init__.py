"""`warmpath quota`: administer tenants, limits, grants and API keys, and see what is used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from picker.commands.quota.connection import Connection, who

EXAMPLES = """\b
Examples:
  warmpath quota set tenant/alice total-tokens=100k/minute requests=10/second
  warmpath quota describe tenant/alice
  warmpath quota usage tenant/alice --since 7d -o csv
  warmpath quota --store redis://127.0.0.1:6379/0 get -w

\b
Exit codes:
  0  done
  1  failed
  2  usage: an option, a name, a limit or a file that cannot be
  3  a check said no, or what was named is not there
  4  somebody else has changed it meanwhile
  5  the store, or the server that was to ask it, does not answer
"""

COMMANDS = {  # name: (module, one line of help)
    "get": ("limits", "List limits and what is used of them."),
    "describe": ("describe", "Show all that holds for a subject, and what binds it."),
    "set": ("limits", "Add or replace limits of a subject."),
    "unset": ("limits", "Remove limits, or all that is written of a subject."),
    "check": ("check", "Would this request pass? Nothing is charged."),
    "block": ("access", "Refuse all requests of a subject."),
    "unblock": ("access", "Take them again."),
    "expire": ("access", "Refuse all requests of a subject from a time on."),
    "grant": ("access", "Add to a limit until a time."),
    "revoke": ("access", "Take a grant back."),
    "adjust": ("counters", "Correct what is used of a limit."),
    "reset": ("counters", "Start limits of a subject anew."),
    "reservations": ("counters", "List what running requests hold."),
    "release": ("counters", "Give back what a stuck reservation holds."),
    "usage": ("books", "Show what was used, by day, subject and model."),
    "top": ("books", "Show who uses most."),
    "fairness": ("fairness", "Show what tenants got of busy pods, and what waits."),
    "denials": ("books", "Show who was refused last, and by which limit."),
    "audit": ("books", "Show who changed what, and why."),
    "keys": ("keys", "Create, list, rotate and revoke API keys."),
    "export": ("files", "Print all that is written down, as YAML."),
    "import": ("files", "Make the store say what a file says."),
    "diff": ("files", "Show what an import would change."),
    "simulate": ("simulate", "Replay a log of requests against limits."),
    "store": ("stores", "Look after the store itself."),
    "completion": ("completion", "Print the script that completes commands in a shell."),
}


class QuotaGroup(click.Group):
    """Commands by name; the module of one is imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as problem:
            if not any(problem.option_name in option.opts for option in self.params):
                raise
            why = f"{problem.option_name} goes before the command: warmpath quota"
            why += f" {problem.option_name} ... {ctx.invoked_subcommand}"
            raise click.UsageError(why, problem.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=QuotaGroup, epilog=EXAMPLES)
@click.option(
    "--store",
    envvar="WARMPATH_QUOTA_STORE",
    show_envvar=True,
    metavar="URL",
    help="sqlite:///FILE or redis://HOST:PORT/DB.  [default: the configuration's]",
)
@click.option(
    "--server",
    envvar="WARMPATH_QUOTA_SERVER",
    show_envvar=True,
    metavar="HOST:PORT",
    help="Ask a picker's admin service instead of the store.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Its first word is the token for --server.  [default: $WARMPATH_QUOTA_TOKEN]",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Certificates to trust: --server is asked over TLS.",
)
@click.option(
    "-c",
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="warmpath.yaml, for its store and time zone.",
)
@click.option("--actor", default=who, show_default="you@here", help="Whom the audit log names.")
@click.pass_context
def quota(ctx: click.Context, /, **options: Any) -> None:
    """Administer tenants, limits, grants and API keys, and see what is used.

    Subjects are org/NAME, team/NAME, tenant/NAME and key/ID, each below the one before, and
    model/NAME. Limits are WHAT=AMOUNT/WINDOW: requests, input-tokens, output-tokens or total-tokens
    in a second, minute, hour, day or month; or concurrency=AMOUNT. Changes hold from the next
    request on, at every picker.
    """
    ctx.obj = Connection(**options)
