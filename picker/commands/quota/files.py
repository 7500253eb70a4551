"""`warmpath quota export`, `import` and `diff`: all that is written down, as a file."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec
import yaml

from picker.commands.errors import CheckFailed
from picker.commands.quota import options
from picker.commands.quota.connection import ask, exit_codes
from picker.commands.quota.output import document
from picker.commands.quota.records import changes
from picker.quota.documents import export, load
from picker.quota.editor import Diff, Why
from picker.quota.model import QuotaError, Subject

MAX_BYTES = 64 << 20  # of a file: some 100,000 subjects

_file = click.option(
    "-f",
    "--file",
    type=click.File(encoding="utf-8"),
    required=True,
    help="What `export` printed, and people changed; - for stdin.",
)
_prune = click.option("--prune", is_flag=True, help="Remove subjects that the file does not name.")
_output = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="How to print the changes.",
)


@click.command("export")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="Format.",
)
def export_(output: str) -> None:
    """Print all that is written down: parents, limits, grants, blocks, and keys as hashes.

    What is used is not in it. The same records give the same bytes, so that a file can be kept
    under version control.

    \b
    Example:
      warmpath quota export > quotas.yaml
    """
    click.echo(document(export(ask(lambda admin: admin.read())), output, ""), nl=False)


@click.command("import")
@_file
@_prune
@_output
@options.correcting
def import_(file: Any, prune: bool, output: str, why: Why) -> None:
    """Make the store say what a file says, in one step: all of it, or nothing.

    \b
    Examples:
      warmpath quota import -f quotas.yaml --dry-run
      warmpath quota import -f quotas.yaml --prune --reason "spring cleaning"
    """
    subjects = read(file)
    diff = ask(lambda admin: admin.apply(subjects, prune=prune, why=why), create=True)
    _print(diff, output)
    done = "dry run, nothing is written" if why.dry_run else "written"
    click.echo("nothing changes" if diff.empty else f"{_counted(diff)}: {done}", err=True)


@click.command("diff")
@_file
@_prune
@_output
def diff_(file: Any, prune: bool, output: str) -> None:
    """Show what an import of a file would change: `-` goes, `+` comes. Exit code 3 if anything.

    \b
    Example:
      warmpath quota diff -f quotas.yaml
    """
    subjects = read(file)
    diff = ask(lambda admin: admin.apply(subjects, prune=prune, why=Why(dry_run=True)))
    _print(diff, output)
    if not diff.empty:
        raise CheckFailed(_counted(diff))


def read(file: Any) -> dict[str, Subject]:
    """The subjects of an export; YAML, of which JSON is a part."""
    text = file.read(MAX_BYTES + 1)
    with exit_codes():
        if len(text) > MAX_BYTES:
            raise QuotaError(f"{file.name}: longer than {MAX_BYTES >> 20} MiB")
        try:
            return load(_parsed(text))
        except (yaml.YAMLError, ValueError, RecursionError) as problem:
            raise QuotaError(f"{file.name}: {' '.join(str(problem).split())}") from problem


def _parsed(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return json.loads(text)
    return yaml.load(text, _Loader)  # noqa: S506  # which is a SafeLoader


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain data only; a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise QuotaError(f"line {line}: {key.value} stands here twice; remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _print(diff: Diff, output: str) -> None:
    if output == "table":
        for sign, pairs in (("+", diff.added), ("~", diff.changed), ("-", diff.removed)):
            for name, pair in sorted(pairs.items()):
                click.echo(f"{sign} {name}")
                for line in changes(*pair):
                    click.echo(f"    {line}")
        return
    told = {
        "added": {name: msgspec.to_builtins(pair.after) for name, pair in diff.added.items()},
        "changed": {
            name: {
                "before": msgspec.to_builtins(pair.before),
                "after": msgspec.to_builtins(pair.after),
            }
            for name, pair in diff.changed.items()
        },
        "removed": {name: msgspec.to_builtins(pair.before) for name, pair in diff.removed.items()},
    }
    click.echo(document(told, output, ""), nl=False)


def _counted(diff: Diff) -> str:
    return f"{len(diff.added)} added, {len(diff.changed)} changed, {len(diff.removed)} removed"
