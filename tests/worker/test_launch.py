"""Starting a worker: what goes wrong is one line that names what to change."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.process import running_worker
from worker.launch import own_address, url_host

WARMPATH = Path(sys.executable).parent / "warmpath"
SIMULATED = ["--simulate", "instant", "--kv-events-port", "0", "--kv-replay-port", "0"]


def refused(*flags: str) -> tuple[int, str]:
    """The exit status and the only line of a command that ends by itself."""
    done = subprocess.run(
        [WARMPATH, "work", *flags], capture_output=True, text=True, timeout=90, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("flag", ["--port", "--kv-events-port", "--kv-replay-port"])
def test_a_taken_port_is_named_with_its_flag(flag: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, line = refused(*SIMULATED, "--port", "0", flag, port)
    assert status == 1
    assert port in line
    assert flag in line


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        (["--max-num-batched-tokens", "4"], 1, "--max-num-seqs"),
        (["--max-model-len", "9999999"], 1, "--max-model-len"),
        (["--num-blocks", "2", "--max-model-len", "64"], 1, "--num-blocks"),
        (["--num-blocks", "99999999999"], 2, "--num-blocks"),
        (["--drain-seconds", "nan"], 2, "--drain-seconds"),
        (["--served-model-name", ""], 2, "--served-model-name"),
        (["--api-key", ""], 2, "--api-key"),
        (["--port", "70000"], 2, "--port"),
        (["--host", "no.such.host.invalid"], 1, "no.such.host.invalid"),
        (["--model", "no-such-model"], 1, "no-such-model"),
    ],
)
def test_what_cannot_be_served_is_one_line(flags: list[str], status: int, named: str):
    assert (got := refused(*SIMULATED, "--port", "0", *flags))[0] == status
    assert named in got[1]


def test_more_kv_memory_than_there_is_is_one_line():
    flags = ["--model", "smollm2-135m", "--port", "0", "--no-kv-events", "--num-blocks", "16000000"]
    status, line = refused(*flags)
    assert status == 1
    assert "--num-blocks" in line


def test_a_model_is_needed():
    assert refused()[0] == 2


async def test_one_model_is_described_by_its_name():
    flags = ["--simulate", "instant", "--served-model-name", "org/model"]
    async with running_worker(*flags) as worker:
        async with worker.http.get("/v1/models/org/model") as response:
            assert (await response.json())["id"] == "org/model"
        async with worker.http.get("/v1/models/other") as response:
            assert response.status == 404


def test_addresses_are_such_as_others_can_use():
    assert own_address("10.1.2.3") == "10.1.2.3"
    assert own_address("0.0.0.0") not in ("0.0.0.0", "")
    assert url_host("::1") == "[::1]"
    assert url_host("worker-0") == "worker-0"
