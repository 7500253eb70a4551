"""`warmpath pick`: the endpoint picker, from a file or a few flags to a clean end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from picker.commands.errors import BadConfig, CheckFailed
from picker.commands.reference_flags import Applied, PickCommand, applied, reference_flags
from picker.config import Config, Duration, check_range
from picker.units import seconds

EXAMPLES = """\b
Examples:
  warmpath pick -c warmpath.yaml
  warmpath pick -c warmpath.yaml --check
  warmpath pick --endpoint 127.0.0.1:8001 --endpoint 127.0.0.1:8002
  warmpath pick --pool-name llama --config-file epp-config.yaml
"""
PORT = click.IntRange(0, 65535)
log = logging.getLogger(__name__)


def _interval(ctx: click.Context, option: click.Parameter, value: str | None) -> Duration | None:
    if value is None:
        return None
    try:
        interval = Duration(seconds(value))
        check_range("metrics.interval", interval, value)
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from problem
    return interval


@click.command(cls=PickCommand, epilog=EXAMPLES)
@click.option(
    "-c",
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="warmpath.yaml, or an EndpointPickerConfig. What changes in it is taken over.",
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="IP:PORT",
    help="A model server, where no file names them; repeat for more.",
)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1; with a pool: 0.0.0.0]")
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
    help="Least important log lines to show.  [default: info]",
)
@reference_flags
def pick(
    path: Path | None,
    endpoints: tuple[str, ...],
    metrics_interval: Duration | None,
    check: bool,
    log_level: str | None,
    **listen: str | int | None,
) -> None:
    """Pick an endpoint for each request that Envoy asks about.

    Flags win over the file. Port 0 means any free one. SIGTERM lets what runs finish; a second
    one ends at once.
    """
    reference = applied(click.get_current_context())
    if path is not None and reference.config_file is not None:
        raise click.UsageError("-c and --config-file exclude each other")
    path = path or reference.config_file
    if path is not None and reference.config_text is not None:
        raise click.UsageError("-c and --config-text exclude each other")
    if endpoints and reference.names_pods:
        raise click.UsageError("--endpoint excludes --pool-name and --endpoint-selector")
    no_file = path is None and reference.config_text is None
    if no_file and not endpoints and not reference.names_pods:
        raise click.UsageError(
            "say which pods: -c warmpath.yaml, --endpoint IP:PORT, or --pool-name NAME"
        )
    level = log_level.upper() if log_level else reference.log_level or logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    _flags(reference, endpoints, metrics_interval, listen)
    source = _Source(path, endpoints, reference)
    from picker.service import check_start  # loads every part

    try:
        config = source.read()
        check_start(config)
    except ValueError as problem:
        raise (CheckFailed if check else BadConfig)(str(problem)) from problem
    if check:
        for note in source.notes:
            click.echo(f"Warning: {note}", err=True)
        click.echo(f"{path or 'the configuration'} can be used")
        return
    if source.names_no_pods:
        raise click.UsageError(
            "an EndpointPickerConfig names no pods: add --pool-name, --endpoint-selector or "
            "--endpoint"
        )
    source.log()
    _serve(config, path, source.read_and_log)


def _flags(
    reference: Applied,
    endpoints: tuple[str, ...],
    metrics_interval: Duration | None,
    listen: dict[str, Any],
) -> None:
    """Add our own flags to what the reference picker's mean."""
    above = reference.above
    given = {name: value for name, value in listen.items() if value is not None}
    above.setdefault("listen", {}).update(given)
    if metrics_interval is not None:
        above.setdefault("metrics", {})["interval"] = float(metrics_interval)
    if endpoints:
        pods = [{"address": address} for address in endpoints]
        above.setdefault("pool", {})["endpoints"] = pods


class _Source:
    """Where the configuration comes from, again and again."""

    def __init__(self, path: Path | None, endpoints: tuple[str, ...], reference: Applied) -> None:
        self._path = path
        self._endpoints = endpoints
        self._reference = reference
        self._logged: set[str] = set()
        self.notes: list[str] = []  # what is ignored, of the last that was read
        self.names_no_pods = False

    def read(self) -> Config:
        """Raises ValueError when it cannot be used."""
        from picker.reference import load
        from picker.reference.flow import ADMISSION
        from picker.service import check_config

        reference = self._reference
        beneath, above = reference.beneath, reference.above
        if self._path is not None:
            loaded = load.load(self._path, check_config, beneath=beneath, above=above)
        elif reference.config_text is not None:
            text = reference.config_text
            loaded = load.parse(text, "--config-text", check_config, beneath=beneath, above=above)
        else:  # the reference picker's admission, if its flags say so, and our policy
            name = "the configuration"
            more = {**beneath, **ADMISSION} if reference.names_pods else beneath
            loaded = load.parse("", name, check_config, beneath=more, above=above)
        if self._endpoints and self._path is not None and not loaded.is_reference:
            raise ValueError("--endpoint and -c exclude each other: name the pods in the file")
        self.names_no_pods = (
            loaded.is_reference and not self._endpoints and not reference.names_pods
        )
        self.notes = [*reference.notes, *loaded.notes]
        return loaded.config

    def read_and_log(self) -> Config:
        """`read`, then `log`."""
        config = self.read()
        self.log()
        return config

    def log(self) -> None:
        """What is ignored and has not been logged before."""
        for note in self.notes:
            if note not in self._logged:
                self._logged.add(note)
                log.warning("%s", note)


def _serve(config: Config, path: Path | None, read: Callable[[], Config]) -> None:
    import uvloop

    from picker.running import run

    try:
        uvloop.run(run(config, path, read))
    except OSError as problem:
        raise click.ClickException(problem.strerror or str(problem)) from problem
    except ValueError as problem:
        raise BadConfig(str(problem)) from problem
