"""How fast the engine is: against transformers, warm against cold, and its own overhead.

    python -m bench.engine                        # needs: pip install -e '.[worker,bench]'
    python -m bench.engine --device cuda --model ./Llama-3.2-1B-Instruct

Everything compared is measured in the same run, in turns, and reported as a ratio with the
spread over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.report import spread, write
from kernels import ops_for
from text.models import resolve
from worker.config import EngineConfig
from worker.engine import Engine, Runner
from worker.events import Publisher
from worker.loader import Checkpoint, open_model
from worker.metrics import Metrics
from worker.model import Model
from worker.profiles import PROFILES
from worker.runner import ModelRunner
from worker.sequence import SamplingParams, Sequence
from worker.simulate import SimulatedRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT, ANSWER, REQUESTS = 128, 64, 16
PREFIX = 1500


def new_engine(config: EngineConfig, runner: Runner, publisher: Publisher | None = None) -> Engine:
    return Engine(config, runner, Metrics("bench", config, "float32"), publisher)


def finish(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
    """Run all prompts to the end, greedily and without an early stop."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    now = time.monotonic()
    sequences = [Sequence(i, list(p), params, arrival=now) for i, p in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequences


def seconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Baseline:
    """transformers' generate() with the same weights."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        self.model = load_transformers(checkpoint, dtype).to(device).eval()
        self.device = device

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy answers of exactly ANSWER tokens to prompts of equal length, as one batch."""
        inputs = torch.tensor(prompts, device=self.device)
        out = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            do_sample=False,
            pad_token_id=0,
        )
        answers: list[list[int]] = out[:, inputs.shape[1] :].tolist()
        return answers

    def one_by_one(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.generate([prompt])


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's weights in the class of transformers that they were made for."""
    import transformers

    ours = checkpoint.config
    if ours.rope_scaling is not None:
        rope = {"rope_type": "llama3", **asdict(ours.rope_scaling)}
    else:
        rope = {"rope_type": "default"}
    model_class = getattr(transformers, ours.architecture)
    theirs = model_class.config_class(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        max_position_embeddings=ours.max_position_embeddings,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_theta": ours.rope_theta, **rope},
        tie_word_embeddings=ours.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = model_class(theirs).to(dtype)
    model.load_state_dict(dict(checkpoint.tensors(dtype, "cpu", lambda _: None)), strict=False)
    return model


def throughput(
    engine: Engine, baseline: Baseline, prompts: list[list[int]], rounds: int, sequential: bool
) -> dict[str, Any]:
    """Tokens per second of REQUESTS concurrent requests, and how often faster than others."""
    ways: dict[str, Callable[[], object]] = {
        "warmpath": lambda: finish(engine, prompts, ANSWER),
        "transformers_batch": lambda: baseline.generate(prompts),
    }
    if sequential:
        ways["transformers_one_by_one"] = lambda: baseline.one_by_one(prompts)
    times: dict[str, list[float]] = {way: [] for way in ways}
    ours = [s.token_ids[PROMPT:] for s in finish(engine, prompts, ANSWER)]
    same = sum(a == b for a, b in zip(ours, baseline.generate(prompts), strict=True))
    for _ in track(range(rounds), "Throughput"):
        for way, run in ways.items():
            engine.reset_prefix_cache()
            times[way].append(seconds(run))
    tokens = len(prompts) * ANSWER
    return {
        "equal_answers": f"{same} of {len(prompts)}",
        "tokens_per_second": {
            way: spread([tokens / t for t in taken], 1) for way, taken in times.items()
        },
        "times_faster_than": {
            way: spread([b / a for a, b in zip(times["warmpath"], taken, strict=True)], 2)
            for way, taken in times.items()
            if way != "warmpath"
        },
    }


def first_token(engine: Engine, vocab_size: int, rounds: int) -> dict[str, Any]:
    """Time to first token of a PREFIX-token prompt, cold and again with another ending."""
    cold, warm = [], []
    for i in track(range(rounds + 1), "First token"):
        prefix = random_prompt(PREFIX, vocab_size, seed=100 + i)
        engine.reset_prefix_cache()
        cold.append(seconds(lambda: finish(engine, [[*prefix, 1]], 1)))  # noqa: B023
        warm.append(seconds(lambda: finish(engine, [[*prefix, 2]], 1)))  # noqa: B023
    cold, warm = cold[1:], warm[1:]
    return {
        "cold_seconds": spread(cold),
        "warm_seconds": spread(warm),
        "times_shorter_warm": spread([c / w for c, w in zip(cold, warm, strict=True)], 1),
    }


def overhead(num_seqs: int = 256, steps: int = 400) -> dict[str, Any]:
    """The engine's own time per step with a model that costs nothing, KV events on.

    Every sequence decodes; one in sixteen fills a block in each step, as in steady state.
    """
    config = EngineConfig(
        num_blocks=num_seqs * 64,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=1024,
    )
    publisher = Publisher("127.0.0.1", 0, 0, "kv@bench")
    runner = CountingRunner()
    engine = new_engine(config, runner, publisher)
    params = SamplingParams(max_tokens=10**6, temperature=0.0)
    for i in range(num_seqs):
        engine.add(Sequence(i, random_prompt(64 + i % 16, 50_000, seed=i), params))
    for _ in range(20):
        engine.step()
    taken = []
    for _ in range(steps):
        runner.seconds = 0.0
        taken.append(seconds(engine.step) - runner.seconds)
    publisher.close()
    per_step = [1e3 * t for t in taken]
    return {
        "running_sequences": num_seqs,
        "ms_per_step": spread(per_step, 3),
        "us_per_token": spread([1e6 * t / num_seqs for t in taken], 2),
    }


class CountingRunner(SimulatedRunner):
    """The instant simulated model, with its own time taken so that it can be subtracted."""

    def __init__(self) -> None:
        super().__init__(PROFILES["instant"], range(32_000))
        self.seconds = 0.0

    def run(self, batch: Any) -> Any:
        start = time.perf_counter()
        samples = super().run(batch)
        self.seconds += time.perf_counter() - start
        return samples


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(10, vocab_size, (length,), generator=generator).tolist()
    return ids


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--sequential/--no-sequential", default=True, help="Also compare one by one.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write results.")
def main(model: str, device: str, rounds: int, sequential: bool, path: Path | None) -> None:
    """Measure throughput, time to first token and overhead; print and write the results."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results: dict[str, Any] = {"model": model, "device": device, "dtype": str(dtype)}
    results["overhead"] = overhead()
    checkpoint = open_model(resolve(model))
    ops = ops_for(torch.device(device))
    ours = Model(checkpoint.config, checkpoint.tensors(dtype, device, lambda _: None), ops)
    config = EngineConfig(
        num_blocks=1024,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=8192 if device == "cuda" else 2048,  # all prompts in one step
    )
    engine = new_engine(config, ModelRunner(ours, config))
    engine.warm_up()
    vocab_size = checkpoint.config.vocab_size
    prompts = [random_prompt(PROMPT, vocab_size, seed=i) for i in range(REQUESTS)]
    results["throughput"] = throughput(
        engine, Baseline(checkpoint, device, dtype), prompts, rounds, sequential
    )
    results["first_token"] = first_token(engine, vocab_size, rounds)
    show(results)
    click.echo(f"Written to {write(f'engine-{device}', results, path)}")


def show(results: dict[str, Any]) -> None:
    table = Table("what", "min", "median", "max")
    for section in ("overhead", "throughput", "first_token"):
        for name, value in results[section].items():
            rows = (
                {name: value} if "median" in (value if isinstance(value, dict) else ()) else value
            )
            if isinstance(rows, dict):
                for row, figures in rows.items():
                    label = row if row == name else f"{name}: {row}"
                    table.add_row(label, *(str(figures[k]) for k in ("min", "median", "max")))
    Console().print(table)


if __name__ == "__main__":
    main()
