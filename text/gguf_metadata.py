"""Reads the metadata of GGUF files (ggml's model format, version 2 and 3).

Not with gguf.GGUFReader: that makes several arrays for each string of the vocabulary (5 s for
SmolLM2's 98,000, against 0.1 s here) and believes every count that it reads.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from text.checked import Fields, ModelError

MAX_ENTRIES = 1 << 16  # metadata keys, or tensors
MAX_ELEMENTS = 1 << 22  # of one metadata array: the largest vocabularies have 2**18
MAX_STRING = 1 << 24  # bytes

# value type -> struct code
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> Fields:
    """The metadata of a GGUF file, or ModelError."""
    with opened(path) as header:
        return header.metadata()


@contextmanager
def opened(path: Path) -> Iterator[GgufHeader]:
    """A cursor at the beginning of a GGUF file; what cannot be read is a ModelError."""
    try:
        with path.open("rb") as file, _map(file) as data:
            yield GgufHeader(path, data)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _map(file: BinaryIO) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelError(f"{file.name}: is empty") from error


class GgufHeader:
    """A cursor over the mapped file; each read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.num_tensors = 0  # as the file claims; known once the metadata is read

    def metadata(self) -> Fields:
        """All keys and values; the cursor is at the first tensor's description then."""
        if self.data[:4] != b"GGUF":
            raise self.error(f"is not a GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.error(f"has GGUF version {version}; 2 and 3 are supported, little-endian")
        self.num_tensors = self.count("tensors", MAX_ENTRIES)
        num_keys = self.count("metadata keys", MAX_ENTRIES)
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.error(f"has two values of {key}")
            metadata[key] = self.value(key, self.scalar("I"))
        return Fields(str(self.path), metadata)

    def value(self, key: str, value_type: int) -> object:
        if value_type == _STRING:
            return self.string(key)
        if value_type != _ARRAY:
            return self.scalar(self.code(key, value_type))
        item_type = self.scalar("I")
        length = self.count(f"elements of {key}", MAX_ELEMENTS)
        if item_type == _STRING:
            return self.strings(key, length)
        code = f"<{length}{self.code(key, item_type)}"
        return list(struct.unpack_from(code, self.data, self.take(struct.calcsize(code))))

    def code(self, key: str, value_type: int) -> str:
        if value_type not in _SCALARS:
            raise self.error(f"gives {key} the value type {value_type}, which is unknown")
        return _SCALARS[value_type]

    def strings(self, key: str, length: int) -> list[str]:
        """Many strings, in one tight loop: vocabularies are most of a header."""
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(length):
                (size,) = unpack(data, at)
                at += 8
                raw = data[at : at + size] if size <= MAX_STRING else b""
                if len(raw) != size:
                    raise self.cut()
                strings.append(raw.decode())
                at += size
        except struct.error:
            raise self.cut() from None
        except UnicodeDecodeError:
            raise self.error(f"has a string that is not UTF-8 in {key}") from None
        self.at = at
        return strings

    def string(self, what: str) -> str:
        return self.strings(what, 1)[0]

    def scalar(self, code: str) -> Any:
        code = "<" + code
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def count(self, what: str, limit: int) -> int:
        value: int = self.scalar("Q")
        if value > min(limit, len(self.data)):
            raise self.error(f"claims {value} {what}, more than it can hold: it is damaged")
        return value

    def take(self, num_bytes: int) -> int:
        """Moves past the next bytes and gives where they start."""
        at = self.at
        if num_bytes > len(self.data) - at:
            raise self.cut()
        self.at = at + num_bytes
        return at

    def cut(self) -> ModelError:
        return self.error("ends within its header: the file is cut off or damaged")

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text}")
