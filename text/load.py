"""A model's tokenizer, by whatever its user calls the model."""

from __future__ import annotations

from pathlib import Path

from text.byte_tokenizer import ByteTokenizer
from text.checked import ModelError, one_line
from text.gguf_metadata import read_metadata
from text.models import StoreError, is_name, resolve
from text.tokenizer import Tokenizer

SIMULATED = "simulated"
# All that a tokenizer is made of in a repository of the hub.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def load_tokenizer(name: str) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a model on disk, or of a repository of the Hugging Face hub.

    Args:
        name: a directory, a GGUF file, a model that was pulled, a repository's name (its tokenizer
            is downloaded), or `simulated` for that of simulated workers.

    Raises:
        ValueError: there is none, or it cannot be used; in one line.
    """
    if name == SIMULATED:
        return ByteTokenizer()
    try:
        path = resolve(name)
    except StoreError:
        if not is_name(name) or "/" not in name:
            raise
        path = _downloaded(name)
    return _read(path)


def _read(path: Path) -> Tokenizer:
    if path.is_file():
        return Tokenizer.from_gguf(read_metadata(path))
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "tokenizer.json").is_file():
        if len(files) > 1:
            raise ModelError(f"{path}: holds {len(files)} GGUF files; give the path of one")
        return Tokenizer.from_gguf(read_metadata(files[0]))
    return Tokenizer.from_directory(path)


def _downloaded(name: str) -> Path:
    """The directory in the hub's own cache; without a network, what is there from before."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the client's, its transport's, and the file system's
        raise StoreError(
            f"there is no model {name!r} here, and its tokenizer cannot be had from the hub "
            f"{constants.ENDPOINT}: {one_line(error)}"
        ) from error
