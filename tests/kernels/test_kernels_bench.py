import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from kernels import Ops, bench
from kernels import bench_cases as cases
from kernels.bench import Times
from kernels.bench_cases import Model, Span
from kernels.triton import TRITON

TINY = Model("tiny", hidden=24, ffn=20, heads=6, kv_heads=2, head_dim=8)
RESULT = bench.Result(
    kernel="swiglu",
    model="tiny",
    shape="2 tokens",
    ms=Times(0.5, 0.4, 0.7),
    baseline_ms=Times(1.0, 0.9, 1.1),
    speedup=2.0,
    gb_per_s=100.0,
    of_copy=0.5,
    max_difference=0.01,
)


@pytest.mark.parametrize(
    "case",
    [
        cases.rms_norm_case(TINY, 2),
        cases.add_rms_norm_case(TINY, 2),
        cases.rotary_case(TINY, 2),
        cases.swiglu_case(TINY, 2),
        cases.write_kv_case(TINY, 2),
        cases.attention_case(TINY, "decode", [Span(2, 1, 19)]),
        cases.attention_case(TINY, "mix", [Span(2, 1, 19), Span(1, 4, 9), Span(1, 3, 3)]),
    ],
    ids=lambda case: f"{case.kernel} {case.shape}",
)
def test_kernel_and_baseline_compute_the_same(case: cases.Case, device: torch.device) -> None:
    torch.manual_seed(0)
    kernel, baseline = case.prepare(TRITON, device)
    assert bench.max_difference(kernel(), baseline()) < 0.07


def test_every_kernel_is_measured() -> None:
    measured = cases.cases()
    assert {case.kernel for case in measured} == set(Ops._fields)
    assert {case.model for case in measured} == {"Llama-3.1-8B", "Qwen3-0.6B"}
    assert len({case[:3] for case in measured}) == len(measured)


def test_bytes_are_the_least_traffic() -> None:
    assert cases.swiglu_case(TINY, 2).num_bytes == (40 + 20) * 2 * 2
    decode = cases.attention_case(TINY, "decode", [Span(3, 1, 10)])
    keys_and_values, queries_and_results = 2 * 30 * 2 * 8, 2 * 3 * 6 * 8
    assert decode.num_bytes == 2 * (keys_and_values + queries_and_results)


def test_a_result_relates_times_to_the_baseline_and_the_copy() -> None:
    case = cases.swiglu_case(TINY, 2)._replace(num_bytes=50_000_000)
    assert bench.summarize(case, RESULT.ms, RESULT.baseline_ms, 0.01, 200.0) == RESULT


def test_reports() -> None:
    report = bench.as_json({"gpu": "none"}, 200.0, [RESULT])
    assert json.loads(json.dumps(report))["results"][0]["ms"] == {
        "median": 0.5,
        "low": 0.4,
        "high": 0.7,
    }
    assert report["copy_gb_per_s"] == 200.0
    assert report["dtype"] == "bfloat16"
    console = Console(record=True, width=150)
    console.print(bench.as_table([RESULT]))
    assert "500.0 (400.0-700.0)" in console.export_text()


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench.main, ["--device", "cpu", "--json", str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert done.stderr == "cannot measure on 'cpu': this needs a CUDA GPU that PyTorch sees\n"
    assert not list(tmp_path.iterdir())


def test_help_has_an_example() -> None:
    assert "Example: python -m kernels.bench" in CliRunner().invoke(bench.main, ["--help"]).output
