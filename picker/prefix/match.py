"""What is known of a prompt: on which pods it begins warm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picker.pool import Endpoint
from picker.request import LLMRequest
from scorers.pods import Column


class By(StrEnum):
    """What a prompt was compared with."""

    EVENTS = "events"  # its tokens, with what pods told that they hold
    APPROXIMATE = "approximate"  # its bytes, with what was sent where
    NONE = "none"  # nothing: there is no prompt


@dataclass(slots=True, eq=False)
class Match:
    """Where a prompt is expected to be cached. Columns are by slot, as long as pool.capacity."""

    tokens: Column  # leading prompt tokens that a pod holds; in slow memory they count less
    cached: Column  # the same, each counted as one: what its engine should find
    blocks: NDArray[np.int32]  # leading blocks
    num_blocks: int  # of the prompt
    by: By
    mark: Any  # by which its producer knows the prompt
    guessed: frozenset[int] = frozenset()  # slots of pods that tell nothing: matched by bytes

    def by_of(self, slot: int) -> By:
        """What the prompt was compared with for one pod."""
        return By.APPROXIMATE if slot in self.guessed else self.by


Prepare = Callable[[], Awaitable[None]]
"""It raises nothing. Until it is called nothing has begun, so that it may be left."""


class PrefixProducer(Protocol):
    """Knows who holds what. The director asks it before each pick, and tells it afterwards."""

    async def start(self) -> None:
        """Begin to learn. Raises ConfigError where something that the settings name is missing."""

    async def first_round(self) -> None:
        """Wait until every pod that tells what it holds has done so, but not for long."""

    async def stop(self) -> None:
        """Let go of all that `start` took."""

    def prepare(self, request: LLMRequest) -> Prepare | None:
        """What `match` has to wait for, to be called and awaited; None: nothing."""

    def match(self, request: LLMRequest) -> Match:
        """How much of a prompt each pod holds, from its beginning on."""

    def learn(self, match: Match, endpoint: Endpoint) -> Any:
        """An endpoint was picked for a prompt. Returns this use of it, for `moved`."""

    def moved(self, use: Any, picked: Endpoint, served: Endpoint) -> tuple[int, int]:
        """Another endpoint than the picked one serves a prompt.

        Returns:
            Leading blocks of it, and leading tokens, that the serving one held before.
        """

    def resized(self, endpoint: Endpoint, kv_tokens: int) -> None:
        """An endpoint has told the size of its KV cache, in tokens."""

    @property
    def blocks(self) -> int:
        """Blocks that all pods hold together: one held by two pods counts twice."""
