"""Measure each kernel on a GPU against PyTorch and against the speed of a plain copy.

    python -m kernels.bench --json kernels.json

Prints a table and writes the same as JSON. `of copy` is the share of the bandwidth of a
copy, measured in the same run, that a kernel reaches with the least bytes it must move;
prefill is bound by arithmetic and stays far below 1.
"""

import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kernels import Ops, ops_for
from kernels.bench_cases import DTYPE, Case, cases

COPY_BYTES = 1 << 30


class Times(NamedTuple):
    """Milliseconds: the median, and the 20th and 80th percentiles."""

    median: float
    low: float
    high: float


class Result(NamedTuple):
    kernel: str
    model: str
    shape: str
    ms: Times
    baseline_ms: Times
    speedup: float  # baseline / kernel
    gb_per_s: float
    of_copy: float
    max_difference: float  # between the kernel's result and the baseline's


def measure(call: Callable[[], object]) -> Times:
    """Time a call on the GPU, with a cold L2 cache before each run."""
    from triton.testing import do_bench

    return Times(*do_bench(call, quantiles=(0.5, 0.2, 0.8)))


def copy_bandwidth(device: torch.device) -> float:
    """What copying 1 GiB within the GPU's memory reaches, read and write, in GB/s."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / measure(lambda: target.copy_(source)).median / 1e6


def run(case: Case, ops: Ops, device: torch.device, copy_gb_per_s: float) -> Result:
    """Compare the results of kernel and baseline once, then time both."""
    kernel, baseline = case.prepare(ops, device)
    difference = max_difference(kernel(), baseline())
    return summarize(case, measure(kernel), measure(baseline), difference, copy_gb_per_s)


def max_difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference of any element; the two may be cut into tensors differently."""
    first, second = (torch.cat([x.flatten() for x in xs]).float() for xs in (got, expected))
    return (first - second).abs().max().item()


def summarize(
    case: Case, ms: Times, baseline_ms: Times, difference: float, copy_gb_per_s: float
) -> Result:
    gb_per_s = case.num_bytes / ms.median / 1e6
    return Result(
        kernel=case.kernel,
        model=case.model,
        shape=case.shape,
        ms=ms,
        baseline_ms=baseline_ms,
        speedup=baseline_ms.median / ms.median,
        gb_per_s=gb_per_s,
        of_copy=gb_per_s / copy_gb_per_s,
        max_difference=difference,
    )


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "processors": gpu.multi_processor_count,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_json(machine: dict[str, Any], copy_gb_per_s: float, results: list[Result]) -> dict[str, Any]:
    """The report as it is written to a file; times are in milliseconds."""
    rows = [
        r._asdict() | {"ms": r.ms._asdict(), "baseline_ms": r.baseline_ms._asdict()}
        for r in results
    ]
    return {
        "machine": machine,
        "dtype": str(DTYPE).removeprefix("torch."),
        "copy_gb_per_s": copy_gb_per_s,
        "results": rows,
    }


def as_table(results: list[Result]) -> Table:
    table = Table("kernel", "model", "shape")
    for title in ("µs (20-80 %)", "PyTorch µs", "speed-up", "GB/s", "of copy", "max diff."):
        table.add_column(title, justify="right", no_wrap=True)
    for r in results:
        median, low, high = (1000 * t for t in r.ms)
        table.add_row(
            r.kernel,
            r.model,
            r.shape,
            f"{median:.1f} ({low:.1f}-{high:.1f})",
            f"{1000 * r.baseline_ms.median:.1f}",
            f"{r.speedup:.2f}",
            f"{r.gb_per_s:.0f}",
            f"{r.of_copy:.2f}",
            f"{r.max_difference:.2g}",
        )
    return table


@click.command(epilog="Example: python -m kernels.bench --device cuda:1 --json kernels.json")
@click.option("--device", default="cuda", show_default=True, help="The GPU to measure.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write the JSON.")
def main(device: str, path: Path | None) -> None:
    """Measure each kernel on a GPU against PyTorch and against a plain copy."""
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        print(
            f"cannot measure on {device!r}: this needs a CUDA GPU that PyTorch sees",
            file=sys.stderr,
        )
        sys.exit(1)
    gpu = torch.device(device)
    torch.cuda.set_device(gpu)
    torch.manual_seed(0)
    ops = ops_for(gpu)
    bandwidth = copy_bandwidth(gpu)
    results = [run(case, ops, gpu, bandwidth) for case in cases()]
    Console().print(as_table(results))
    if path:
        path.write_text(json.dumps(as_json(machine(gpu), bandwidth, results), indent=2) + "\n")


if __name__ == "__main__":
    main()
