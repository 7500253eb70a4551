"""Tiny random models on disk, in each form that a worker reads: the same weights in all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "the café in Zürich is where the others were, they said: 100 200 300",
]


def tiny_config(
    arch: str = "llama",
    *,
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    rope_scaling: RopeScaling | None = None,
) -> ModelConfig:
    """A model of four query heads and two key-value heads; Qwen 3's are wider than the rest."""
    return ModelConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 2 if arch == "qwen3" else hidden_size // 4,
        max_position_embeddings=512,
        rms_norm_eps=2**-16,  # the same number in the 32 bits of a GGUF file
        rope_theta=10000.0,
        rope_scaling=rope_scaling,
        tie_word_embeddings=tied,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights by their Hugging Face names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (query, hidden),
            layer + "self_attn.k_proj.weight": (key, hidden),
            layer + "self_attn.v_proj.weight": (key, hidden),
            layer + "self_attn.o_proj.weight": (hidden, query),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        if config.qkv_bias:
            shapes[layer + "self_attn.q_proj.bias"] = (query,)
            shapes[layer + "self_attn.k_proj.bias"] = (key,)
            shapes[layer + "self_attn.v_proj.bias"] = (key,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)
        for name, shape in shapes.items()
    }


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens, trained on three sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_hf_model(
    directory: Path,
    *,
    arch: str = "llama",
    sharded: bool = False,
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    rope_scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    transformers: int = 4,
    changes: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """A Hugging Face directory, as that major version of transformers writes it.

    `changes` are made to config.json; a value of None takes a key out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(
        arch,
        tied=tied,
        hidden_size=hidden_size,
        num_layers=num_layers,
        rope_scaling=rope_scaling,
    )
    written = _hf_config(config, transformers) | dict(changes or {})
    _write_json(
        directory / "config.json",
        {key: value for key, value in written.items() if value is not None},
    )
    weights = {name: value.to(dtype) for name, value in tiny_weights(config, seed).items()}
    if sharded:
        _write_shards(directory, weights)
    else:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_hf_tokenizer(directory)
    return config


def write_hf_tokenizer(directory: Path) -> None:
    """tokenizer.json and the files about special tokens and chats."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>", "lstrip": False},
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(directory / "generation_config.json", {"eos_token_id": [2, 0]})


def write_gguf_model(
    path: Path,
    *,
    arch: str = "llama",
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    rope_scaling: RopeScaling | None = None,
    quantization: str = "F32",
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """A GGUF file as llama.cpp's converter writes it; vectors stay in 32-bit floats.

    Types that cannot be made here get random bytes. `changes` are metadata, written last.
    """
    config = tiny_config(
        arch,
        tied=tied,
        hidden_size=hidden_size,
        num_layers=num_layers,
        rope_scaling=rope_scaling,
    )
    name = "llama" if arch == "mistral" else arch
    writer = GGUFWriter(path, name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_gguf_tokenizer(writer)
    for key, value in (changes or {}).items():
        _add_value(writer, key, value)
    if rope_scaling:
        writer.add_tensor("rope_freqs.weight", rope_factors(config, rope_scaling))
    for hf_name, value in tiny_weights(config, seed).items():
        if name == "llama":
            value = _permuted(hf_name, value, config)
        _add_tensor(writer, gguf_name(hf_name), value.numpy(), quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def rope_factors(config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by (transformers, modeling_rope_utils)."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    wavelengths = 2 * np.pi * config.rope_theta**exponents
    original = scaling.original_max_position_embeddings
    smooth = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    factors = 1 / ((1 - smooth) / scaling.factor + smooth)
    factors = np.where(wavelengths < original / scaling.high_freq_factor, 1.0, factors)
    factors = np.where(wavelengths > original / scaling.low_freq_factor, scaling.factor, factors)
    return factors.astype(np.float32)


_GGUF_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem, _, suffix = hf_name.rpartition(".")
    if stem in _GGUF_STEMS:
        return f"{_GGUF_STEMS[stem]}.{suffix}"
    _, _, index, stem = stem.split(".", 3)
    return f"blk.{index}.{_GGUF_STEMS[stem]}.{suffix}"


def _permuted(name: str, value: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The order of rows in llama.cpp's files (convert_hf_to_gguf.py, LlamaModel.permute)."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return value
    halves = value.reshape(heads, 2, config.head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(value.shape)


def _add_tensor(writer: GGUFWriter, name: str, value: np.ndarray, quantization: str) -> None:
    kind = GGMLQuantizationType[quantization if value.ndim > 1 else "F32"]
    try:
        data = quantize(value, kind)
    except NotImplementedError:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        shape = (*value.shape[:-1], value.shape[-1] // block * block_bytes)
        data = np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)


def _add_gguf_tokenizer(writer: GGUFWriter) -> None:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    writer.kv_data[0].pop(key, None)
    add[type(value)](key, value)


def _hf_config(config: ModelConfig, transformers: int) -> dict[str, Any]:
    written: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": 0,
        "dtype" if transformers >= 5 else "torch_dtype": "float32",
    }
    scaling: dict[str, Any] | None = None
    if config.rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": (
                config.rope_scaling.original_max_position_embeddings
            ),
        }
    if transformers >= 5:
        parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
        return written | {"rope_parameters": parameters}
    return written | {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _write_shards(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    names = list(weights)
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{index}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map}
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
