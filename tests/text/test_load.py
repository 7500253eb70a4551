"""A tokenizer by whatever its user calls the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.test_store import cache, hub  # noqa: F401  # fixtures
from tests.worker.tiny import write_gguf_model, write_hf_model
from text.byte_tokenizer import ByteTokenizer
from text.load import load_tokenizer
from text.tokenizer import Tokenizer

TEXT = "the quick <|im_end|> fox is 100"


def ids(name: str | Path) -> list[int]:
    return load_tokenizer(str(name)).encode(TEXT)


def test_each_form_of_a_model_gives_its_tokenizer(tmp_path, cache):  # noqa: F811
    write_hf_model(tmp_path / "hf")
    write_gguf_model(tmp_path / "m.gguf")
    home = cache / "org--name"
    home.mkdir(parents=True)
    write_gguf_model(home / "pulled.gguf")
    wanted = ids(tmp_path / "hf")
    assert len(wanted) > 3
    assert ids(tmp_path / "m.gguf") == ids("org/name") == ids(home) == wanted


def test_that_of_simulated_workers_has_no_file():
    assert isinstance(load_tokenizer("simulated"), ByteTokenizer)


def test_weights_are_not_needed(tmp_path):
    write_hf_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "there is no model at"),
        ("nowhere", "there is no model 'nowhere' here: pull it"),
        ("empty", "holds no tokenizer.json"),
        ("two", "holds 2 GGUF files"),
        ("file", "is not a GGUF file"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for file in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / file).write_bytes(b"GGUF")
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=words) as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


def load_by_itself(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since the hub's client reads its settings when it is imported."""
    code = (
        "import sys\nfrom text.load import load_tokenizer\n"
        f"print(load_tokenizer({name!r}).encode({TEXT!r}))\n"
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HF_HOME": str(home)},
    )


def test_of_a_repository_of_the_hub_only_the_tokenizer_is_fetched(hub, tmp_path):  # noqa: F811
    write_hf_model(tmp_path / "here")
    result = load_by_itself("org/name", tmp_path / "hub")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{ids(tmp_path / 'here')}\n"
    fetched = {path.name for path in (tmp_path / "hub").rglob("*") if path.suffix}
    assert "tokenizer.json" in fetched
    assert not any(name.endswith(".safetensors") for name in fetched)


def test_a_hub_that_lacks_it_is_told_in_one_line(hub, tmp_path):  # noqa: F811
    result = load_by_itself("org/other", tmp_path / "hub")
    assert "'org/other'" in result.stderr.splitlines()[-1]
    assert "StoreError" in result.stderr.splitlines()[-1]
