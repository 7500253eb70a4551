"""A real model in the engine: answers are token by token those of transformers, however they are
scheduled; and what the runner hands to the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import TORCH
from tests.data.make_tiny_models import PROMPTS, config_of, weights_of
from tests.worker.engines import add, make_engine, metric, run, token_ids
from tests.worker.paged import Paged
from worker.config import EngineConfig
from worker.cuda_graphs import graph_sizes
from worker.engine import Engine
from worker.loading import load_model
from worker.model import Model
from worker.runner import ModelRunner
from worker.sequence import TokenLogprobs
from worker.step import Step

GREEDY = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
ASKED = [entry["prompt_ids"] for entry in GREEDY["prompts"]]
EXPECTED = [entry["new_ids"] for entry in GREEDY["prompts"]]
LENGTH = 32


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    model, _ = load_model("smollm2-135m", torch.float32, "cpu")
    return model


@pytest.fixture
def tiny() -> Model:
    return Model(config_of("qwen2"), weights_of("qwen2").items(), TORCH)


def engine_of(model: Model, **limits: Any) -> Engine:
    limits = {"num_blocks": 100, "block_size": 16, "max_model_len": 128} | limits
    limits = {"max_num_batched_tokens": 256, "max_num_seqs": 32} | limits
    runner = ModelRunner(model, EngineConfig(**limits))
    return make_engine(runner, **limits)


def answers(engine: Engine, prompts: list[list[int]] = ASKED) -> list[list[int | None]]:
    for id, prompt in enumerate(prompts):
        add(engine, id, prompt, max_tokens=LENGTH, temperature=0.0)
    outputs = run(engine)
    return [token_ids(outputs[id]) for id in range(len(prompts))]


# Greedy answers


def test_cold_and_warm(smollm2: Model):
    engine = engine_of(smollm2, block_size=4, num_blocks=200)
    assert answers(engine) == EXPECTED
    assert metric(engine, "vllm:prefix_cache_hits_total") == 0
    assert answers(engine) == EXPECTED
    hits = sum((len(prompt) - 1) // 4 * 4 for prompt in ASKED)
    assert metric(engine, "vllm:prefix_cache_hits_total") == hits


def test_one_at_a_time(smollm2: Model):
    assert answers(engine_of(smollm2, max_num_seqs=1), ASKED[:2]) == EXPECTED[:2]


def test_in_tiny_chunks(smollm2: Model):
    engine = engine_of(smollm2, max_num_batched_tokens=4, max_num_seqs=4)
    assert answers(engine) == EXPECTED
    steps = metric(engine, "vllm:iteration_tokens_total_count")
    tokens = metric(engine, "vllm:iteration_tokens_total_sum")
    assert tokens / steps <= 4


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_again_and_again(smollm2: Model, enable_prefix_caching: bool):
    """With the cache most is found again, without it all is computed again."""
    engine = engine_of(
        smollm2,
        num_blocks=24,
        block_size=4,
        max_model_len=96,
        enable_prefix_caching=enable_prefix_caching,
    )
    assert answers(engine) == EXPECTED
    assert metric(engine, "vllm:num_preemptions_total") >= 3


def test_preallocated(smollm2: Model):
    engine = engine_of(smollm2, num_blocks=40, block_size=4, preallocate=True)
    assert answers(engine) == EXPECTED
    assert metric(engine, "vllm:num_preemptions_total") == 0


def test_among_strangers(smollm2: Model):
    """Who draw at random, come and go, and share the beginning of a prompt."""
    engine = engine_of(smollm2, block_size=4, num_blocks=400)
    for i in range(8):
        prompt = ASKED[4][: 8 + i] + [1000 + i] * i
        add(engine, 100 + i, prompt, max_tokens=5 + 3 * i, seed=i, top_p=0.9, logprobs=2)
    for _ in range(3):
        engine.step()
    assert answers(engine) == EXPECTED
    assert metric(engine, "vllm:prefix_cache_hits_total") > 0


def test_a_prompt_that_another_request_has_cached(smollm2: Model):
    """And its answer: the next turn of a conversation."""
    engine = engine_of(smollm2, block_size=4, num_blocks=200)
    prompt, expected = ASKED[4], EXPECTED[4]
    add(engine, 0, prompt + expected[:16] + [7] * 9, max_tokens=1, temperature=0.0)
    run(engine)
    add(engine, 1, prompt + expected[:20], max_tokens=12, temperature=0.0)
    outputs = run(engine)[1]
    assert outputs[0].num_cached_tokens == (34 + 16) // 4 * 4
    assert token_ids(outputs) == expected[20:]


def test_warming_up_leaves_no_trace(tiny: Model):
    limits = {"num_blocks": 16, "block_size": 4, "max_model_len": 64}
    runner = ModelRunner(tiny, EngineConfig(**limits))
    runner.warm_up()
    assert not runner._kv_cache.any()


# Log-probabilities of prompts


def scores(model: Model, ids: list[int], **limits: Any) -> list[TokenLogprobs | None]:
    engine = engine_of(model, **limits)
    for id in ids:  # the same prompt again: cached, but to be scored all the same
        add(engine, id, PROMPTS[0], max_tokens=2, prompt_logprobs=3)
        scored = run(engine)[id][0].prompt_logprobs
    assert scored is not None
    return scored


def test_prompt_logprobs_are_those_of_the_logits(tiny: Model):
    prompt = PROMPTS[0]
    (logits,) = Paged(tiny).compute({"a": prompt})
    expected = logits.log_softmax(-1)
    first, *rest = scores(tiny, [0])
    assert first is None
    assert [entry.token_id for entry in rest if entry] == prompt[1:]
    for entry, row in zip(rest, expected[:-1], strict=True):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 1},
        {"max_num_batched_tokens": 36, "max_num_seqs": 1},
        {"block_size": 4},
    ],
    ids=str,
)
def test_prompt_logprobs_do_not_depend_on_chunks_or_the_cache(
    tiny: Model, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    whole = scores(tiny, [0])
    monkeypatch.setattr("worker.runner.ROWS_SCORED_AT_ONCE", 4)
    pieces = scores(tiny, [0, 1], **limits)
    assert len(pieces) == len(PROMPTS[0])
    for one, other in zip(whole[1:], pieces[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_prompt_logprobs_begin_again_after_a_preemption(tiny: Model):
    """The urgent one outgrows the memory while the other is scored."""
    limits = {"num_blocks": 12, "block_size": 4, "max_model_len": 48}
    engine = engine_of(tiny, **limits, max_num_batched_tokens=4, max_num_seqs=2)
    urgent = add(engine, 0, [1] * 3, max_tokens=40, temperature=0.0)
    while urgent.num_output_tokens < 2:
        engine.step()
    scored = add(engine, 1, PROMPTS[0][:36], max_tokens=2, prompt_logprobs=3)
    outputs = run(engine)[1]
    assert scored.num_preemptions > 0
    expected = scores(tiny, [0])[:36]
    got = outputs[0].prompt_logprobs
    assert got is not None
    assert [entry and entry.token_id for entry in got] == [None, *PROMPTS[0][1:36]]
    assert [entry.rank for entry in got if entry] == [entry.rank for entry in expected if entry]


# Decode steps as CUDA graphs replay them, without the graphs


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 16, 17, 33, 256])
def test_graph_sizes_reach_from_one_to_the_most(most: int):
    sizes = graph_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for wanted in range(1, most + 1):
        size = next(size for size in sizes if size >= wanted)
        assert size < 2 * wanted or size <= 16 or size - wanted < 16, "little is padding"


def decode_step(paged: Paged, names: str) -> Step:
    return paged.plan({name: [ord(name) % 61] for name in names})


@pytest.fixture
def paged(tiny: Model) -> Paged:
    paged = Paged(tiny)
    for i, name in enumerate("vwxyz"):
        paged.compute({name: PROMPTS[0][: 2 + 5 * i]})
    return paged


def test_padding_changes_nothing(paged: Paged):
    static = Step.decode_padding(8, 20, 80, torch.device("cpu"))
    for names, size in (("vwxyz", 8), ("zv", 4), ("w", 1), ("xyz", 3)):
        step = decode_step(paged, names)
        before = paged.kv_cache.clone()
        with torch.inference_mode():
            expected = paged.forward(step)
            plain, paged.kv_cache = paged.kv_cache, before
            static.overwrite(step)
            got = paged.forward(static.head(size))
        assert len(got) == size
        torch.testing.assert_close(got[: len(names)], expected)
        torch.testing.assert_close(paged.kv_cache, plain)
        assert torch.isfinite(got).all()


def test_padding_reads_and_writes_nothing(paged: Paged):
    static = Step.decode_padding(8, 20, 80, torch.device("cpu"))
    static.overwrite(decode_step(paged, "vwxyz"))
    step = decode_step(paged, "wx")
    static.overwrite(step)
    assert not static.batch.seq_lens[2:].any()
    before = paged.kv_cache.clone()
    with torch.inference_mode():
        paged.forward(static.head(8))
    changed = (paged.kv_cache != before).any(dim=(0, 1, 4, 5)).flatten().nonzero().flatten()
    assert changed.tolist() == sorted(step.slots.tolist())


def test_a_step_of_nothing_but_padding_is_harmless(paged: Paged):
    """What a graph is captured with."""
    before = paged.kv_cache.clone()
    padding = Step.decode_padding(4, 20, 80, torch.device("cpu"))
    with torch.inference_mode():
        hidden = paged.forward(padding)
    assert torch.isfinite(hidden).all()
    assert torch.equal(paged.kv_cache, before)
