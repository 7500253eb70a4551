"""The Envoy of this machine: where it is, and what it says of a configuration."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PATIENCE = 60  # seconds


def find_envoy() -> str | None:
    """The Envoy beside this Python, else the first on the PATH; None where there is none."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def why_not(binary: str, page: str) -> str | None:
    """Envoy's reason to refuse a configuration, in JSON; None when it can be used."""
    with tempfile.TemporaryDirectory(prefix="warmpath-") as folder:
        file = Path(folder, "envoy.json")
        file.write_text(page)
        try:
            done = subprocess.run(  # noqa: S603  # Envoy's own binary
                [binary, "--mode", "validate", "--log-level", "critical", "-c", file],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return f"it said nothing within {PATIENCE} s"
    if not done.returncode:
        return None
    said = " ".join((done.stderr or done.stdout).split())
    reason = said.rpartition(f"'{file}': ")[2].removeprefix(": ")
    return reason or f"exit code {done.returncode}"
