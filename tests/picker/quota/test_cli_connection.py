"""Whom `warmpath quota` talks to: stores, servers, shells, and people who watch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from picker.cli import main
from picker.commands.quota.output import amount
from tests.picker.quota.admin_process import admin_service
from tests.picker.quota.conftest import redis_url
from tests.picker.quota.redis_server import free_port
from tests.picker.quota.terminal import Terminal

ALICE = "tenant/alice"
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/quota.db"


def quota(*words: str, code: int = 0, **env: str) -> str:
    """Everything that a command without flags for its store prints."""
    result = CliRunner().invoke(main, ["quota", *words], env=env)
    assert result.exit_code == code, result.output
    return result.output


def test_the_store_is_named_by_flag_environment_or_file(url: str, tmp_path: Path) -> None:
    other = f"sqlite://{tmp_path}/other.db"
    file = tmp_path / "warmpath.yaml"
    file.write_text(f"quota: {{store: '{url}', zone: Europe/Berlin}}\n")
    quota("-c", str(file), "set", ALICE, "requests=5/day")
    assert ALICE in quota("get", WARMPATH_QUOTA_STORE=url)
    (limit,) = json.loads(quota("--store", url, "get", "-o", "json"))
    assert limit["zone"] == "Europe/Berlin", "whoever looks has the days of whoever set it"
    quota("-c", str(file), "set", ALICE, "requests=5/day", "--zone", "UTC")
    (limit,) = json.loads(quota("-c", str(file), "get", "-o", "json"))
    assert limit["zone"] == ""
    quota("-c", str(file), "set", "tenant/bob", "requests=5/day", WARMPATH_QUOTA_STORE=other)
    assert "tenant/bob" in quota("--store", other, "get", WARMPATH_QUOTA_STORE=url)
    file.write_text("quota: {stor: x}\n")
    assert "did you mean 'store'?" in quota("-c", str(file), "get", code=2)


def test_a_store_in_memory_is_nobody_elses() -> None:
    assert "--server" in quota("--store", "memory:", "get", code=2)


@pytest.mark.parametrize("store", ["mysql://here", "sqlite:///no/such/directory/quota.db"])
def test_what_is_no_store_is_a_usage_error(store: str) -> None:
    quota("--store", store, "set", ALICE, "requests=5/day", code=2)


def test_reading_makes_no_store(url: str, tmp_path: Path) -> None:
    assert "there is no store" in quota("--store", url, "get", code=5)
    assert not list(tmp_path.iterdir())


def test_a_store_or_server_that_is_away_has_an_exit_code_of_its_own() -> None:
    port = free_port()
    quota("--store", f"redis://127.0.0.1:{port}/0", "get", code=5)
    away = ("--server", f"127.0.0.1:{port}")
    assert "does not answer" in quota(*away, "get", code=5, WARMPATH_QUOTA_TOKEN=TOKEN)


def test_a_server_wants_a_token_that_it_knows(url: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# who administers\nada {TOKEN}\n\n")
    own = tmp_path / "token"
    with admin_service(url, str(tokens)) as server:
        at = ("--server", server)
        assert "WARMPATH_QUOTA_TOKEN" in quota(*at, "get", code=2)
        assert "not known" in quota(*at, "get", code=1, WARMPATH_QUOTA_TOKEN=TOKEN + "x")
        quota(*at, "set", ALICE, "requests=5/day", WARMPATH_QUOTA_TOKEN=TOKEN)
        own.write_text(f"{TOKEN}\n")
        assert ALICE in quota(*at, "--token-file", str(own), "get")
        audit = quota(*at, "--actor", "eve", "audit", "-o", "csv", WARMPATH_QUOTA_TOKEN=TOKEN)
        assert ",ada,set," in audit  # whoever they say they are
        tokens.write_text(f"ada another-{TOKEN}\n")
        quota(*at, "get", code=1, WARMPATH_QUOTA_TOKEN=TOKEN)  # from the next call on
        quota(*at, "get", WARMPATH_QUOTA_TOKEN=f"another-{TOKEN}")
        tokens.write_text("ada short\n")
        told = quota(*at, "get", code=1, WARMPATH_QUOTA_TOKEN=f"another-{TOKEN}")
        assert "the tokens here cannot be read" in told
        assert "--store" in quota(*at, "store", "migrate", "--to", url, code=2)


def test_a_server_is_asked_over_tls(url: str, tmp_path: Path) -> None:
    tokens, certificate, key = (str(tmp_path / name) for name in ("tokens", "cert.pem", "key.pem"))
    Path(tokens).write_text(f"ada {TOKEN}\n")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True)
    with admin_service(url, tokens, certificate, key) as server:
        at = ("--server", server)
        quota(*at, "--ca", certificate, "set", ALICE, "requests=5/day", WARMPATH_QUOTA_TOKEN=TOKEN)
        quota(*at, "get", code=5, WARMPATH_QUOTA_TOKEN=TOKEN)


def test_everything_moves_to_another_store(url: str) -> None:
    here = Terminal(url, ("--store", url))
    target = redis_url()
    there = Terminal(target, ("--store", target))
    here("set", ALICE, "total-tokens=1k/month")
    here.served(ALICE, 400, 100)
    here.running(ALICE, 50)
    told = here("store", "migrate", "--to", target)
    assert "copied 1 subjects" in told.stderr and "1 reservations" in told.stderr
    assert there("export").stdout == here("export").stdout
    assert there.data("get")[0]["used"] == 550
    assert there.data("audit", "-n", "1")[0]["action"] == "set"
    assert there.data("usage", "--since", "1d") == here.data("usage", "--since", "1d")
    there("store", "verify")
    told = here("store", "migrate", "--to", target, code=1)
    assert f"the store at --to is not empty: it has {ALICE}" in told.stderr
    assert "that is to be copied" in here("store", "migrate", "--to", url, code=2).stderr


@contextmanager
def watching(url: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "picker.cli", "quota", "--store", url, *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_who_watches_sees_each_change_until_they_have_seen_enough(url: str) -> None:
    terminal = Terminal(url, ("--store", url))
    terminal("set", ALICE, "total-tokens=1k/month")
    with watching(url, "get", "--watch", "-o", "csv") as process:
        assert process.stdout
        assert process.stdout.readline().startswith("subject,")
        assert process.stdout.readline().startswith("tenant/alice,,total-tokens/month,,1000,0,")
        terminal("set", ALICE, "total-tokens=2k/month")
        while not (line := process.stdout.readline()).startswith("tenant/alice"):
            assert line.startswith("subject,")
        assert ",2000,0," in line
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def completed(words: str, *flags: str, **env: str) -> list[str]:
    """What Tab offers in bash after `warmpath quota FLAGS WORDS`."""
    line = " ".join(["warmpath", "quota", *flags, words])
    program = "from picker.cli import main; main(prog_name='warmpath')"
    env |= {"_WARMPATH_COMPLETE": "bash_complete", "COMP_WORDS": line}
    env["COMP_CWORD"] = str(len(line.split(" ")) - 1)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return [each.partition(",")[2] for each in ended.stdout.split()]


def test_a_shell_completes_commands_and_names_in_the_store(url: str) -> None:
    Terminal(url, ("--store", url))("set", ALICE, "requests=5/day")
    assert completed("de") == ["describe", "denials"]
    assert completed("describe ten", WARMPATH_QUOTA_STORE=url) == [ALICE]
    assert completed("keys list t", "--store", url) == [ALICE]
    assert completed("get tenant/b", "--store", url) == []
    assert completed("get t", "--store", "redis://127.0.0.1:1/0") == []
    assert completed("get -o ", "--store", url)[:2] == ["table", "wide"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(shell: str) -> None:
    assert "_WARMPATH_COMPLETE" in quota("completion", shell)


def test_where_the_options_of_a_store_stand_is_told() -> None:
    for option in ("--store", "--server", "-c"):
        told = quota("get", option, "x", code=2)
        assert f"{option} goes before the command: warmpath quota {option} ... get" in told
    assert "Did you mean" in quota("get", "--sortt", "used", code=2)


def test_fairness_asks_the_picker_of_the_configuration(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "warmpath.yaml"
    file.write_text(f"listen: {{admin: {port}}}\n")
    assert f"127.0.0.1:{port}" in quota("-c", str(file), "fairness", code=5)
    other = f"http://127.0.0.1:{free_port()}"
    assert other in quota("-c", str(file), "fairness", "--admin", other, code=5)


def test_check_takes_an_answer_to_be_as_long_as_a_picker_would(url: str, tmp_path: Path) -> None:
    file = tmp_path / "warmpath.yaml"
    file.write_text(f"quota: {{store: '{url}', expectedOutput: 100}}\n")
    here = Terminal(url, ("--store", url))
    here("set", ALICE, "output-tokens=600/month")
    here.served(ALICE, 5, 200)
    here("check", ALICE, "--input", "5", code=3)
    here("check", ALICE, "--input", "5", "--max-output", "400")
    quota("-c", str(file), "check", ALICE, "--input", "5")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999_999_972, "999.9M"),
        (1_728_004, "1.728M"),
        (-999_999_972, "-999.9M"),
        (99_951, "99.951k"),
        (123_456_789_012_345, "123.4T"),
        (0, "0"),
    ],
)
def test_tables_shorten_long_numbers_towards_zero(number: int, text: str) -> None:
    assert amount(number) == text
