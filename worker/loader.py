"""Opens a model: its configuration, its tokenizer and its tensors, one at a time.

Nothing in a file is believed before it is checked: whatever is wrong with one is a ModelError
of one line. No pickle is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from text.checked import Fields, ModelError, one_line, read_json
from text.tokenizer import Tokenizer
from worker.config import ModelConfig
from worker.files.architecture import config_from_gguf, config_from_hf, tensor_shapes
from worker.files.gguf_file import GgufFile, GgufTensor, can_dequantize, read_gguf, read_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "ModelError", "open_model"]

Progress = Callable[[int], None]


class Checkpoint(Protocol):
    """A model on disk, opened and checked; its weights are not read yet."""

    config: ModelConfig
    num_bytes: int  # of all tensors, as stored
    source: str  # "gguf" or "safetensors"
    quantization: str  # how most of it is stored, e.g. Q4_1 or BF16

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ModelError if it is missing, damaged or of an unknown kind."""

    def tensors(
        self, dtype: torch.dtype, device: torch.device | str, progress: Progress
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor by its Hugging Face name; `progress` is told of bytes as they are read.

        The progress adds up to `num_bytes`. One tensor at a time is in memory, besides those
        that the caller keeps.
        """


def open_model(path: Path) -> Checkpoint:
    """Opens a Hugging Face directory, a .gguf file, or a directory with one .gguf file."""
    if path.is_file():
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such model file or directory")
    if (path / "config.json").exists():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelError(f"{path}: holds {len(files)} GGUF files; name one of them: {names}")
    raise ModelError(f"{path}: holds neither config.json nor a .gguf file")


class SafetensorsCheckpoint:
    source = "safetensors"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = config_from_hf(read_json(directory / "config.json"))
        self._files = _tensor_files(directory)
        self._shapes = tensor_shapes(self.config)
        found: dict[str, tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        self._locations: dict[str, Path] = {}
        for file in self._files:
            for name, dtype, shape in _list_tensors(file):
                if self._is_spare(name):
                    continue
                if name in found:
                    raise ModelError(f"{file}: repeats the tensor {name}")
                found[name], self._locations[name] = shape, file
                sizes[dtype] = sizes.get(dtype, 0) + _DTYPE_BYTES[dtype] * _product(shape)
        _compare(directory, self._shapes, found)
        self.num_bytes = sum(sizes.values())
        self.quantization = max(sizes, key=lambda dtype: sizes[dtype])

    def tokenizer(self) -> Tokenizer:
        return _fitting(Tokenizer.from_directory(self.directory), self.config, self.directory)

    def tensors(
        self, dtype: torch.dtype, device: torch.device | str, progress: Progress
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import SafetensorError, safe_open

        for file in self._files:
            names = [name for name, location in self._locations.items() if location == file]
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in names:
                        tensor = opened.get_tensor(name)
                        progress(tensor.nbytes)
                        # A copy even where the type fits: a view would keep the file mapped.
                        yield name, tensor.to(device=device, dtype=dtype, copy=True)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: cannot be read: {one_line(error)}") from error

    def _is_spare(self, name: str) -> bool:
        """Whether older exports carry this tensor though it can be computed or is shared."""
        return name.endswith(".rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        )


class GgufCheckpoint:
    source = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = read_gguf(path)
        if self._file.metadata.values.get("split.count", 1) != 1:
            raise ModelError(f"{path}: is one of several parts; join them with llama-gguf-split")
        self._tensors = {
            _hf_name(name): tensor
            for name, tensor in self._file.tensors.items()
            if name != _ROPE_FACTORS
        }
        embeddings = self._tensors.get("model.embed_tokens.weight")
        if embeddings is None:
            raise ModelError(f"{path}: has no tensor token_embd.weight: it is not a whole model")
        self.config = config_from_gguf(
            self._file.metadata,
            vocab_size=embeddings.shape[0],
            tied="lm_head.weight" not in self._tensors,
            rope_factors=_rope_factors(self._file),
        )
        found = {name: tensor.shape for name, tensor in self._tensors.items()}
        _compare(path, tensor_shapes(self.config), found)
        for type_id in {tensor.type_id for tensor in self._tensors.values()}:
            if not can_dequantize(type_id):
                raise ModelError(f"{path}: has tensors of a type that cannot be dequantised")
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())
        self.quantization = self._file.types[0]

    def tokenizer(self) -> Tokenizer:
        return _fitting(Tokenizer.from_gguf(self._file.metadata), self.config, self.path)

    def tensors(
        self, dtype: torch.dtype, device: torch.device | str, progress: Progress
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with self.path.open("rb") as file:
                for name, stored in self._tensors.items():
                    tensor = read_tensor(file, stored, dtype, progress)
                    yield name, self._unpermuted(name, tensor).to(device)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _unpermuted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undoes the reordering of q and k rows that llama.cpp's converter does for `llama`.

        Its rotary embedding pairs neighbouring rows, Hugging Face's pairs row i of a head with
        row i + head_dim / 2.
        """
        if self._file.metadata.values["general.architecture"] != "llama":
            return tensor
        if name.endswith("self_attn.q_proj.weight"):
            heads = self.config.num_heads
        elif name.endswith("self_attn.k_proj.weight"):
            heads = self.config.num_kv_heads
        else:
            return tensor
        pairs = tensor.view(heads, self.config.head_dim // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)


_ROPE_FACTORS = "rope_freqs.weight"
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; others stay as they are."""
    *prefix, stem, suffix = ["", *name.split(".")]
    layer = f"model.layers.{prefix[2]}." if prefix[1:2] == ["blk"] and len(prefix) == 3 else ""
    return f"{layer}{_GGUF_NAMES[stem]}.{suffix}" if stem in _GGUF_NAMES else name


def _rope_factors(file: GgufFile) -> list[float]:
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return []
    import torch

    _check_rope_factors(file.path, tensor)
    with file.path.open("rb") as opened:
        values = read_tensor(opened, tensor, torch.float32, lambda _: None)
    factors: list[float] = values.tolist()
    return factors


def _check_rope_factors(path: Path, tensor: GgufTensor) -> None:
    if len(tensor.shape) != 1 or tensor.shape[0] > 1024 or tensor.type_id != 0:
        raise ModelError(f"{path}: {_ROPE_FACTORS} must be a short list of 32-bit floats")


_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def _tensor_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _shards(directory, read_json(index, max_bytes=256 << 20))
    file = directory / "model.safetensors"
    if file.is_file():
        return [file]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ModelError(
            f"{directory}: holds pickled weights only, which can run code when they are read; "
            "use a safetensors or GGUF export of the model"
        )
    raise ModelError(f"{directory}: holds no model.safetensors and no model.safetensors.index.json")


def _shards(directory: Path, index: Fields) -> list[Path]:
    names = {str(name) for name in index.table("weight_map").values.values()}
    files = []
    for name in sorted(names):
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ModelError(f"{index.source}: the shard {name[:80]!r} is not a plain file name")
        if not (directory / name).is_file():
            raise ModelError(f"{directory}: the shard {name} is missing; pull the model again")
        files.append(directory / name)
    if not files:
        raise ModelError(f"{index.source}: names no shards")
    return files


def _list_tensors(file: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor, from the header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _DTYPE_BYTES:
                    raise ModelError(
                        f"{file}: stores {name[:80]} as {dtype}; "
                        f"supported are {', '.join(_DTYPE_BYTES)}"
                    )
                yield name, dtype, tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: is no valid safetensors file: {one_line(error)}") from error


def _compare(
    path: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    """Refuses a model whose tensors are not exactly those its configuration asks for."""
    for name, shape in wanted.items():
        if name not in found:
            missing = len(wanted.keys() - found.keys())
            raise ModelError(f"{path}: lacks the tensor {name} ({missing} are missing in all)")
        if found[name] != shape:
            raise ModelError(f"{path}: {name} has shape {found[name]}, but must have {shape}")
    for name in found:
        if name not in wanted:
            raise ModelError(f"{path}: has the tensor {name[:80]!r}, which no such model has")


def _fitting(tokenizer: Tokenizer, config: ModelConfig, path: Path) -> Tokenizer:
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: its tokenizer knows {tokenizer.vocab_size} tokens, "
            f"its model only {config.vocab_size}"
        )
    return tokenizer


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
