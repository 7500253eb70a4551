"""The Llama family over paged KV: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 3.

One forward pass computes a whole step: the tokens of all its sequences in one flat batch,
prefill chunks and decodes alike. Projections that read the same input are stacked at load
(q, k and v; gate and up), so that a layer is four matrix products and one attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import Ops
from worker.config import ModelConfig, RopeScaling
from worker.step import Step

# For few rows, BLAS on a CPU (MKL 2024.2) is faster with the weight as the left operand, a
# slice of it at a time. From about 64 rows on it makes no difference.
FEW_ROWS = 64
SLICE = 1536  # rows of the weight


@dataclass(slots=True)
class Layer:
    """The weights of one decoder layer; matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor  # q, k and v stacked: [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor


class Model:
    """Weights and the forward pass; the KV cache and all bookkeeping belong to the caller."""

    def __init__(self, config: ModelConfig, weights: Iterable[tuple[str, Tensor]], ops: Ops):
        self.config = config
        self._ops = ops
        named = dict(weights)
        self._embedding = named.pop("model.embed_tokens.weight")
        final_norm = named.pop("model.norm.weight")
        self._lm_head = (
            self._embedding if config.tie_word_embeddings else named.pop("lm_head.weight")
        )
        self._layers = [_take_layer(named, index) for index in range(config.num_layers)]
        # Each layer ends with the norm that the next one begins with: one operation with its sum.
        self._next_norms = [*(layer.input_norm for layer in self._layers[1:]), final_norm]
        self._inverse_frequencies = inverse_frequencies(config).to(self._embedding.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def new_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """Zeroed KV memory: [layers, 2 (k, v), num_blocks, block_size, kv_heads, head_dim]."""
        config = self.config
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(self, step: Step, kv_cache: Tensor) -> Tensor:
        """Hidden states [T, hidden] of a step's tokens; their keys and values are kept.

        `kv_cache` comes from `new_kv_cache`.
        """
        ops = self._ops
        eps = self.config.rms_norm_eps
        angles = step.positions[:, None] * self._inverse_frequencies
        rotation = angles.cos(), angles.sin()
        residual = F.embedding(step.token_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for layer, next_norm, kv in zip(self._layers, self._next_norms, kv_cache, strict=True):
            hidden = self._attention(layer, hidden, rotation, kv, step)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = linear(ops.swiglu(linear(hidden, layer.gate_up)), layer.down)
            hidden, residual = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [R, vocab] in float32 for the hidden states [R, hidden]."""
        return linear(hidden, self._lm_head).float()

    def _attention(
        self,
        layer: Layer,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv: Tensor,
        step: Step,
    ) -> Tensor:
        """Attention of one layer over its part of the KV cache; hidden and result [T, hidden]."""
        config, ops = self.config, self._ops
        heads = linear(hidden, layer.qkv, layer.qkv_bias).view(len(hidden), -1, config.head_dim)
        q, k, v = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        ops.rotary(q, k, *rotation)
        k_cache, v_cache = kv
        ops.write_kv(k, v, k_cache, v_cache, step.slots)
        attended = ops.paged_attention(q, k_cache, v_cache, step.batch, config.head_dim**-0.5)
        return linear(attended.flatten(1), layer.output)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]."""
    if x.is_cuda or x.shape[0] > FEW_ROWS or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    product = x.new_empty(len(weight), len(x))
    slices = zip(torch.split(product, SLICE), torch.split(weight, SLICE), strict=True)
    for part, rows in slices:
        torch.mm(rows, x.t(), out=part)
    product = product.t().contiguous()
    return product if bias is None else product.add_(bias)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """The rotary frequencies in radians per position: [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return _stretch(frequencies, config.rope_scaling) if config.rope_scaling else frequencies


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, with a ramp
    between (Meta's llama-models, `apply_scaling`)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, ramp.clamp(0, 1))


def _take_layer(named: dict[str, Tensor], index: int) -> Layer:
    """The stacked weights of one layer; each is dropped from `named` as it is stacked."""
    prefix = f"model.layers.{index}."

    def take(name: str) -> Tensor:
        return named.pop(prefix + name)

    def take_optional(name: str) -> Tensor | None:
        return named.pop(prefix + name, None)

    def stack(names: Iterable[str]) -> Tensor:
        return torch.cat([take(name) for name in names])

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    biased = prefix + "self_attn.q_proj.bias" in named
    return Layer(
        input_norm=take("input_layernorm.weight"),
        qkv=stack(f"{name}.weight" for name in qkv),
        qkv_bias=stack(f"{name}.bias" for name in qkv) if biased else None,
        q_norm=take_optional("self_attn.q_norm.weight"),
        k_norm=take_optional("self_attn.k_norm.weight"),
        output=take("self_attn.o_proj.weight"),
        post_norm=take("post_attention_layernorm.weight"),
        gate_up=stack(f"mlp.{name}_proj.weight" for name in ("gate", "up")),
        down=take("mlp.down_proj.weight"),
    )
