"""Decode steps as CUDA graphs: one launch for the whole model instead of hundreds.

A graph replays on the very tensors it was captured with, so a step is copied into static
ones, padded to the next captured size. A padding row is a sequence of length 0 whose KV
goes nowhere (slot -1); the kernels skip it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from worker.model import Model

Graph = tuple[torch.cuda.CUDAGraph, Tensor]  # and the hidden states it leaves behind


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What `Model.forward` takes besides the KV cache."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    batch: AttentionBatch

    @staticmethod
    def decode_padding(
        num_seqs: int, max_blocks: int, max_seq_len: int, device: torch.device
    ) -> StepInputs:
        """A decode step of `num_seqs` padding rows, one query each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return StepInputs(
            token_ids=zeros(num_seqs, dtype=torch.int64),
            positions=zeros(num_seqs, dtype=torch.int64),
            slots=zeros(num_seqs, dtype=torch.int64) - 1,
            batch=AttentionBatch(
                block_tables=zeros(num_seqs, max_blocks),
                query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
                seq_lens=zeros(num_seqs),
                max_query_len=1,
                max_seq_len=max_seq_len,
            ),
        )

    def head(self, num_seqs: int) -> StepInputs:
        """The first `num_seqs` rows of a decode step, sharing memory with it."""
        batch = self.batch
        return StepInputs(
            self.token_ids[:num_seqs],
            self.positions[:num_seqs],
            self.slots[:num_seqs],
            AttentionBatch(
                batch.block_tables[:num_seqs],
                batch.query_start[: num_seqs + 1],
                batch.seq_lens[:num_seqs],
                batch.max_query_len,
                batch.max_seq_len,
            ),
        )

    def overwrite(self, step: StepInputs) -> None:
        """Copy a smaller decode step in; the rows behind it become padding."""
        num_seqs = len(step.token_ids)
        self.token_ids[:num_seqs].copy_(step.token_ids)
        self.positions[:num_seqs].copy_(step.positions)
        self.slots[:num_seqs].copy_(step.slots)
        self.slots[num_seqs:] = -1
        tables = step.batch.block_tables
        self.batch.block_tables[:num_seqs, : tables.shape[1]].copy_(tables)
        self.batch.seq_lens[:num_seqs].copy_(step.batch.seq_lens)
        self.batch.seq_lens[num_seqs:] = 0


class DecodeGraphs:
    """Graphs of a model's decode step for batch sizes 1, 2, 4, 8, 16, 32, ... `max_num_seqs`."""

    def __init__(self, model: Model, kv_cache: Tensor, max_num_seqs: int, max_seq_len: int) -> None:
        block_size = kv_cache.shape[3]
        self._static = StepInputs.decode_padding(
            max_num_seqs, -(-max_seq_len // block_size), max_seq_len, model.device
        )
        self._graphs: dict[int, Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(graph_sizes(max_num_seqs)):  # largest first: they share its memory
            inputs = self._static.head(size)
            model.forward(inputs.token_ids, inputs.positions, inputs.slots, kv_cache, inputs.batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = model.forward(
                    inputs.token_ids, inputs.positions, inputs.slots, kv_cache, inputs.batch
                )
            self._graphs[size] = (graph, hidden)

    def run(self, step: StepInputs) -> Tensor:
        """Hidden states of a decode step of at most `max_num_seqs` sequences."""
        num_seqs = len(step.token_ids)
        size = next(size for size in sorted(self._graphs) if size >= num_seqs)
        self._static.overwrite(step)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:num_seqs]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture; the last is `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
