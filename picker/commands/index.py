"""`warmpath index`: what pods told by KV events that they hold."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from picker.commands.admin_page import (
    MISSING,
    admin_option,
    ask,
    count,
    output_option,
    print_table,
    safe,
)

EXAMPLES = """\b
Examples:
  warmpath index
  warmpath index --watch
  warmpath index -o json
  warmpath index lookup --model llama --prompt "You are a helpful assistant."
  warmpath index lookup --body request.json --path /v1/chat/completions
"""
LOOKUP_EXAMPLES = """\b
Examples:
  warmpath index lookup --model llama --prompt "You are a helpful assistant."
  warmpath index lookup --body request.json
  warmpath index lookup --body request.json --path /v1/messages -o json
  cat prompt.txt | warmpath index lookup --model llama --prompt -
"""
MAX_BODY = 4 << 20  # bytes
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COLUMNS = (
    "pod",
    "events from",
    "state",
    "last",
    "events/s",
    "held",
    "gaps",
    "replays",
    "restarts",
    "cleared",
)
LOOKUP_COLUMNS = ("pod", "blocks", "of", "block size", "tokens", "predicted", "matched by")
LEFT = {"pod", "events from", "state", "matched by"}


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@admin_option
@output_option
@click.option("-w", "--watch", is_flag=True, help="Show the table again and again until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@click.pass_context
def index(context: click.Context, admin: str, output: str, watch: bool, interval: float) -> None:
    """Show what the pods told by KV events that they hold, and how well we hear them.

    Only where the picker follows them: `prefix: {mode: events}` in warmpath.yaml.
    """
    if context.invoked_subcommand is not None:
        return
    if watch and output == "json":
        raise click.UsageError("--watch shows tables only")
    with suppress(KeyboardInterrupt):  # which ends a watch
        while True:
            found = ask(admin, "/debug/index", "index")
            if output == "json":
                click.echo(json.dumps(found, indent=2))
                return
            if watch:
                click.clear()
            _print_index(found)
            if not watch:
                return
            time.sleep(interval)


@index.command(epilog=LOOKUP_EXAMPLES)
@click.option("--model", help="The request's model: an adapter has blocks of its own.")
@click.option("--prompt", metavar="TEXT", help="A text as /v1/completions takes it; - is stdin.")
@click.option(
    "--body",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="A file with the body of a request as clients send it; - is stdin.",
)
@click.option("--path", help=f"The API that takes the body.  [default: {CHAT}]")
@admin_option
@output_option
def lookup(
    model: str | None,
    prompt: str | None,
    body: Path | None,
    path: str | None,
    admin: str,
    output: str,
) -> None:
    """Show which pod holds how much of a prompt, from its beginning on."""
    if (prompt is None) == (body is None):
        raise click.UsageError("say which prompt: --prompt TEXT, or --body FILE")
    if body is not None:
        if model is not None:
            raise click.UsageError("--model goes with --prompt: a body names its own")
        path = path or CHAT
        with click.open_file(str(body), "rb") as file:
            data = file.read(MAX_BODY + 1)
    else:
        if path is not None:
            raise click.UsageError("--path goes with --body")
        path = COMPLETIONS
        text = sys.stdin.read(MAX_BODY) if prompt == "-" else prompt
        fields = {"prompt": text} | ({} if model is None else {"model": model})
        data = json.dumps(fields).encode()
    if len(data) > MAX_BODY:
        raise click.ClickException(f"a prompt of more than {MAX_BODY >> 20} MiB is not looked up")
    admin = _given("admin", admin)
    found = ask(admin, "/debug/lookup", "pods", {"path": path}, data)
    if _given("output", output) == "json":
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"prompt      {count(found['promptTokens'])} tokens")
    rows = [_depth(pod) for pod in sorted(found["pods"], key=lambda pod: -pod["tokens"])]
    print_table(LOOKUP_COLUMNS, rows, LEFT)


def _given(name: str, value: str) -> str:
    """An option of the command; where it was not given, the group's."""
    context = click.get_current_context()
    by_default = context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
    return str(context.parent.params[name]) if by_default and context.parent else value


def _depth(pod: dict[str, Any]) -> list[str]:
    return [
        pod["address"],
        count(pod["blocks"]),
        count(pod["numBlocks"]),
        count(pod["blockSize"]),
        count(pod["tokens"]),
        count(pod["predictedTokens"]),
        pod["matchedBy"],
    ]


def _print_index(found: dict[str, Any]) -> None:
    sizes, changes = found["index"], found["index"]["changes"]
    lines = {
        "blocks": f"{count(sizes['blocks'])} of at most {count(sizes['maxBlocks'])}, "
        f"{count(sizes['bytes'] / (1 << 20))} MiB",
        "held": _named(sizes["held"]) + " (all pods)",
        "orphans": count(sizes["orphans"]),
        "stored": f"{count(changes['stored'])}, removed {count(changes['removed'])}, "
        f"evicted {count(changes['evicted'])}",
        "ignored": _named(
            {
                "unknown removals": changes["unknownRemoved"],
                "no full attention": changes["skipped"],
                "unresolved": changes["unresolved"],
                "orphans": changes["dropped"],
                **found["index"]["refused"],
            }
        ),
        "tokenizer": safe(found["tokenizer"]),
        "no tokens": _named(found["missedTokens"]),
        "matched by": _named(found["matches"]),
        "predictions": _named(found["predictions"]["events"], keep=True),
    }
    for label, text in lines.items():
        click.echo(f"{label:<13}{text}")
    rows = [row for pod in found["pods"] for row in _publishers(pod)]
    print_table(COLUMNS, rows, LEFT)


def _named(counts: dict[str, int], keep: bool = False) -> str:
    """Counts with their names; those of 0 only where asked."""
    shown = [f"{name} {count(number)}" for name, number in counts.items() if number or keep]
    return ", ".join(shown) or "none"


def _publishers(pod: dict[str, Any]) -> list[list[str]]:
    if not pod["publishers"]:
        rest = [MISSING] * (len(COLUMNS) - 3)
        return [[pod["address"], MISSING, safe(pod["trouble"]) or "asking for it", *rest]]
    return [
        [
            pod["address"],
            each["address"],
            _state(each),
            _ago(each["ageSeconds"]),
            f"{each['eventsPerSecond']:,.1f}",
            _named(each["held"]),
            count(each["gaps"]),
            count(each["replays"]) + _failed(each["failedReplays"]),
            count(each["restarts"]),
            count(each["cleared"]),
        ]
        for each in pod["publishers"]
    ]


def _state(publisher: dict[str, Any]) -> str:
    if not publisher["connected"]:
        return "not connected"
    return "replaying" if publisher["replaying"] else "connected"


def _failed(replays: int) -> str:
    return f" ({count(replays)} failed)" if replays else ""


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
