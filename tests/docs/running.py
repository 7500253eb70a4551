"""Runs the blocks of a page, and the servers that they talk to."""

from __future__ import annotations

import ctypes
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

from picker.config import load
from tests.docs.pages import ROOT, Block
from text.models import resolve

READY_SECONDS = 180.0  # on a busy machine
BLOCK_SECONDS = 60.0
STOP_SECONDS = 30.0
MODEL = "smollm2-135m"
CACHE = "/home/you/.cache/warmpath/models"  # as the pages show it
DEFAULT_FLAGS = {  # of each server, with its ports written out so that they can be replaced
    "up": "--port 8080 --worker-port 8001 --picker-port 9002 --health-port 9003 --http-port 9004 "
    "--admin-port 9090 --replica-port 9006 --envoy-admin-port 9901 --baseline-port 8081",
    "pick": "--grpc-port 9002 --health-port 9003 --http-port 9004 --admin-port 9090",
    "work": "--port 8000 --kv-events-port 5557 --kv-replay-port 5558",
}
LAST_WORDS = {  # of a server that has just become ready
    "up": "Ctrl-C stops everything.\n",
    "pick": " for /metrics and /debug\n",
    "work": ": Ready in ",
}

_SERVER = re.compile(r"(?:\w+=\S+ )*warmpath (up|pick|work)\b(?!.* --check)[^&|;>]*")
_RANGES = (range(8000, 8100), range(5500, 5600), range(9000, 9200), range(9900, 10_000))
_PORT = re.compile(r"(?<![\w.,])\d{4,5}(?!\w|,\d{3}(?![\d.]))")  # no number with thousands
_FILE = re.compile(r" -c (\S+)")


class Ports:
    """The ports that pages speak of, and free ones that stand for them."""

    def __init__(self) -> None:
        random = Random()
        count = sum(map(len, _RANGES))
        for _ in range(100):
            base = random.randrange(20_000, 32_000, count)
            if all(map(_is_free, range(base, base + count))):
                break
        else:
            raise OSError(f"found no {count} free ports in a row")
        shown = [port for ports in _RANGES for port in ports]
        self._real = dict(zip(shown, range(base, base + count), strict=True))
        self._shown = {real: port for port, real in self._real.items()}

    def real(self, text: str) -> str:
        return _PORT.sub(lambda match: str(self._real.get(int(match[0]), match[0])), text)

    def shown(self, text: str) -> str:
        return _PORT.sub(lambda match: str(self._shown.get(int(match[0]), match[0])), text)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def server_command(block: Block) -> str | None:
    """The server that a block leaves running in the foreground, if it does."""
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
    """A worker, a picker or all of them, in a process of its own."""

    command: str
    kind: str
    port: int  # that answers HTTP: a picker's is its admin page's
    ports: set[int]  # all that it listens on
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
        while LAST_WORDS[self.kind] not in (text := self.log.read_text()):
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
        """Wait for the end of a server that was told to stop; it must end well."""
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert status == 0, f"`{self.command}` ended with {status}:\n{self.log.read_text()}"

    def _is_ready(self) -> bool:
        if self.kind == "up":
            return LAST_WORDS["up"] in self.log.read_text()
        with suppress(OSError, HTTPException):
            return self.ask("GET", "/readyz" if self.kind == "pick" else "/ready")[0] == 200
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

    def serve(self, command: str, directory: Path) -> Server:
        """A ready server; the one that runs already if it is the same. A worker's prefix cache is
        empty then. What else listens on its ports is ended before, as a reader would."""
        if command in self._servers:
            server = self._servers[command]
            if server.kind == "work":
                assert server.ask("POST", "/reset_prefix_cache") == (200, b'{"success":true}')
            return server
        kind, real = self._completed(command)
        port, ports = _listens(kind, real, directory)
        self._end([name for name, other in self._servers.items() if other.ports & ports])
        log = self.directory / f"server-{len(list(self.directory.glob('server-*')))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", _exec(real)],
                cwd=directory,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        server = self._servers[command] = Server(command, kind, port, ports, process, log)
        server.wait_until_ready()
        return server

    def write(self, text: str, name: str) -> None:
        """A file of the reader's, with free ports in the place of the page's."""
        (self.directory / name).write_text(self._ports.real(text))

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
        """End every process that was started, but the servers of these commands; those that read
        a page's files end too."""
        self._end_groups()
        kept = {command for command in commands if not _FILE.search(command)}
        self._end(self._servers.keys() - kept)

    def _end(self, commands: Iterable[str]) -> None:
        ending = [self._servers.pop(command) for command in commands]
        for server in ending:
            server.process.terminate()
        try:
            for server in ending:
                server.end()
        finally:
            for server in ending:
                server.process.kill()

    def _completed(self, command: str) -> tuple[str, str]:
        """What a command starts, and the command with free ports in the place of the page's."""
        match = _SERVER.fullmatch(command)
        assert match, command
        kind = match[1]
        if not _FILE.search(command):  # a file names the ports itself
            name = f"warmpath {kind}"
            command = command.replace(name, f"{name} {DEFAULT_FLAGS[kind]}", 1)
        return kind, self._ports.real(command)

    def _environment(self) -> dict[str, str]:
        """A reader's, with this environment's commands first and one model pulled."""
        binaries = Path(sys.executable).parent
        path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
        kept = {name: value for name, value in os.environ.items() if name != "WARMPATH_API_KEY"}
        return kept | {
            "PATH": path,
            "PYTHONUNBUFFERED": "1",
            "WARMPATH_CACHE": str(self.directory),
            "WARMPATH_ADMIN": self._ports.real("http://127.0.0.1:9090"),
            "WARMPATH_QUOTA_STORE": "sqlite:quota.db",  # in the page's directory
            "OMP_WAIT_POLICY": "PASSIVE",  # no spinning: other tests want the cores too
        }

    def _end_groups(self) -> None:
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._groups.clear()


def _listens(kind: str, command: str, directory: Path) -> tuple[int, set[int]]:
    """The port where a server answers HTTP, and all its ports."""
    if file := _FILE.search(command):
        listen = load(directory / file[1]).listen
        ports = {listen.grpc, listen.health, listen.http, listen.admin, listen.quota}
        return listen.admin, ports
    flags = {flag: int(port) for flag, port in re.findall(r"--([a-z-]*port) (\d+)", command)}
    ports = set(flags.values()) - {0}
    if kind == "up":
        workers = re.search(r"--workers (\d+)", command)
        ports |= {flags["worker-port"] + i for i in range(int(workers[1]) if workers else 2)}
        if "--no-demo" in command:
            ports.remove(flags["baseline-port"])
        if "--pickers" not in command:
            ports.remove(flags["replica-port"])
    return flags["admin-port" if kind == "pick" else "port"], ports


def _end_with_parent() -> None:
    """In the child: ask Linux for SIGTERM when the tests end without ending it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _exec(command: str) -> str:
    """The command in the place of its shell, so that signals reach it."""
    variables, _, rest = command.partition("warmpath")
    return f"{variables}exec warmpath{rest}"
