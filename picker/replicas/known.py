"""The parts of a picker that share what they know, and how pods are named among pickers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from picker.flow import Flow
from picker.load import Load
from picker.pool import Endpoint, Pool
from picker.prefix.approximate import ApproximatePrefix
from picker.prefix.index import BlockIndex
from picker.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Known:
    """What there is to share."""

    pool: Pool
    load: Load
    prompts: ApproximatePrefix
    sessions: Sessions
    flow: Flow | None = None
    index: BlockIndex | None = None  # of KV events
    index_naming: int = 0  # equal numbers mean that its keys are another's; 0: nobody's

    def find(self, pod: Any) -> Endpoint | None:
        """The endpoint that a message `Pod` means, if it is in our pool."""
        endpoint = self.pool.endpoints.get(pod.address)
        if endpoint is None or not same(pod.incarnation, endpoint.incarnation):
            return None
        return endpoint


def same(one: str, other: str) -> bool:
    """Whether two incarnations may be of one pod."""
    return one == other or not one or not other
