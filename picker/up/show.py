"""What `warmpath up` prints: progress while it starts, the demo's table, where things are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from picker.up.cluster import HOST, Plan
from picker.up.demo import Answer, speedup
from picker.up.processes import Child


class StartProgress:
    """One line for each process until it is ready; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<10}"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[Child, TaskID] = {}

    def __enter__(self) -> StartProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def starting(self, child: Child) -> None:
        self._tasks[child] = self._progress.add_task(child.name, total=1, state="starting")

    def ready(self, child: Child) -> None:
        self._progress.update(self._tasks[child], completed=1, state="ready")
        if not self._console.is_terminal:
            self._console.print(f"{child.name} ready in {child.ready_seconds:.1f} s")


class DemoProgress:
    """How many of the demo's prompts are answered."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("conversations", total=total)

    def __enter__(self) -> DemoProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, answer: Answer) -> None:
        self._progress.update(
            self._task, advance=1, description=f"{answer.conversation}, turn {answer.turn}"
        )


def demo(warm: Sequence[Answer], turns: Sequence[Answer], console: Console) -> None:
    """Each prompt's way by the picker, beside its way by round robin."""
    table = Table(
        title="The same conversations down the warm path, and by round robin",
        caption="predicted: prompt tokens that the picker expected in the worker's KV cache\n"
        "cached: those that the worker found there, as it says itself, of all",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("prompt", no_wrap=True)
    table.add_column("pod", style="bold", no_wrap=True)
    table.add_column("pre-\ndicted", justify="right")
    table.add_column("\ncached", justify="right", style="green")
    table.add_column("first\ntoken", justify="right", no_wrap=True)
    table.add_column("round\nrobin", style="dim", no_wrap=True)
    table.add_column("\ncached", justify="right", style="dim")
    table.add_column("first\ntoken", justify="right", style="dim", no_wrap=True)
    for ours, theirs in zip(warm, turns, strict=True):
        table.add_row(
            f"{ours.conversation}, turn {ours.turn}",
            ours.pod,
            str(ours.predicted_tokens),
            f"{ours.cached_tokens}/{ours.prompt_tokens}",
            _duration(ours.ttft),
            theirs.pod,
            f"{theirs.cached_tokens}/{theirs.prompt_tokens}",
            _duration(theirs.ttft),
        )
    console.print(table)
    console.print(
        f"{_cached(warm)} prompt tokens came from a KV cache, {_cached(turns)} by round robin.\n"
        f"From the second turn on, the first token came {speedup(warm, turns):.1f} times sooner "
        "(median).",
        highlight=False,
    )


def places(plan: Plan, console: Console) -> None:
    """Where everything listens."""
    workers = ", ".join(str(port) for port in plan.worker_ports)
    admin = f"http://{HOST}:{plan.listen.admin}"
    others = ", ".join(str(listen.admin) for listen in plan.listens[1:])
    others = f"; other pickers' on {others}" if others else ""
    console.print(
        f"\n[bold green]Ready:[/] {plan.served_model} at http://{HOST}:{plan.port} "
        f"({plan.profile} profile, workers on {workers})\n"
        f"  {admin}/metrics and /debug/state{others}; Envoy's admin page "
        f"http://{HOST}:{plan.envoy_admin}\n"
        "  `warmpath explain` says why each request went where it went, `warmpath index` who holds "
        "what\n"
        "Ctrl-C stops everything.",
        highlight=False,
        soft_wrap=True,
    )


def _cached(answers: Sequence[Answer]) -> str:
    cached = sum(answer.cached_tokens for answer in answers)
    return f"{cached} of {sum(answer.prompt_tokens for answer in answers)}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
