"""What became of KV events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """What became of events, in blocks, ever."""

    stored: int = 0
    removed: int = 0
    unknown_removed: int = 0  # not held: told of before we listened, evicted here, or never
    skipped: int = 0  # of groups without full attention
    unresolved: int = 0  # stored without token ids, under hashes that are not known
    refused: Counter[str] = field(default_factory=Counter)  # by reason

    def refuse(self, reason: str, blocks: int) -> None:
        if blocks:
            self.refused[reason] += blocks
