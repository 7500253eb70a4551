"""Runs steps on a real model: from scheduled sequences to tensors, and back to tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from worker.config import EngineConfig
from worker.cuda_graphs import DecodeGraphs
from worker.model import Model
from worker.sampler import logprobs_of, sample
from worker.scheduler import Scheduled
from worker.sequence import Sample, Sequence
from worker.step import Step

ROWS_SCORED_AT_ONCE = 128  # bounds the memory of a long prompt's logits: rows * vocab * 4 bytes
CPU_WARM_UP_TOKENS = 64


class ModelRunner:
    """Owns the model and its KV memory."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._kv_cache = model.new_kv_cache(config.num_blocks, config.block_size)
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a step that leaves no trace, so that the first request meets compiled kernels and
        touched memory; on a GPU the largest step, then capture the decode graphs."""
        config, on_gpu = self._config, self._model.device.type == "cuda"
        num_tokens = config.max_num_batched_tokens if on_gpu else CPU_WARM_UP_TOKENS
        num_tokens = min(num_tokens, config.max_model_len)
        step = Step(
            token_ids=self._int64([0] * num_tokens),
            positions=self._int64(list(range(num_tokens))),
            slots=self._int64([-1] * num_tokens),
            batch=AttentionBatch(
                block_tables=self._int32([0] * -(-num_tokens // config.block_size))[None],
                query_start=self._int32([0, num_tokens]),
                seq_lens=self._int32([num_tokens]),
                max_query_len=num_tokens,
                max_seq_len=num_tokens,
            ),
        )
        logits = self._model.logits(self._forward(step)[-1:])
        if not torch.isfinite(logits).all():
            raise ValueError("the model computes no finite numbers: its file is damaged")
        if on_gpu:
            self._graphs = DecodeGraphs(
                self._model, self._kv_cache, config.max_num_seqs, config.max_model_len
            )

    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[Sample]:
        hidden = self._forward(self._inputs(batch))
        rows: list[int] = []  # of the tokens after which one is sampled
        sequences: list[Sequence] = []
        end = 0
        for sequence, num_tokens in batch:
            end += num_tokens
            if sequence.needs_prompt_logits:
                self._score_prompt(sequence, hidden[end - num_tokens : end])
            if sequence.num_computed_tokens == len(sequence.token_ids):
                rows.append(end - 1)
                sequences.append(sequence)
        if not rows:
            return []
        return sample(self._model.logits(hidden[rows]), sequences)

    def _forward(self, step: Step) -> Tensor:
        if self._graphs is not None and self._graphs.takes(step):
            return self._graphs.run(step)
        return self._model.forward(step, self._kv_cache)

    def _inputs(self, batch: list[Scheduled]) -> Step:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        seq_lens: list[int] = []
        size = self._config.block_size
        for sequence, num_tokens in batch:
            end = sequence.num_computed_tokens
            start = end - num_tokens
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            table = sequence.block_ids
            slots += [table[i // size] * size + i % size for i in range(start, end)]
            query_start.append(len(token_ids))
            seq_lens.append(end)
        return Step(
            self._int64(token_ids),
            self._int64(positions),
            self._int64(slots),
            AttentionBatch(
                block_tables=self._block_tables(batch),
                query_start=self._int32(query_start),
                seq_lens=self._int32(seq_lens),
                max_query_len=max(num_tokens for _, num_tokens in batch),
                max_seq_len=max(seq_lens),
            ),
        )

    def _score_prompt(self, sequence: Sequence, hidden: Tensor) -> None:
        """Add the log-probabilities that the hidden states of a chunk give its next tokens."""
        num_top = sequence.params.prompt_logprobs
        assert num_top is not None
        end = sequence.num_computed_tokens
        start = end - len(hidden)
        if start == 0 or sequence.prompt_logprobs is None:
            sequence.prompt_logprobs = [None]  # nothing predicts the first token
        following = sequence.token_ids[start + 1 : end + 1]
        for first in range(0, len(following), ROWS_SCORED_AT_ONCE):
            some = following[first : first + ROWS_SCORED_AT_ONCE]
            logits = self._model.logits(hidden[first : first + len(some)])
            sequence.prompt_logprobs += logprobs_of(logits.log_softmax(-1), some, num_top)

    def _block_tables(self, batch: list[Scheduled]) -> Tensor:
        """The sequences' block tables, padded with block 0: [S, max_blocks] int32."""
        width = max(len(sequence.block_ids) for sequence, _ in batch)
        tables = np.zeros((len(batch), width), dtype=np.int32)
        for row, (sequence, _) in zip(tables, batch, strict=True):
            row[: len(sequence.block_ids)] = sequence.block_ids
        return torch.from_numpy(tables).to(self._model.device)

    def _int64(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._model.device)
