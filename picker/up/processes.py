"""Child processes that start together, are watched, and never outlive their parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux only


class ChildFailed(Exception):
    """A child ended, or was not ready in time. The message says which, and its last words."""


@dataclass(slots=True, eq=False)
class Child:
    """One process: its command, where it logs, and the page that tells that it is ready."""

    name: str
    command: Sequence[str]
    log: Path
    ready_url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    ready_seconds: float | None = None

    async def start(self) -> None:
        """Start it in a session of its own: Ctrl-C reaches only us, and we end it in order."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    async def until_ready(self, http: aiohttp.ClientSession, within: float) -> None:
        """Wait until its page answers 200, `within` seconds.

        Raises:
            ChildFailed: it ended, or the time is up.
        """
        started = time.monotonic()
        while not await self._is_ready(http):
            if self.has_ended:
                raise ChildFailed(f"{self.name} ended while starting: {self.last_words()}")
            if time.monotonic() - started > within:
                raise ChildFailed(
                    f"{self.name} was not ready within {within:.0f} s: {self.last_words()}"
                )
            await asyncio.sleep(_POLL_SECONDS)
        self.ready_seconds = time.monotonic() - started

    async def _is_ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(self.ready_url) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.returncode is not None

    async def wait(self) -> int:
        assert self.process is not None, "started"
        return await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and not self.has_ended:
            self.process.send_signal(number)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time."""
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.process.wait()

    def end(self) -> str:
        """How it ended, and its last words if it had a say."""
        assert self.process is not None and self.process.returncode is not None, "ended"
        status = self.process.returncode
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        return f"{self.name} ended with status {status}: {self.last_words()}"

    def last_words(self) -> str:
        """The last line of its log that says something."""
        with self.log.open(errors="replace") as log:
            lines = deque((line.strip() for line in log if line.strip()), maxlen=1)
        return lines[0].removeprefix("Error: ") if lines else "it said nothing"


def _end_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
