"""What models cost on machines: the profiles of simulated workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model costs on a machine. Times in seconds."""

    overhead: float  # per step: launches, scheduling, sampling
    weights: float  # per step: reading all weights once
    token: float  # per token computed, prefill or decode
    context_token: float  # per token of context read by attention
    num_blocks: int  # of 16 tokens, that fit beside the weights
    max_model_len: int
    max_num_batched_tokens: int
    mean_output_tokens: int = 256  # an answer ends by itself after so many, on average

    def step_seconds(self, num_tokens: int, context: int) -> float:
        """Time for a step that computes `num_tokens` and reads `context` tokens of KV."""
        return (
            self.overhead
            + max(self.weights, num_tokens * self.token)
            + context * self.context_token
        )


# GPU rows are estimates from data sheets (H100: 3.35 TB/s, 990 dense bf16 TFLOP/s; A10G: 600 GB/s,
# 70 TFLOP/s; about half of these FLOPs reached) and the models' published shapes; cpu-smol is
# fitted to bench/results/engine-cpu.json.
PROFILES = {
    "llama-8b-h100": Profile(
        overhead=1.2e-3,
        weights=4.8e-3,
        token=33e-6,
        context_token=39e-9,
        num_blocks=27_000,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ),
    "qwen-32b-2xh100": Profile(
        overhead=2.0e-3,
        weights=9.8e-3,
        token=70e-6,
        context_token=40e-9,
        num_blocks=19_000,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ),
    "qwen-7b-a10g": Profile(
        overhead=2.0e-3,
        weights=25e-3,
        token=430e-6,
        context_token=95e-9,
        num_blocks=5_600,
        max_model_len=8192,
        max_num_batched_tokens=2048,
    ),
    "cpu-smol": Profile(
        overhead=10e-3,
        weights=84e-3,
        token=2.0e-3,
        context_token=6e-6,
        num_blocks=2048,
        max_model_len=2048,
        max_num_batched_tokens=512,
    ),
    "instant": Profile(
        overhead=0.0,
        weights=0.0,
        token=0.0,
        context_token=0.0,
        num_blocks=4096,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ),
}
