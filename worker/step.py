"""A step as the model takes it: tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one step, sequence after sequence, and where their KV goes."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, each token's place in its sequence
    slots: Tensor  # [T] int64, block * block_size + offset; -1: nowhere
    batch: AttentionBatch  # which tokens belong together, and where their context lies

    @staticmethod
    def decode_padding(
        num_seqs: int, max_blocks: int, max_seq_len: int, device: torch.device
    ) -> Step:
        """A decode step of `num_seqs` padding rows, one query each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Step(
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

    def head(self, num_seqs: int) -> Step:
        """The first `num_seqs` rows of a decode step, sharing memory with it."""
        batch = self.batch
        return Step(
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

    def overwrite(self, step: Step) -> None:
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
