"""What `kernels.bench` measures: realistic shapes, each kernel beside its PyTorch baseline."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention, silu

from kernels import AttentionBatch, Ops
from kernels.rotary import rotary_reference

DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
BLOCK_SIZE = 16
EPS = 1e-5

Call = Callable[[], tuple[Tensor, ...]]


class Model(NamedTuple):
    """The shapes of a model that decide its kernels' work."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = (
    Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128),
    Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128),
)


class Span(NamedTuple):
    """Sequences that are alike within a batch."""

    sequences: int
    query_len: int
    seq_len: int


BATCHES = (
    ("decode 1 at 1k", [Span(1, 1, 1024)]),
    ("decode 1 at 8k", [Span(1, 1, 8192)]),
    ("decode 16 at 2k", [Span(16, 1, 2048)]),
    ("decode 64 at 4k", [Span(64, 1, 4096)]),
    ("decode 256 at 1k", [Span(256, 1, 1024)]),
    ("decode 256 at 4k", [Span(256, 1, 4096)]),
    ("prefill 2k", [Span(1, 2048, 2048)]),
    ("64 decodes at 2k and a 2k chunk behind 2k", [Span(64, 1, 2048), Span(1, 1984, 4032)]),
)
TOKENS = (1, 64, 256, 2048)


class Case(NamedTuple):
    """One measurement: `prepare` makes the inputs and gives the kernel and its baseline."""

    kernel: str
    model: str
    shape: str
    num_bytes: int  # the least a kernel must read and write
    prepare: Callable[[Ops, torch.device], tuple[Call, Call]]


def cases() -> list[Case]:
    """Everything that is measured, in the order of the table."""
    makers = (rms_norm_case, add_rms_norm_case, rotary_case, swiglu_case, write_kv_case)
    small = [maker(model, n) for maker in makers for model in MODELS for n in TOKENS]
    return small + [attention_case(model, *batch) for model in MODELS for batch in BATCHES]


def rms_norm_case(model: Model, tokens: int) -> Case:
    def prepare(ops: Ops, device: torch.device) -> tuple[Call, Call]:
        x, weight = _randn(device, tokens, model.hidden), _randn(device, model.hidden)
        return (
            lambda: (ops.rms_norm(x, weight, EPS),),
            lambda: (rms_norm(x, weight.shape, weight, EPS),),
        )

    num_bytes = 2 * tokens * model.hidden * ITEM
    return Case("rms_norm", model.name, f"{tokens} tokens", num_bytes, prepare)


def add_rms_norm_case(model: Model, tokens: int) -> Case:
    def prepare(ops: Ops, device: torch.device) -> tuple[Call, Call]:
        x, residual = _randn(device, 2, tokens, model.hidden)
        weight = _randn(device, model.hidden)

        def baseline() -> tuple[Tensor, ...]:
            total = residual + x
            return rms_norm(total, weight.shape, weight, EPS), total

        return lambda: ops.add_rms_norm(x, residual, weight, EPS), baseline

    num_bytes = 4 * tokens * model.hidden * ITEM
    return Case("add_rms_norm", model.name, f"{tokens} tokens", num_bytes, prepare)


