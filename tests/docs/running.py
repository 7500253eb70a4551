"""Runs the blocks of a page, and the workers that they talk to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random

from tests.docs.pages import ROOT, Block
from worker.files.store import resolve

READY_SECONDS = 180.0  # on a busy machine
BLOCK_SECONDS = 60.0
STOP_SECONDS = 30.0
MODEL = "smollm2-135m"
CACHE = "/home/you/.cache/warmpath/models"  # as the pages show it
DEFAULT_FLAGS = "--port 8000 --kv-events-port 5557 --kv-replay-port 5558"

_SERVER = re.compile(r"(?:\w+=\S+ )*warmpath work( [^&|;]*)?")
_HTTP, _ZMQ = range(8000, 8100), range(5500, 5600)  # the ports that pages speak of
_PORT = re.compile(r"(?<![\w.,])\d{4,5}(?!\w|,\d)")


class Ports:
    """The ports of the pages, and free ones that stand for them."""

    def __init__(self) -> None:
        random = Random()
        for _ in range(100):
            self._base = random.randrange(20_000, 32_000, 200)
            if all(map(_is_free, range(self._base, self._base + 200))):
                return
        raise OSError("found no 200 free ports in a row")

    def real(self, text: str) -> str:
        return _PORT.sub(lambda match: str(self._to(int(match[0]))), text)

    def shown(self, text: str) -> str:
        return _PORT.sub(lambda match: str(self._from(int(match[0]))), text)

    def _to(self, number: int) -> int:
        if number in _HTTP:
            return self._base + number - _HTTP.start
        return self._base + 100 + number - _ZMQ.start if number in _ZMQ else number

    def _from(self, number: int) -> int:
        offset = number - self._base
        if 0 <= offset < 100:
            return _HTTP.start + offset
        return _ZMQ.start + offset - 100 if 100 <= offset < 200 else number


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def server_command(block: Block) -> str | None:
    """The `warmpath work` that a block leaves running in the foreground, if it does."""
    last = block.commands[-1] if block.language == "bash" and block.commands else ""
    if last == "make up":
        return command_of_make_up()
    return last if _SERVER.fullmatch(last) else None


def command_of_make_up() -> str:
    """What `make up` runs once all is set up."""
    makefile = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) [?:]?= *(.*)$", makefile, re.MULTILINE))
    recipe = re.search(r"^up:.*\n\t(.*)", makefile, re.MULTILINE)
    assert recipe, "the Makefile has no `up`"
    command = recipe[1]
    while match := re.search(r"\$\((\w+)\)", command):
        command = command.replace(match[0], variables[match[1]])
    return command.removeprefix(".venv/bin/")


@dataclass
class Server:
    """A worker in a process of its own."""

    command: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"`{self.command}` is not ready:\n{self.log.read_text()}")
            time.sleep(0.05)

    @property
    def ready_log(self) -> str:
        """What it has logged so far, down to the line that says that it is ready."""
        deadline = time.monotonic() + STOP_SECONDS
        while ": Ready in " not in (text := self.log.read_text()):
            assert time.monotonic() < deadline, f"`{self.command}` never said that it is ready"
            time.sleep(0.05)
        return text

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of a request; OSError where nobody listens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def end(self) -> None:
        """Wait for the end of a worker that was told to stop; it must end well."""
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert status == 0, f"`{self.command}` ended with {status}:\n{self.log.read_text()}"

    def _is_ready(self) -> bool:
        with suppress(OSError, HTTPException):
            return self.ask("GET", "/ready")[0] == 200
        return False


@dataclass
class Runner:
    """Everything that is started for pages; `keep` ends it."""

    directory: Path
    _ports: Ports = field(default_factory=Ports)
    _servers: dict[str, Server] = field(default_factory=dict)  # by command
    _groups: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        models = self.directory / "models"
        models.mkdir()
        (models / MODEL).symlink_to(resolve(MODEL))

    def shown(self, text: str) -> str:
        """Output as it is on a reader's machine."""
        return self._ports.shown(text).replace(f"{self.directory}/models", CACHE)

    def serve(self, command: str) -> Server:
        """A ready worker, with no prefix cached; the one that runs already if it is the same."""
        command = _completed(command)
        if command in self._servers:
            server = self._servers[command]
            assert server.ask("POST", "/reset_prefix_cache") == (200, b'{"success":true}')
            return server
        log = self.directory / f"worker-{len(list(self.directory.glob('worker-*')))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", _exec(self._ports.real(command))],
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        port = int(self._ports.real(re.findall(r"--port (\d+)", command)[-1]))
        server = self._servers[command] = Server(command, port, process, log)
        server.wait_until_ready()
        return server

    def run(self, block: Block, directory: Path) -> str:
        """What a block prints; AssertionError unless it ends well."""
        interpreter = ["bash", "-euo", "pipefail"] if block.language == "bash" else ["python3"]
        script = directory / f"block-{block.line}"
        script.write_text(self._ports.real(block.code))
        printed = directory / f"block-{block.line}.output"
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [*interpreter, str(script)],
                cwd=directory,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._groups.append(process.pid)
        try:
            status = process.wait(BLOCK_SECONDS)
        except subprocess.TimeoutExpired:
            self._end_groups()
            process.wait()
            status = -1
        text = self.shown(printed.read_text())
        assert status == 0, f"{block.place} ended with {status}:\n{text}"
        return text

    def keep(self, commands: Iterable[str]) -> None:
        """End every process that was started, but the workers of these commands."""
        self._end_groups()
        kept = set(map(_completed, commands))
        ending = [self._servers.pop(command) for command in self._servers.keys() - kept]
        for server in ending:
            server.process.terminate()
        try:
            for server in ending:
                server.end()
        finally:
            for server in ending:
                server.process.kill()

    def _environment(self) -> dict[str, str]:
        """A reader's, with this environment's commands first and one model pulled."""
        binaries = Path(sys.executable).parent
        path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
        kept = {name: value for name, value in os.environ.items() if name != "WARMPATH_API_KEY"}
        return kept | {
            "PATH": path,
            "PYTHONUNBUFFERED": "1",
            "WARMPATH_CACHE": str(self.directory),
            "OMP_WAIT_POLICY": "PASSIVE",  # no spinning: other tests want the cores too
        }

    def _end_groups(self) -> None:
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._groups.clear()


def _completed(command: str) -> str:
    """The command with its defaults written out, so that their ports can be replaced."""
    return command.replace("warmpath work", f"warmpath work {DEFAULT_FLAGS}", 1)


def _exec(command: str) -> str:
    """The command in the place of its shell, so that signals reach it."""
    variables, _, rest = command.partition("warmpath")
    return f"{variables}exec warmpath{rest}"
