"""`warmpath quota check`: would this request pass?"""

from __future__ import annotations

import click

from picker.commands.errors import CheckFailed
from picker.commands.quota import options
from picker.commands.quota.connection import ask, connection, exit_codes
from picker.commands.quota.output import Column, amount, document, duration, listing, yes
from picker.quota.views import Verdict

COLUMNS = (
    Column("subject", "SUBJECT"),
    Column("limit", "LIMIT"),
    Column("model", "MODEL"),
    Column("remaining", "REMAINING", amount, right=True),
    Column("granted", "GRANTED", amount, right=True),
    Column("refuses", "REFUSES", yes),
)


@click.command("check")
@options.subject
@options.model
@click.option(
    "--input",
    "prompt_tokens",
    type=options.amount,
    default="0",
    show_default=True,
    metavar="TOKENS",
    help="Of its prompt.",
)
@click.option(
    "--max-output",
    "output_tokens",
    type=options.amount,
    metavar="TOKENS",
    help="That its answer may have.  [default: the configuration's quota.expectedOutput]",
)
@options.output
def check_(
    subject: str, model: str, prompt_tokens: int, output_tokens: int | None, output: str
) -> None:
    """Would a request of a SUBJECT pass now? Exit code 0 if it would, else 3 and why.

    Every limit that it would meet is listed. Without --max-output it reserves what a picker takes
    answers to have of which it knows nothing: one that has seen some reserves their mean.

    \b
    Example:
      warmpath quota check tenant/alice --model llama --input 800 --max-output 500
    """
    if output_tokens is None:
        with exit_codes():
            output_tokens = connection().section.expected_output
    expected = output_tokens
    verdict = ask(
        lambda admin: admin.verdict(
            subject, model, prompt_tokens=prompt_tokens, output_tokens=expected
        )
    )
    rows = [
        {
            "subject": view.subject,
            "limit": view.limit.name,
            "model": view.limit.model,
            "remaining": view.remaining,
            "granted": view.granted,
            "refuses": view == verdict.binding,
        }
        for view in verdict.views
    ]
    if output in ("json", "yaml"):
        barred = verdict.barred
        told = {
            "passes": verdict.passes,
            "waitSeconds": verdict.wait,
            "barred": None
            if barred is None
            else {"subject": barred.subject, "reason": barred.reason},
            "limits": rows,
        }
        click.echo(document(told, output, ""), nl=False)
    else:
        click.echo(listing(COLUMNS, rows, output), nl=False)
    if not verdict.passes:
        raise CheckFailed(_why_not(verdict))
    click.echo("it would pass", err=True)


def _why_not(verdict: Verdict) -> str:
    if verdict.barred is not None:
        return f"it would not pass: {verdict.barred.subject} is barred: {verdict.barred.reason}"
    assert verdict.binding is not None, "something refuses it"
    binding = verdict.binding
    until = "" if verdict.wait is None else f" for another {duration(verdict.wait)}"
    return f"it would not pass: {binding.subject} {binding.limit} refuses it{until}"
