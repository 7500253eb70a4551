"""Reads GGUF files (ggml's model format, version 2 and 3): the header, then tensors one by one.

Not with gguf.GGUFReader: that makes several arrays for each string of the vocabulary (5 s for
SmolLM2's 98,000, against 0.1 s here) and believes every count that it reads. The dequantising is
the gguf package's. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from text.checked import Fields, ModelError

if TYPE_CHECKING:
    import torch

MAX_ENTRIES = 1 << 16  # metadata keys, or tensors
MAX_ELEMENTS = 1 << 22  # of one metadata array: the largest vocabularies have 2**18
MAX_STRING = 1 << 24  # bytes
MAX_DIMENSIONS = 4
CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: what fits the caches is fastest

# value type -> struct code
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Where one tensor lies and what it is."""

    shape: tuple[int, ...]  # outermost first, as in PyTorch
    type_id: int  # gguf.GGMLQuantizationType
    offset: int  # from the start of the file, in bytes
    num_bytes: int


class GgufFile(NamedTuple):
    path: Path
    metadata: Fields
    tensors: dict[str, GgufTensor]
    types: tuple[str, ...]  # names of the quantisations used, most bytes first


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file, every offset checked against its size; or ModelError."""
    try:
        with path.open("rb") as file, _map(file) as data:
            return _Header(path, data).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _map(file: BinaryIO) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelError(f"{file.name}: is empty") from error


class _Header:
    """A cursor over the mapped file; each read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def read(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise self.error(f"is not a GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.error(f"has GGUF version {version}; 2 and 3 are supported, little-endian")
        num_tensors = self.count("tensors", MAX_ENTRIES)
        num_keys = self.count("metadata keys", MAX_ENTRIES)
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.error(f"has two values of {key}")
            metadata[key] = self.value(key, self.scalar("I"))
        fields = Fields(str(self.path), metadata)
        tensors, types = self.tensors(num_tensors, fields)
        return GgufFile(self.path, fields, tensors, types)

    def tensors(
        self, num_tensors: int, metadata: Fields
    ) -> tuple[dict[str, GgufTensor], tuple[str, ...]]:
        alignment = metadata.integer("general.alignment", 32, high=1 << 20)
        raw = [self.tensor() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        weights: dict[str, int] = {}
        for name, shape, type_id, offset in raw:
            if name in tensors:
                raise self.error(f"has two tensors named {name}")
            type_name, num_bytes = self.storage(name, shape, type_id)
            if start + offset + num_bytes > len(self.data):
                raise self.error(f"ends within tensor {name}: the file is cut off or damaged")
            tensors[name] = GgufTensor(shape, type_id, start + offset, num_bytes)
            weights[type_name] = weights.get(type_name, 0) + num_bytes
        return tensors, tuple(sorted(weights, key=lambda name: -weights[name]))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name")
        num_dimensions = self.scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.error(f"gives {name} {num_dimensions} dimensions; 1 to 4 are possible")
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def storage(self, name: str, shape: tuple[int, ...], type_id: int) -> tuple[str, int]:
        """The type's name and the tensor's size in bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise self.error(f"stores {name} as type {type_id}, which is unknown") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for size in shape:
            elements *= size
        if elements < 1 or elements > 8 * len(self.data) or shape[-1] % block:
            raise self.error(f"gives {name} the impossible shape {shape} of {kind.name}")
        return kind.name, elements // block * block_bytes

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


def read_tensor(
    file: BinaryIO, tensor: GgufTensor, dtype: torch.dtype, progress: Callable[[int], None]
) -> torch.Tensor:
    """One tensor in `dtype` on the CPU; `progress` is told of bytes as they are read.

    A few megabytes are dequantised at a time, so only the result takes much memory.
    """
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    result = torch.empty(tensor.shape, dtype=dtype)
    rows = result.view(-1, tensor.shape[-1])
    row_bytes = tensor.num_bytes // len(rows)
    step = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
    file.seek(tensor.offset)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        raw = np.fromfile(file, dtype=np.uint8, count=len(part) * row_bytes)
        if len(raw) != len(part) * row_bytes:
            raise ModelError(f"{file.name}: became shorter while it was read")
        # As one long row: blocks are independent, and the package is slow at short rows.
        with np.errstate(all="ignore"):  # damaged weights may be no numbers
            values = dequantize(raw.reshape(1, -1), GGMLQuantizationType(tensor.type_id))
        part.copy_(torch.from_numpy(values).view(part.shape))
        progress(len(raw))
    return result


def can_dequantize(type_id: int) -> bool:
    """Whether the gguf package can turn this type into numbers."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(type_id)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
