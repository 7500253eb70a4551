"""Engines to test with: everything is real but the model, which costs nothing."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from worker.config import EngineConfig
from worker.engine import Engine, Runner
from worker.events import Publisher
from worker.metrics import Metrics
from worker.profiles import PROFILES
from worker.scheduler import Scheduled
from worker.sequence import Output, Sample, SamplingParams, Sequence
from worker.simulate import SimulatedRunner

SIZE = 4  # tokens a block


def simulated(alphabet: range | list[int] = range(100, 200), seed: int = 0) -> SimulatedRunner:
    return SimulatedRunner(PROFILES["instant"], alphabet, seed)


def make_engine(
    runner: Runner | None = None, publisher: Publisher | None = None, **limits: Any
) -> Engine:
    limits = {
        "num_blocks": 64,
        "block_size": SIZE,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    } | limits
    config = EngineConfig(**limits)
    return Engine(config, runner or simulated(), Metrics("m", config, "float32"), publisher)


class FaultInjectingRunner:
    """Runs steps on another runner, and raises instead while `broken`."""

    def __init__(self, runner: Runner) -> None:
        self.broken = False
        self._runner = runner

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        if self.broken:
            raise RuntimeError("injected fault")
        return self._runner.run(batch)


class SteppedRunner:
    """Runs steps on another runner, each once it is allowed to."""

    def __init__(self, runner: Runner) -> None:
        self.entered = threading.Semaphore(0)  # released as each step begins
        self.allowed = threading.Semaphore(0)
        self.num_steps = 0
        self._runner = runner

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        self.entered.release()
        self.allowed.acquire()
        self.num_steps += 1
        return self._runner.run(batch)


def add(engine: Engine, id: int, tokens: list[int], max_tokens: int = 4, **fields: Any) -> Sequence:
    """Submit a sequence; `fields` are its own or those of its sampling parameters."""
    own = {
        name: fields.pop(name) for name in ("priority", "cache_salt", "adapter") if name in fields
    }
    sequence = Sequence(id, list(tokens), SamplingParams(max_tokens, **fields), **own)
    engine.add(sequence)
    return sequence


def run(engine: Engine, within: int = 1000) -> dict[int, list[Output]]:
    """Step until there is nothing to do; all outputs by sequence."""
    outputs: dict[int, list[Output]] = {}
    for _ in range(within):
        if not engine.has_work:
            return outputs
        for id, output in engine.step():
            outputs.setdefault(id, []).append(output)
    raise AssertionError(f"still at work after {within} steps")


def token_ids(outputs: list[Output]) -> list[int | None]:
    return [output.token_id for output in outputs]


def metric(engine: Engine, name: str, **labels: str) -> float:
    """The value of one series on the metrics page."""
    page = engine._metrics.render().decode()
    values = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) == 1, f"{name}{labels}: {len(values)} series"
    return values[0]
