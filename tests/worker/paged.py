"""A model over paged memory, driven by hand."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from worker.model import Model
from worker.step import Step

SIZE = 4  # tokens a block
GARBAGE = 1e4  # what unused memory holds, so that reading it shows


class Paged:
    """Computes any share of any sequences, whose blocks lie in no order."""

    def __init__(self, model: Model, num_blocks: int = 64) -> None:
        self.model = model
        self.kv_cache = model.new_kv_cache(num_blocks, SIZE).fill_(GARBAGE)
        self._free = list(range(num_blocks))
        Random(0).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    @torch.inference_mode()
    def compute(self, shares: dict[str, list[int]]) -> list[Tensor]:
        """The logits after each of the next tokens of some sequences: [tokens, vocab] for each."""
        step = self.plan(shares)
        hidden = self.forward(step)
        logits = self.model.logits(hidden)
        return list(logits.split([len(tokens) for tokens in shares.values()]))

    def forward(self, step: Step) -> Tensor:
        return self.model.forward(step, self.kv_cache)

    def plan(self, shares: dict[str, list[int]]) -> Step:
        """Give the tokens their places."""
        positions: list[int] = []
        slots: list[int] = []
        for name, tokens in shares.items():
            table = self._tables.setdefault(name, [])
            start = self._lengths.get(name, 0)
            self._lengths[name] = end = start + len(tokens)
            while len(table) * SIZE < end:
                table.append(self._free.pop())
            positions += range(start, end)
            slots += [table[i // SIZE] * SIZE + i % SIZE for i in range(start, end)]
        counts = [len(tokens) for tokens in shares.values()]
        lengths = [self._lengths[name] for name in shares]
        width = max(len(self._tables[name]) for name in shares)
        tables = [self._tables[name] for name in shares]
        return Step(
            torch.tensor([token for tokens in shares.values() for token in tokens]),
            torch.tensor(positions),
            torch.tensor(slots),
            AttentionBatch(
                block_tables=torch.tensor(
                    [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
                ),
                query_start=torch.tensor([0, *counts]).cumsum(0).int(),
                seq_lens=torch.tensor(lengths, dtype=torch.int32),
                max_query_len=max(counts),
                max_seq_len=max(lengths),
            ),
        )
