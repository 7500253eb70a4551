"""`warmpath model` as a user calls it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.worker.test_store import cache, hub, index  # noqa: F401 - fixtures
from tests.worker.tiny import write_gguf_model
from worker.files.pull import BUNDLED
from worker.model_cli import model


def call(*arguments: str) -> Result:
    return CliRunner().invoke(model, arguments)


def test_pull_tells_where_the_model_is_and_its_digest(index, cache):  # noqa: F811
    result = call("pull", "tiny")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"tiny pulled to {cache / 'tiny'}"
    assert BUNDLED["tiny"].sha256 in result.stdout
    assert "pulling tiny: 0 B of" in result.stderr
    again = call("pull", "tiny")
    assert again.exit_code == 0
    assert again.stdout.splitlines()[0] == f"tiny is already in {cache / 'tiny'}"
    assert again.stderr == ""


def test_answers_can_be_json(index, cache):  # noqa: F811
    pulled = json.loads(call("pull", "tiny", "-o", "json").stdout)
    assert pulled["pulled"] is True
    assert pulled["files"][0]["sha256"] == BUNDLED["tiny"].sha256
    (listed,) = json.loads(call("list", "-o", "json").stdout)
    assert listed["name"] == "tiny"
    assert listed["disk_bytes"] == pulled["files"][0]["num_bytes"]
    inspected = json.loads(call("inspect", "tiny", "-o", "json").stdout)
    assert inspected["layers"] == 2
    assert inspected["path"] == listed["path"] == pulled["path"]


def test_list_is_a_table(index, cache):  # noqa: F811
    assert "no models in" in call("list").stdout
    call("pull", "tiny")
    heading, row = call("list").stdout.splitlines()
    assert heading.split() == ["name", "size", "path"]
    assert row.split()[0] == "tiny"


def test_inspect_shows_a_file(tmp_path):
    write_gguf_model(tmp_path / "m.gguf", quantization="Q8_0")
    result = call("inspect", str(tmp_path / "m.gguf"))
    assert result.exit_code == 0
    for text in ("LlamaForCausalLM", "Q8_0 in gguf", "320 tokens", "4, 2 for KV, of 16"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pull", "nothing"], 1, "Error: 'nothing' is no model to pull"),
        (["inspect", "nothing"], 1, "`warmpath model pull nothing`"),
        (["inspect", "/"], 1, "neither config.json nor"),
        (["pull"], 2, "Missing argument"),
        (["list", "-o", "xml"], 2, "'xml'"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_errors_are_one_line_with_the_right_code(cache, arguments, code, message):  # noqa: F811
    result = call(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output
    if code == 1:
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["pull"], ["list"], ["inspect"]])
def test_help_has_an_example(command):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert f"warmpath model {(command or ['pull'])[0]}" in result.stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from worker.model_cli import model\n"
        "try: model(['pull', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'gguf', 'safetensors', 'tokenizers', 'rich', 'jinja2'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_on_a_terminal_there_is_a_bar(hub, tmp_path):  # noqa: F811
    hub["model.safetensors"] = bytes(3_000_000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "picker.cli", "model", "pull", "org/name"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = read_all(ours)
    assert process.wait(timeout=60) == 0
    assert "pulling org/name" in shown
    assert "MB" in shown


def read_all(descriptor: int) -> str:
    data = b""
    try:
        while chunk := os.read(descriptor, 65536):
            data += chunk
    except OSError:  # the other end was closed
        pass
    with os.fdopen(descriptor):
        return data.decode("utf-8", "replace")


def test_the_module_is_reached_as_warmpath_model():
    script = Path(sys.executable).with_name("warmpath")
    result = subprocess.run(
        [script, "model", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Pull, list and inspect" in result.stdout
