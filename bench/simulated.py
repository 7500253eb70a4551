"""What an idle simulated worker costs, so that one knows how many fit on a laptop.

python -m bench.simulated
python -m bench.simulated --workers 100
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import click
import psutil
from rich.progress import track

from bench.report import spread, write

FIRST_PORT = 21_000
READY_SECONDS = 120.0


def start(index: int, profile: str) -> psutil.Popen:
    """A simulated worker on three ports of its own, quiet."""
    ports = [str(FIRST_PORT + 3 * index + i) for i in range(3)]
    flags = ["--port", ports[0], "--kv-events-port", ports[1], "--kv-replay-port", ports[2]]
    command = [Path(sys.executable).parent / "warmpath", "work", "--simulate", profile, *flags]
    return psutil.Popen([*command, "--log-level", "error"], stdout=subprocess.DEVNULL)


def wait_until_ready(index: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    url = f"http://127.0.0.1:{FIRST_PORT + 3 * index}/ready"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise click.ClickException(f"worker {index} was not ready within {READY_SECONDS:.0f} s")


def cpu_seconds(processes: list[psutil.Popen]) -> float:
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


@click.command()
@click.option("--workers", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--profile", default="llama-8b-h100", show_default=True)
@click.option("--seconds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(workers: int, profile: str, seconds: int, path: Path | None) -> None:
    """Start workers, leave them idle, and measure their memory and CPU."""
    processes: list[psutil.Popen] = []
    started = time.monotonic()
    try:
        for index in track(range(workers), "Starting"):
            processes.append(start(index, profile))
            if index % (2 * (os.cpu_count() or 1)) == 0:
                wait_until_ready(index)
        for index in range(workers):
            wait_until_ready(index)
        start_seconds = time.monotonic() - started
        before = cpu_seconds(processes)
        time.sleep(seconds)
        idle_cpu = (cpu_seconds(processes) - before) / seconds
        memory = [p.memory_full_info() for p in processes]
    finally:
        for process in processes:
            process.terminate()
        psutil.wait_procs(processes, timeout=30)
    results: dict[str, Any] = {
        "workers": workers,
        "profile": profile,
        "start_seconds_all": round(start_seconds, 1),
        "resident_mib_each": spread([m.rss / 2**20 for m in memory], 1),
        "unshared_mib_each": spread([m.uss / 2**20 for m in memory], 1),
        "idle_cpu_percent_each": round(100 * idle_cpu / workers, 4),
    }
    for name, value in results.items():
        click.echo(f"{name:24} {value}")
    click.echo(f"Written to {write('simulated', results, path)}")


if __name__ == "__main__":
    main()
