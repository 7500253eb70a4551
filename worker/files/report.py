"""What one model is: read from its files, for `warmpath model inspect`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from worker.files.architecture import tensor_shapes
from worker.loader import open_model

_KV_BYTES = 2  # a number in the KV cache, where the worker runs in 16 bits


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of a model."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Sizes are in bytes; the KV cache's are for 16-bit numbers, and twice that for 32-bit."""

    path: str
    source: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    quantization: str
    weight_bytes: int
    disk_bytes: int
    kv_bytes_per_token: int
    tokens: int  # that the tokenizer knows
    chat_template: bool
    files: list[FileReport]


def report(path: Path) -> ModelReport:
    """Reads a model's headers and tokenizer, and all of its files for their digests."""
    checkpoint = open_model(path)
    tokenizer = checkpoint.tokenizer()
    config = checkpoint.config
    files = [FileReport(file.name, file.stat().st_size, sha256(file)) for file in files_of(path)]
    return ModelReport(
        path=str(path),
        source=checkpoint.source,
        architecture=config.architecture,
        parameters=sum(math.prod(shape) for shape in tensor_shapes(config).values()),
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context=config.max_position_embeddings,
        quantization=checkpoint.quantization,
        weight_bytes=checkpoint.num_bytes,
        disk_bytes=sum(file.num_bytes for file in files),
        kv_bytes_per_token=config.kv_elements_per_token * _KV_BYTES,
        tokens=tokenizer.vocab_size,
        chat_template=tokenizer.has_chat_template,
        files=files,
    )


def files_of(path: Path) -> list[Path]:
    """The files of a model: all in its directory but hidden ones."""
    if path.is_file():
        return [path]
    files = (file for file in path.iterdir() if file.is_file() and file.name[0] != ".")
    return sorted(files)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
