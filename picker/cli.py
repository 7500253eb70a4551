"""The command tree. Each command's module is loaded by name, only when it is called."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import click

COMMANDS = {  # name: (module, attribute, one line of help)
    "up": ("picker.commands.up", "up", "Start workers, picker and Envoy on this machine."),
    "pick": ("picker.commands.pick", "pick", "Pick endpoints for Envoy."),
    "work": ("worker.cli", "work", "Serve one model with an OpenAI API."),
    "quota": ("picker.commands.quota", "quota", "Administer tenants, limits, grants and keys."),
    "envoy": ("picker.commands.envoy", "envoy", "Print Envoy's configuration."),
    "explain": ("picker.commands.explain", "explain", "Show why the last picks went where."),
    "index": ("picker.commands.index", "index", "Show what the pods say that they hold."),
    "model": ("worker.model_cli", "model", "Pull, list and inspect local models."),
}


OWN_OPTIONS = ("-h", "--help", "--version")


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is needed.

    Other flags in the place of a command are `pick`'s: the reference picker's charts give its flags
    and no command, and an image's entrypoint is `warmpath`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in OWN_OPTIONS:
            args = ["pick", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as missing:
            raise click.ClickException(
                f"`warmpath {cmd_name}` needs the package {missing.name!r}: "
                "pip install 'warmpath[worker]'"
            ) from missing
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: warmpath work --model smollm2-135m --port 8001",
)
@click.version_option(version("warmpath"), prog_name="warmpath")
def main() -> None:
    """Warmpath sends each LLM request to the pod that already holds its prefix."""


if __name__ == "__main__":
    main()
