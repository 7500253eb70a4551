"""Reads GGUF files: where each tensor lies, then tensors one by one.

The header's metadata is read by text.gguf_metadata; the dequantising is the gguf package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from text.checked import Fields, ModelError
from text.gguf_metadata import GgufHeader, opened

if TYPE_CHECKING:
    import torch

MAX_DIMENSIONS = 4
CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: what fits the caches is fastest


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
    with opened(path) as header:
        metadata = header.metadata()
        tensors, types = _tensors(header, metadata)
        return GgufFile(path, metadata, tensors, types)


def _tensors(header: GgufHeader, metadata: Fields) -> tuple[dict[str, GgufTensor], tuple[str, ...]]:
    alignment = metadata.integer("general.alignment", 32, high=1 << 20)
    raw = [_tensor(header) for _ in range(header.num_tensors)]
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    weights: dict[str, int] = {}
    for name, shape, type_id, offset in raw:
        if name in tensors:
            raise header.error(f"has two tensors named {name}")
        type_name, num_bytes = _storage(header, name, shape, type_id)
        if start + offset + num_bytes > len(header.data):
            raise header.error(f"ends within tensor {name}: the file is cut off or damaged")
        tensors[name] = GgufTensor(shape, type_id, start + offset, num_bytes)
        weights[type_name] = weights.get(type_name, 0) + num_bytes
    return tensors, tuple(sorted(weights, key=lambda name: -weights[name]))


def _tensor(header: GgufHeader) -> tuple[str, tuple[int, ...], int, int]:
    name = header.string("a tensor's name")
    num_dimensions = header.scalar("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise header.error(f"gives {name} {num_dimensions} dimensions; 1 to 4 are possible")
    shape = tuple(header.scalar("Q") for _ in range(num_dimensions))[::-1]
    return name, shape, header.scalar("I"), header.scalar("Q")


def _storage(
    header: GgufHeader, name: str, shape: tuple[int, ...], type_id: int
) -> tuple[str, int]:
    """The type's name and the tensor's size in bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise header.error(f"stores {name} as type {type_id}, which is unknown") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = 1
    for size in shape:
        elements *= size
    if elements < 1 or elements > 8 * len(header.data) or shape[-1] % block:
        raise header.error(f"gives {name} the impossible shape {shape} of {kind.name}")
    return kind.name, elements // block * block_bytes


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
