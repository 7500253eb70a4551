"""Where a Python process's time goes: py-spy's samples as a short table by function."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path

import click

_FRAME = re.compile(r"^(?P<function>.+?) \((?P<file>[^)]*?)(?::\d+)?\)$")
_RATE = 250  # samples a second


async def record(pid: int, seconds: int, folder: Path) -> str:
    """Stacks of a running process with how often each was seen, one a line: `f (a.py:3);g ... 12`.

    Raises:
        click.ClickException: py-spy is missing, or may not look into the process.
    """
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        raise click.ClickException("py-spy is not installed: pip install 'warmpath[bench]'")
    stacks = folder / f"stacks-{pid}.txt"
    process = await asyncio.create_subprocess_exec(
        *(str(spy), "record", "--pid", str(pid), "--duration", str(seconds)),
        *("--rate", str(_RATE), "--nonblocking", "--format", "raw", "--output", str(stacks)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    if process.returncode or not stacks.exists():
        raise click.ClickException(f"py-spy: {err.decode(errors='replace').strip()[-300:]}")
    return stacks.read_text()


def by_function(stacks: str, least: float = 0.01) -> list[dict[str, object]]:
    """Functions by the share of time that they themselves ran, C code that they called included.

    `below` is the share with all that they called. Those below `least` of own time are left out.
    """
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [_named(frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        below.update(dict.fromkeys(frames, int(count)))
    total = own.total()
    return [
        {
            "function": name,
            "own_percent": round(100 * count / total, 1),
            "with_called_percent": round(100 * below[name] / total, 1),
        }
        for name, count in own.most_common()
        if count >= least * total
    ]


def _named(frame: str) -> str:
    """`parse (picker/request.py:31)` -> `picker/request.py parse`."""
    match = _FRAME.match(frame)
    return f"{_short(match['file'])} {match['function']}" if match else frame


def _short(file: str) -> str:
    """Without the folders above the package."""
    return re.sub(r"^.*/(?:site-packages|lib/python[\d.]+)/", "", file)