def rotary_case(model: Model, tokens: int) -> Case:
    def prepare(ops: Ops, device: torch.device) -> tuple[Call, Call]:
        angle = torch.rand(tokens, model.head_dim // 2, device=device)
        cos, sin = angle.cos(), angle.sin()
        q = _randn(device, tokens, model.heads, model.head_dim)
        k = _randn(device, tokens, model.kv_heads, model.head_dim)

        def call(rotary: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> Call:
            own_q, own_k = q.clone(), k.clone()

            def rotate() -> tuple[Tensor, ...]:
                rotary(own_q, own_k, cos, sin)
                return own_q, own_k

            return rotate

        return call(ops.rotary), call(rotary_reference)

    num_bytes = 2 * tokens * (model.heads + model.kv_heads) * model.head_dim * ITEM
    return Case("rotary", model.name, f"{tokens} tokens", num_bytes, prepare)


def swiglu_case(model: Model, tokens: int) -> Case:
    def prepare(ops: Ops, device: torch.device) -> tuple[Call, Call]:
        gate_up = _randn(device, tokens, 2 * model.ffn)
        gate, up = gate_up.chunk(2, dim=-1)
        return lambda: (ops.swiglu(gate_up),), lambda: (silu(gate) * up,)

    num_bytes = 3 * tokens * model.ffn * ITEM
    return Case("swiglu", model.name, f"{tokens} tokens", num_bytes, prepare)


def write_kv_case(model: Model, tokens: int) -> Case:
    def prepare(ops: Ops, device: torch.device) -> tuple[Call, Call]:
        row = (model.kv_heads, model.head_dim)
        k, v = _randn(device, 2, tokens, *row)
        slots = torch.randperm(_blocks(4 * tokens) * BLOCK_SIZE, device=device)[:tokens]

        def caches() -> tuple[Tensor, Tensor]:
            shape = (2, _blocks(4 * tokens), BLOCK_SIZE, *row)
            k_cache, v_cache = torch.zeros(shape, dtype=DTYPE, device=device)
            return k_cache, v_cache

        ours, theirs = caches(), caches()
        flat_k, flat_v = (cache.view(-1, *row) for cache in theirs)

        def kernel() -> tuple[Tensor, ...]:
            ops.write_kv(k, v, *ours, slots)
            return ours

        def baseline() -> tuple[Tensor, ...]:
            flat_k.index_copy_(0, slots, k)
            flat_v.index_copy_(0, slots, v)
            return theirs

        return kernel, baseline

    num_bytes = 4 * tokens * model.kv_heads * model.head_dim * ITEM
    return Case("write_kv", model.name, f"{tokens} tokens", num_bytes, prepare)


def attention_case(model: Model, shape: str, spans: list[Span]) -> Case:
    """Against one SDPA call a span, over keys that already lie contiguous and unpaged."""
    tokens = sum(span.sequences * span.query_len for span in spans)
    keys = sum(span.sequences * span.seq_len for span in spans)

    def prepare(ops: Ops, device: torch.device) -> tuple[Call, Call]:
        batch = attention_batch(spans, device)
        blocks = int(batch.block_tables.max()) + 1
        caches = _randn(device, 2, blocks, BLOCK_SIZE, model.kv_heads, model.head_dim)
        q = _randn(device, tokens, model.heads, model.head_dim)
        scale = model.head_dim**-0.5
        parts = [_sdpa(*part, scale) for part in _unpaged(spans, batch, q, caches)]
        return (
            lambda: (ops.paged_attention(q, caches[0], caches[1], batch, scale),),
            lambda: tuple(part() for part in parts),
        )

    num_bytes = 2 * (keys * model.kv_heads + tokens * model.heads) * model.head_dim * ITEM
    return Case("paged_attention", model.name, shape, num_bytes, prepare)


def attention_batch(spans: list[Span], device: torch.device) -> AttentionBatch:
    """A batch whose blocks lie scattered over the cache."""
    lengths = [(span.query_len, span.seq_len) for span in spans for _ in range(span.sequences)]
    query_lens, seq_lens = torch.tensor(lengths, dtype=torch.int32).T.contiguous()
    longest = int(seq_lens.max())
    tables = torch.randperm(len(lengths) * _blocks(longest)).view(len(lengths), -1)
    starts = pad(query_lens.cumsum(0), (1, 0))
    return AttentionBatch(
        block_tables=tables.int().to(device),
        query_start=starts.int().to(device),
        seq_lens=seq_lens.to(device),
        max_query_len=int(query_lens.max()),
        max_seq_len=longest,
    )


def _unpaged(
    spans: list[Span], batch: AttentionBatch, q: Tensor, caches: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of each span as SDPA takes them: [count, heads, length, D]."""
    parts = []
    sequence = token = 0
    for count, query_len, seq_len in spans:
        tables = batch.block_tables[sequence : sequence + count, : _blocks(seq_len)].long()
        k, v = caches[:, tables].flatten(2, 3)[:, :, :seq_len].transpose(2, 3).contiguous()
        rows = q[token : token + count * query_len].view(count, query_len, *q.shape[1:])
        parts.append((rows.transpose(1, 2), k, v))
        sequence += count
        token += count * query_len
    return parts


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
    """A call that attends one span and gives its rows as [count * query_len, heads, D]."""
    query_len = q.shape[2]
    mask = causal_lower_right(query_len, k.shape[2]) if query_len > 1 else None

    def attend() -> Tensor:
        out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def _randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
