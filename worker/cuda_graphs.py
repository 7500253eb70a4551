"""Decode steps as CUDA graphs: one launch for the whole model instead of hundreds.

A graph replays on the very tensors it was captured with, so a step is copied into static
ones, padded to the next captured size. A padding row is a sequence of length 0 whose KV
goes nowhere (slot -1); the kernels skip it.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from worker.model import Model
from worker.step import Step

LARGEST_GRAPH = 512  # sequences; larger steps are long enough to hide their launches


class DecodeGraphs:
    """Graphs of a model's decode step for batch sizes 1, 2, 4, 8, 16, 32, ... `max_num_seqs`."""

    def __init__(self, model: Model, kv_cache: Tensor, max_num_seqs: int, max_seq_len: int) -> None:
        self.sizes = graph_sizes(min(max_num_seqs, LARGEST_GRAPH))
        max_blocks = -(-max_seq_len // kv_cache.shape[3])
        self._static = Step.decode_padding(self.sizes[-1], max_blocks, max_seq_len, model.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):  # largest first: they share its memory
            step = self._static.head(size)
            model.forward(step, kv_cache)  # compiles what is not compiled yet
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = model.forward(step, kv_cache)
            self._graphs[size] = (graph, hidden)

    def takes(self, step: Step) -> bool:
        """Whether this is a decode step of a size that was captured."""
        return step.batch.max_query_len == 1 and len(step.token_ids) <= self.sizes[-1]

    def run(self, step: Step) -> Tensor:
        """Hidden states of a step that `takes` accepts."""
        num_seqs = len(step.token_ids)
        self._static.overwrite(step)
        graph, hidden = self._graphs[self.sizes[bisect_left(self.sizes, num_seqs)]]
        graph.replay()
        return hidden[:num_seqs]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture; the last is `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
