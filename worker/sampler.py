"""From logits to tokens: penalties, bias, temperature, truncation, and log-probabilities.

The order is vLLM's: log-probabilities are those of the raw logits; then bias,
penalties, bans, temperature, min-p, top-k, top-p, and one draw. A draw uses one random number
from the sequence's own generator, so a seeded answer does not depend on who else is in
the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.sequence import Sample, SamplingParams, Sequence, TokenLogprobs

HEAD = 1024  # tokens sorted for top-p and top-k before the whole vocabulary is


def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sample]:
    """Choose one token for each of R sequences.

    Args:
        logits: [R, vocab] float32; may be overwritten.
        sequences: the R sequences, in the order of the rows.
    """
    wanted = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
    raw = logits[wanted].log_softmax(-1) if wanted else None
    for row, sequence in enumerate(sequences):
        if sequence.params.adjusts_logits:
            _adjust(logits[row], sequence)
    chosen = logits.argmax(-1)
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        chosen[drawn] = _draw(logits[drawn], [sequences[row] for row in drawn])
    samples = [Sample(token_id) for token_id in chosen.tolist()]
    if raw is not None:
        num_top = [sequences[row].params.logprobs or 0 for row in wanted]
        token_ids = [samples[row].token_id for row in wanted]
        for row, entry, top in zip(
            wanted, logprobs_of(raw, token_ids, max(num_top)), num_top, strict=True
        ):
            samples[row] = Sample(entry.token_id, entry._replace(top=entry.top[:top]))
    return samples


def logprobs_of(logprobs: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """What `logprobs` [R, vocab] say of one token a row, and their `num_top` best."""
    index = torch.tensor(token_ids, device=logprobs.device)[:, None]
    values = logprobs.gather(1, index)
    ranks = (logprobs > values).sum(-1) + 1
    best, best_ids = logprobs.topk(min(num_top, logprobs.shape[1]))
    rows = zip(
        token_ids,
        values[:, 0].tolist(),
        ranks.tolist(),
        best_ids.tolist(),
        best.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(token_id, value, rank, list(zip(ids, tops, strict=True)))
        for token_id, value, rank, ids, tops in rows
    ]


def _adjust(logits: Tensor, sequence: Sequence) -> None:
    """Apply in place what concerns single tokens: bias, penalties and bans. [vocab]"""
    params = sequence.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits.index_add_(0, ids, bias.to(logits.dtype))
    if params.penalised:
        _penalise(logits, sequence, params)
    if params.stop_token_ids and sequence.num_output_tokens < params.min_tokens:
        known = [token_id for token_id in params.stop_token_ids if 0 <= token_id < len(logits)]
        logits[known] = -torch.inf


def _penalise(logits: Tensor, sequence: Sequence, params: SamplingParams) -> None:
    """Repetition penalty over prompt and output (CTRL, arXiv:1909.05858); frequency and
    presence penalties over the output, as OpenAI defines them."""
    factor = params.repetition_penalty
    if factor != 1.0:
        seen = torch.tensor(list(set(sequence.token_ids)), device=logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if output:
        produced = torch.tensor(output, device=logits.device)
        ids, counts = torch.unique(produced, return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """One token id a row, [R] int64, drawn after temperature and truncation."""
    params = [sequence.params for sequence in sequences]
    uniform = _column([sequence.rng.random() for sequence in sequences], logits, torch.float64)
    temperature = _column([p.temperature for p in params], logits)
    temperature.clamp_(max=torch.finfo(temperature.dtype).max)  # inf would make NaN of a ban
    probabilities = (logits / temperature).softmax(-1)
    floor = _column([p.min_p for p in params], logits) * probabilities.amax(-1, keepdim=True)
    probabilities.masked_fill_(probabilities < floor, 0.0)
    chosen = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    whole = [row for row, p in enumerate(params) if not p.truncates]
    if whole:
        chosen[whole] = _pick(probabilities[whole], uniform[whole])
    truncated = [row for row, p in enumerate(params) if p.truncates]
    if truncated:
        chosen[truncated] = _pick_from_head(
            probabilities[truncated],
            uniform[truncated],
            _column([params[row].top_k or logits.shape[1] for row in truncated], logits),
            _column([params[row].top_p for row in truncated], logits),
            HEAD,
        )
    return chosen


def _pick_from_head(
    probabilities: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, width: int
) -> Tensor:
    """As `_pick`, among each row's `top_k` most likely tokens and, of those, the fewest whose
    share reaches `top_p`. Sorts only `width` tokens a row, and all where those do not reach."""
    vocab = probabilities.shape[1]
    width = min(width, vocab)
    best, ids = probabilities.topk(width)
    best.masked_fill_(torch.arange(width, device=best.device) >= top_k, 0.0)
    mass = best.cumsum(-1)
    whole = torch.where(top_k < vocab, mass[:, -1:], probabilities.sum(-1, keepdim=True))
    too_few = (top_k > width) & ((top_k < vocab) | (mass[:, -1:] < top_p * whole))
    if width < vocab and bool(too_few.any()):
        return _pick_from_head(probabilities, uniform, top_k, top_p, vocab)
    beyond = mass - best >= top_p * whole
    beyond[:, 0] = False  # whatever top_p was rounded to
    best.masked_fill_(beyond, 0.0)
    return ids.gather(1, _pick(best, uniform)[:, None])[:, 0]


def _pick(shares: Tensor, uniform: Tensor) -> Tensor:
    """The column of each row's share into which its number falls; never one of share 0.

    Args:
        shares: [R, n], not negative, some positive in each row; they need not sum to 1.
        uniform: [R, 1] float64 in [0, 1).
    """
    edges = shares.double().cumsum(-1)
    total = edges[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    columns = torch.searchsorted(edges, torch.minimum(uniform * total, below), right=True)
    return columns[:, 0].clamp_(max=shares.shape[1] - 1)  # shares that are NaN have no column


def _column(values: list[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
