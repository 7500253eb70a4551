"""`warmpath pick`: the endpoint picker, from a file or a few flags to a clean end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from picker.commands.errors import BadConfig, CheckFailed
from picker.config import Config, Duration, EndpointSpec, check_range, load, seconds

EXAMPLES = """\b
Examples:
  warmpath pick -c warmpath.yaml
  warmpath pick -c warmpath.yaml --check
  warmpath pick --endpoint 127.0.0.1:8001 --endpoint 127.0.0.1:8002
"""
PORT = click.IntRange(0, 65535)


def _interval(ctx: click.Context, option: click.Parameter, value: str | None) -> Duration | None:
    if value is None:
        return None
    try:
        interval = Duration(seconds(value))
        check_range("metrics.interval", interval, value)
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from problem
    return interval


@click.command(epilog=EXAMPLES)
@click.option(
    "-c",
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="warmpath.yaml. Its endpoints are taken over whenever it changes.",
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="IP:PORT",
    help="A model server, in place of a file; repeat for more.",
)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--grpc-port", "grpc", type=PORT, help="For ext_proc.  [default: 9002]")
@click.option("--health-port", "health", type=PORT, help="For gRPC health.  [default: 9003]")
@click.option("--http-port", "http", type=PORT, help="For the lean profile.  [default: 9004]")
@click.option("--admin-port", "admin", type=PORT, help="For /metrics, /debug.  [default: 9090]")
@click.option(
    "--metrics-interval",
    metavar="DURATION",
    callback=_interval,
    help="Between two looks at a busy pod's load.  [default: 50ms]",
)
@click.option("--check", is_flag=True, help="Only check the configuration: exit code 0 or 3.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least important log lines to show.",
)
def pick(
    path: Path | None,
    endpoints: tuple[str, ...],
    metrics_interval: Duration | None,
    check: bool,
    log_level: str,
    **listen: str | int | None,
) -> None:
    """Pick an endpoint for each request that Envoy asks about.

    Flags win over the file. Port 0 means any free one. SIGTERM lets what runs finish; a second
    one ends at once.
    """
    if path is None and not endpoints:
        raise click.UsageError("say which pods: -c warmpath.yaml, or --endpoint IP:PORT")
    if path is not None and endpoints:
        raise click.UsageError("--endpoint and -c exclude each other: name the pods in the file")
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    from picker.service import check_config, check_start  # loads every part

    def read() -> Config:
        if path is None:
            config = Config()
            specs = [EndpointSpec(address=address) for address in endpoints]
            pool = msgspec.structs.replace(config.pool, endpoints=specs)
            config = msgspec.structs.replace(config, pool=pool)
        else:
            config = load(path, check_config)
        return _with_flags(config, listen, metrics_interval)

    try:
        config = read()
        check_start(config)
    except ValueError as problem:
        raise (CheckFailed if check else BadConfig)(str(problem)) from problem
    if check:
        click.echo(f"{path or 'the configuration'} can be used")
        return
    _serve(config, path, read)


def _with_flags(
    config: Config, listen: dict[str, str | int | None], metrics_interval: Duration | None
) -> Config:
    given = {name: value for name, value in listen.items() if value is not None}
    config = msgspec.structs.replace(config, listen=msgspec.structs.replace(config.listen, **given))
    if metrics_interval is not None:
        metrics = msgspec.structs.replace(config.metrics, interval=metrics_interval)
        config = msgspec.structs.replace(config, metrics=metrics)
    return config


def _serve(config: Config, path: Path | None, read: Callable[[], Config]) -> None:
    import uvloop

    from picker.running import run

    try:
        uvloop.run(run(config, path, read))
    except OSError as problem:
        raise click.ClickException(problem.strerror or str(problem)) from problem
    except ValueError as problem:
        raise BadConfig(str(problem)) from problem
