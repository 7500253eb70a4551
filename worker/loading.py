"""From a model's name to a model in memory, with progress shown."""

from __future__ import annotations

import sys

import torch
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kernels import ops_for
from text.models import resolve
from text.tokenizer import Tokenizer
from worker.loader import open_model
from worker.model import Model

CPU_KV_BYTES = 1 << 30
GPU_SLACK_BYTES = 1 << 30  # activations of the largest step, CUDA graphs, fragmentation


def load_model(name: str, dtype: torch.dtype, device: str) -> tuple[Model, Tokenizer]:
    """Load a model by path or pulled name, with its tokenizer.

    Raises:
        ValueError: there is no such model, or its files are not what they should be.
    """
    checkpoint = open_model(resolve(name))
    tokenizer = checkpoint.tokenizer()
    columns = (
        TextColumn(f"Loading {name}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=checkpoint.num_bytes)
        tensors = checkpoint.tensors(dtype, device, lambda count: progress.advance(task, count))
        model = Model(checkpoint.config, tensors, ops_for(torch.device(device)))
    return model, tokenizer


def fitting_blocks(model: Model, block_size: int, gpu_memory_utilization: float) -> int:
    """How many KV blocks the memory beside the weights holds."""
    block_bytes = model.config.kv_elements_per_token * block_size * model.dtype.itemsize
    budget = CPU_KV_BYTES
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left behind is free too
        free, total = torch.cuda.mem_get_info(model.device)
        budget = int(total * gpu_memory_utilization) - (total - free) - GPU_SLACK_BYTES
        if budget < block_bytes:
            raise ValueError(
                f"no GPU memory is left for KV: {free >> 20} MiB of {total >> 20} MiB are free "
                "after loading; raise --gpu-memory-utilization or take a smaller model"
            )
    return max(1, budget // block_bytes)
