"""What the metrics pages of model servers say about load."""

from __future__ import annotations

from dataclasses import dataclass

from scorers.pods import Adapters


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One reading of a pod's metrics page. None where the page does not tell."""

    waiting: float | None = None  # requests in the queue
    running: float | None = None  # requests in the batch
    kv_usage: float | None = None  # 0 to 1
    block_size: int | None = None  # tokens of a KV block
    num_blocks: int | None = None  # KV blocks of the pod
    adapters: Adapters | None = None
