"""Records what transformers computes for tiny random models of each architecture.

    python -m tests.data.make_tiny_models

needs the `bench` extra and writes tiny_models.npz: for each model and prompt, the logits after
every token. Weights are not stored: they come from NumPy's RandomState, whose numbers are the
same for ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from text.checked import Fields
from worker.config import ModelConfig
from worker.files.architecture import config_from_hf, tensor_shapes

RECORDED = Path(__file__).with_name("tiny_models.npz")
VOCAB = 61

# As in a config.json. Between them: grouped queries 1, 3, 4 and 7 to a key, heads of another size
# than hidden / heads, tied and untied embeddings, biases, normed queries and keys, scaled rope.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "llama-3": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "llama-linear": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 56,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
for values in MODELS.values():
    values |= {"vocab_size": VOCAB, "max_position_embeddings": 256}

PROMPTS = [
    np.random.RandomState(length).randint(VOCAB, size=length).tolist() for length in (37, 12, 1)
]


def config_of(name: str) -> ModelConfig:
    return config_from_hf(Fields(name, MODELS[name]))


def weights_of(name: str) -> dict[str, torch.Tensor]:
    """Random float32 weights; matrices keep the size of what they multiply, roughly."""
    random = np.random.RandomState(sorted(MODELS).index(name))
    weights = {}
    for tensor, shape in tensor_shapes(config_of(name)).items():
        value = random.standard_normal(shape)
        if tensor.endswith("norm.weight"):
            value = 1 + 0.3 * value
        elif tensor == "model.embed_tokens.weight":
            value *= 0.3
        elif len(shape) == 2:
            value *= 1.2 / np.sqrt(shape[1])
        weights[tensor] = torch.from_numpy(value.astype(np.float32))
    return weights


def main() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    recorded = {}
    for name, values in MODELS.items():
        model_type = values["architectures"][0].removesuffix("ForCausalLM").lower()
        config = AutoConfig.for_model(model_type, **values)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        missing, unexpected = model.load_state_dict(weights_of(name), strict=False)
        tied = values["tie_word_embeddings"]
        assert (missing, unexpected) == (["lm_head.weight"] if tied else [], []), missing
        model.tie_weights()
        with torch.inference_mode():
            for prompt in PROMPTS:
                logits = model(torch.tensor([prompt])).logits[0]
                recorded[f"{name}/{len(prompt)}"] = logits.numpy()
    np.savez_compressed(RECORDED, **recorded)


if __name__ == "__main__":
    main()
