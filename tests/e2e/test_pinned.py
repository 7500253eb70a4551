"""What the picker's image is made of: the pinned packages alone, and nothing written to disk."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.manifests.rendered import ROOT
from tests.manifests.test_image import stages

UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def warmpath(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment like the image's: of the files that the recipe copies."""
    directory = tmp_path_factory.mktemp("image")
    source, wheels = directory / "source", directory / "wheels"
    source.mkdir()
    for value in stages()["wheel"].all("COPY"):
        *names, target = value.split()
        for name in names:
            found = ROOT / name
            if found.is_dir():
                shutil.copytree(found, source / target, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                place = source / (target if target not in (".", "./") else "")
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, place)
    builder = environment(directory / "builder", "build")
    uv("build", "--wheel", "--no-build-isolation", "--python", builder, "-o", wheels, source)
    made = environment(directory / "environment", "picker")
    (wheel,) = wheels.glob("*.whl")
    uv("pip", "install", "--no-deps", "--no-index", "--python", made, wheel)
    return made / "bin/warmpath"


def environment(path: Path, name: str) -> Path:
    uv("venv", "--python", sys.executable, path)
    pinned = ROOT / f"requirements/{name}.txt"
    uv(
        "pip",
        "install",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--python",
        path,
        "-r",
        pinned,
    )
    return path


def uv(*arguments: str | Path) -> None:
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write_nothing() -> None:
    """In the child: no file may have a byte, as on the image's file system."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@contextmanager
def running(warmpath: Path, *arguments: str) -> Iterator[re.Match[str]]:
    """A server; its line that says where it listens."""
    variables = {"HOME": "/nonexistent", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [warmpath, *arguments],
        cwd="/",
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=write_nothing,
    )
    assert process.stderr is not None
    try:
        log = []
        for line in process.stderr:
            log.append(line)
            if ready := re.search(r"Ready in .*", line):
                yield ready
                break
        else:
            raise AssertionError("".join(log))
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_pinned_picker_serves_a_simulated_worker_and_writes_nothing(warmpath: Path) -> None:
    ports = [f"--{name}-port=0" for name in ("grpc", "health", "http", "admin")]
    worker = ["work", "--simulate", "instant", "--port=0", "--kv-events-port=0"]
    with running(warmpath, *worker, "--kv-replay-port=0") as ready:
        address = re.search(r"http://([\d.:]+)", ready[0])
        assert address
        with running(warmpath, "pick", "--endpoint", address[1], *ports) as ready:
            health = re.search(r"health on (\d+)", ready[0])
            assert health
            with grpc.insecure_channel(f"127.0.0.1:{health[1]}") as channel:
                asked = HealthCheckRequest(service="readiness")
                answer = HealthStub(channel).Check(asked, timeout=30)
            assert answer.status == HealthCheckResponse.SERVING


def test_the_pinned_picker_makes_envoys_configuration(warmpath: Path, tmp_path: Path) -> None:
    (tmp_path / "warmpath.yaml").write_text("envoy: {profile: lean}\n")
    arguments = ["envoy", "-c", tmp_path / "warmpath.yaml", "-o", "json"]
    done = subprocess.run([warmpath, *arguments], capture_output=True, text=True, check=True)
    assert "static_resources" in json.loads(done.stdout)


def test_the_pinned_picker_has_all_of_its_extras(warmpath: Path) -> None:
    """Those that are imported only where they are asked for."""
    script = "import kubernetes_asyncio, redis, tokenizers, zmq, jinja2, huggingface_hub"
    subprocess.run([warmpath.with_name("python"), "-c", script], check=True)
