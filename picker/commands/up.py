"""`warmpath up`: everything on this machine, with one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import uvloop
from rich.console import Console

from picker.config import Listen, Tls
from picker.up.cluster import CannotStart, Plan, check_ports, find_envoy, warmpath_command
from picker.up.demo import DemoFailed
from picker.up.processes import ChildFailed

PORT = click.IntRange(1, 65535)

EXAMPLES = """\b
Examples:
  warmpath up
  warmpath up --simulate llama-8b-h100 --workers 8
  warmpath up --profile lean --no-demo --port 8088
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--model",
    default="smollm2-135m",
    show_default=True,
    help="What the workers serve: a name from `warmpath model list`, a directory, a .gguf file.",
)
@click.option("--simulate", metavar="PROFILE", help="Simulated workers, such as llama-8b-h100.")
@click.option(
    "--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="How many."
)
@click.option(
    "--pickers",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="How many. Each further one's ports are 10 above.",
)
@click.option(
    "--profile",
    type=click.Choice(["standard", "lean"]),
    default="standard",
    show_default=True,
    help="How Envoy asks the picker: ext_proc, or the cheaper ext_authz.",
)
@click.option("--port", type=PORT, default=8080, show_default=True, help="Where clients connect.")
@click.option(
    "--worker-port",
    type=PORT,
    default=8001,
    show_default=True,
    help="The first worker's; the others follow.",
)
@click.option("--picker-port", type=PORT, default=9002, show_default=True, help="Its gRPC.")
@click.option("--health-port", type=PORT, default=9003, show_default=True, help="Its gRPC health.")
@click.option("--http-port", type=PORT, default=9004, show_default=True, help="Its ext_authz.")
@click.option("--admin-port", type=PORT, default=9090, show_default=True, help="Its admin pages.")
@click.option("--replica-port", type=PORT, default=9006, show_default=True, help="Its peers'.")
@click.option("--envoy-admin-port", type=PORT, default=9901, show_default=True, help="Envoy's.")
@click.option(
    "--baseline-port",
    type=PORT,
    default=8081,
    show_default=True,
    help="Where Envoy serves round robin, for the demo.",
)
@click.option("--tls", is_flag=True, help="Envoy asks the picker's gRPC port over TLS.")
@click.option("--demo/--no-demo", default=True, show_default=True, help="Show what it does.")
def up(
    model: str,
    simulate: str | None,
    workers: int,
    pickers: int,
    profile: str,
    port: int,
    worker_port: int,
    picker_port: int,
    health_port: int,
    http_port: int,
    admin_port: int,
    replica_port: int,
    envoy_admin_port: int,
    baseline_port: int,
    tls: bool,
    demo: bool,
) -> None:
    """Start workers, picker and Envoy on this machine, and show what they do.

    With several --pickers, Envoy asks them in turns, and each knows what the others do.

    The demo holds a few conversations through Envoy, first by round robin and then down the warm
    path, and prints what each prompt met. Then everything keeps serving until Ctrl-C.
    """
    from picker.up.run import run

    plan = Plan(
        model=model,
        simulate=simulate,
        workers=workers,
        profile=profile,
        port=port,
        worker_port=worker_port,
        pickers=pickers,
        listen=Listen(
            grpc=picker_port,
            health=health_port,
            http=http_port,
            admin=admin_port,
            tls=Tls(mode="selfSigned" if tls else "none"),
            replica=replica_port,
        ),
        envoy_admin=envoy_admin_port,
        baseline_port=baseline_port if demo else None,
    )
    try:
        find_envoy()
        check_ports(plan)
        if simulate is None:
            _fetch(model)
        uvloop.run(run(plan, Console(), demo=demo))
    except (CannotStart, ChildFailed, DemoFailed) as error:
        raise click.ClickException(str(error)) from error


def _fetch(model: str) -> None:
    """Pull the model unless it is here; the command shows progress, and says what fails."""
    if Path(model).exists():
        return
    pulled = subprocess.run([*warmpath_command(), "model", "pull", model], check=False)  # noqa: S603
    if pulled.returncode:
        sys.exit(pulled.returncode)
