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

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache holds."""
        if self.block_size is None or self.num_blocks is None:
            return None
        return self.block_size * self.num_blocks

    @property
    def missing(self) -> list[str]:
        """What scorers need and the page does not tell."""
        told = {"waiting": self.waiting, "running": self.running, "kv_usage": self.kv_usage}
        return [name for name, value in told.items() if value is None]
