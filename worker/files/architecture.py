"""Which models the engine can run: their configuration and the tensors they must have."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

from text.checked import Fields, ModelError
from worker.config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MAX_LAYERS = 1024
_MAX_CONTEXT = 1 << 30


def config_from_hf(fields: Fields) -> ModelConfig:
    """From Hugging Face's config.json, of transformers 4 or 5; ModelError if unsupported."""
    architecture = _supported(fields, _only_architecture(fields))
    if fields.has("quantization_config"):
        raise _refused(fields, "quantised safetensors; use the unquantised model or a GGUF file")
    if fields.string("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "silu")
    _refuse_bias(fields, architecture)
    context = fields.integer("max_position_embeddings", high=_MAX_CONTEXT)
    _refuse_sliding_window(fields, architecture, context)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    rope = _rope_fields(fields)
    return _checked(
        fields,
        ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers", high=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", _default_head_dim(architecture, fields)),
            max_position_embeddings=context,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
        ),
    )


def config_from_gguf(
    fields: Fields, vocab_size: int, *, tied: bool, rope_factors: Sequence[float]
) -> ModelConfig:
    """From GGUF metadata and what only the tensors tell; ModelError if unsupported.

    `rope_factors`: the tensor rope_freqs.weight, by which Llama 3's files store their scaling.
    """
    name = fields.string("general.architecture")
    architecture = _supported(fields, ARCHITECTURES.get(name, name))
    own = Fields(
        fields.source,
        {key.removeprefix(name + "."): value for key, value in fields.values.items()},
    )
    if own.has("expert_count") and own.values["expert_count"] != 0:
        raise _refused(fields, "a mixture of experts")
    context = own.integer("context_length", high=_MAX_CONTEXT)
    if own.has("attention.sliding_window"):
        window = own.integer("attention.sliding_window", high=_MAX_CONTEXT)
        if window < context:
            raise _refused(fields, f"a sliding attention window of {window} tokens")
    num_heads = own.integer("attention.head_count")
    hidden_size = own.integer("embedding_length")
    head_dim = own.integer("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.integer(key, head_dim) != head_dim:
            raise own.wrong(key, f"the head dimension, {head_dim}")
    rope_theta = own.number("rope.freq_base", 10000.0)
    scaling = _gguf_rope_scaling(own)
    if rope_factors:
        scaling = _scaling_from_factors(fields, rope_factors, rope_theta)
    return _checked(
        fields,
        ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=own.integer("feed_forward_length"),
            num_layers=own.integer("block_count", high=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=own.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=own.number("attention.layer_norm_rms_epsilon"),
            rope_theta=rope_theta,
            rope_scaling=scaling,
            tie_word_embeddings=tied,
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
        ),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model, by its Hugging Face name, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, config.num_heads * config.head_dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, count in heads.items():
        layer[f"self_attn.{name}_proj.weight"] = (count * config.head_dim, hidden)
        if config.qkv_bias:
            layer[f"self_attn.{name}_proj.bias"] = (count * config.head_dim,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def rope_factor(scaling: RopeScaling, wavelength: float) -> float:
    """By how much Llama 3's scaling divides a frequency of this wavelength in tokens."""
    turns = scaling.original_max_position_embeddings / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _only_architecture(fields: Fields) -> str:
    names = fields.list("architectures")
    if len(names) != 1 or not isinstance(names[0], str):
        raise fields.wrong("architectures", "a list of one name")
    return names[0]


def _supported(fields: Fields, architecture: str) -> str:
    if architecture not in ARCHITECTURES.values():
        raise _refused(fields, f"the architecture {architecture[:60]!r}")
    return architecture


def _refused(fields: Fields, what: str) -> ModelError:
    return ModelError(
        f"{fields.source}: has {what}, which is not supported; "
        f"supported are dense {', '.join(ARCHITECTURES.values())} with full attention"
    )


def _default_head_dim(architecture: str, fields: Fields) -> int:
    if architecture == "Qwen3ForCausalLM":
        return 128
    return max(1, fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def _refuse_bias(fields: Fields, architecture: str) -> None:
    for name in ("attention_bias", "mlp_bias"):
        # Qwen 2's biases on q, k and v come without this flag, and its o_proj has none.
        if architecture != "Qwen2ForCausalLM" and fields.flag(name, False):
            raise _refused(fields, f"{name}: true")


def _refuse_sliding_window(fields: Fields, architecture: str, context: int) -> None:
    if fields.has("layer_types"):
        for kind in fields.list("layer_types"):
            if kind != "full_attention":
                raise _refused(fields, f"layers of type {kind!r:.60}")
        return
    if architecture.startswith("Qwen") and not fields.flag("use_sliding_window", False):
        return
    if fields.has("sliding_window"):
        window = fields.integer("sliding_window", high=_MAX_CONTEXT)
        if window < context:
            raise _refused(fields, f"a sliding attention window of {window} tokens")


def _rope_fields(fields: Fields) -> Fields:
    """The rotary settings as one table: transformers 5 nests them, 4 spreads them."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    settings = dict(fields.table(name).values) if fields.has(name) else {}
    if any(isinstance(value, dict) for value in settings.values()):
        raise _refused(fields, "rotary embeddings that differ from layer to layer")
    return Fields(fields.source, {"rope_theta": fields.values.get("rope_theta")} | settings)


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    kind = rope.string("rope_type", rope.string("type", "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(rope, "rotary embeddings of a part of the head")
    if kind == "default":
        return None
    if kind == "linear":
        return _linear(rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer(
                "original_max_position_embeddings", high=_MAX_CONTEXT
            ),
        )
    raise _refused(rope, f"rotary embeddings of type {kind[:60]!r}")


def _gguf_rope_scaling(own: Fields) -> RopeScaling | None:
    kind = own.string("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return _linear(own.number("rope.scaling.factor", 1.0))
    raise _refused(own, f"rotary embeddings of type {kind[:60]!r}")


def _linear(factor: float) -> RopeScaling | None:
    """All frequencies divided alike: Llama 3's rule where every wavelength (2π and up) is long."""
    return None if factor == 1 else RopeScaling(factor, 1.0, 2.0, 1)


def _scaling_from_factors(
    fields: Fields, factors: Sequence[float], theta: float
) -> RopeScaling | None:
    """Llama 3's parameters from the divisor of each frequency, as GGUF files store them.

    Between the two bounds a frequency f (in turns per token) is scaled by 1/s, where
    s = (1-t)/factor + t and t = (f * original - low) / (high - low) is a line in f. Two points on
    it give original / (high - low) and low / (high - low). The common scale of the three is
    free, so low is taken as 1, as in every released Llama 3.
    """
    pairs = [
        (1 / (2 * pi * theta ** (i / len(factors))), divisor) for i, divisor in enumerate(factors)
    ]
    if not all(1 <= divisor < 1e6 for divisor in factors):  # nor where it is NaN
        raise ModelError(f"{fields.source}: rope_freqs.weight must hold divisors from 1 up")
    factor = max(factors)
    if min(factors) == factor:
        return _linear(factor)
    middle = [
        (turns, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for turns, divisor in pairs
        if 1.0001 < divisor < factor * 0.9999
    ]
    if len(middle) >= 2:
        (turns, blend), (last_turns, last_blend) = middle[0], middle[-1]
        slope = (blend - last_blend) / (turns - last_turns)
        offset = slope * turns - blend
        if slope > 0 and offset > 0:
            scaling = RopeScaling(factor, 1.0, 1 + 1 / offset, max(1, round(slope / offset)))
            if all(abs(rope_factor(scaling, 1 / f) / d - 1) < 0.01 for f, d in pairs):
                return scaling
    raise _refused(fields, "a rope_freqs.weight that does not follow Llama 3's rule")


def _checked(fields: Fields, config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{fields.source}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{fields.source}: the head dimension {config.head_dim} is odd")
    scaling = config.rope_scaling
    if scaling and (scaling.factor < 1 or scaling.high_freq_factor <= scaling.low_freq_factor):
        raise ModelError(f"{fields.source}: the rotary scaling makes no sense: {scaling}")
    return config
