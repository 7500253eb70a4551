"""What `warmpath work` was told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """The flags of `warmpath work`, by name; None where the default depends on the model."""

    model: str | None
    served_model_names: tuple[str, ...]
    host: str
    port: int
    advertise_host: str | None
    dtype: str
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_num_queued_reqs: int
    block_size: int
    num_blocks: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    preallocate: bool
    api_key: str | None
    kv_events: bool
    kv_events_port: int
    kv_replay_port: int
    simulate: str | None
    seed: int
    max_body_bytes: int
    drain_seconds: float
