"""The last picks, for people who ask why a request went where it went."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any

from scorers.pods import Column

if TYPE_CHECKING:
    from picker.director import Pick

SIZE = 1024
MAX_ROWS = 200_000  # candidates of all picks that are kept, each with all its scores


class Journal:
    """The last picks, oldest first. They go on changing until their requests end.

    It keeps no prompt, and of the headers only the request's id.
    """

    def __init__(self, size: int = SIZE, max_rows: int = MAX_ROWS) -> None:
        """
        Args:
            size: picks to keep.
            max_rows: candidates to keep, over all picks: with many pods there are fewer picks.
        """
        self._picks: deque[Pick] = deque()
        self._size = size
        self._max_rows = max_rows
        self._rows = 0

    def __len__(self) -> int:
        return len(self._picks)

    def __reversed__(self) -> Iterator[Pick]:
        """Newest first."""
        return reversed(self._picks)

    def record(self, pick: Pick) -> None:
        self._picks.append(pick)
        self._rows += len(pick.decision.candidates)
        while len(self._picks) > self._size or (
            self._rows > self._max_rows and len(self._picks) > 1
        ):
            self._rows -= len(self._picks.popleft().decision.candidates)

    def find(self, request_id: str) -> Pick | None:
        """The newest pick for a request; retries of a gateway may repeat an id."""
        return next((pick for pick in reversed(self._picks) if pick.request_id == request_id), None)


def summary(pick: Pick) -> dict[str, Any]:
    """One pick, to be written as JSON."""
    usage = pick.usage
    return {
        "requestId": pick.request_id,
        "pickedAt": pick.picked_at,  # Unix seconds
        "model": pick.asked_model,
        "targetModel": pick.model,  # another one where it was rewritten
        "path": pick.path,
        "tenant": pick.tenant,  # None where no quotas and no queue ask for it
        "waitedSeconds": pick.waited,  # None without a queue
        "endpoint": pick.endpoint.address,  # that serves it
        "picked": list(pick.decision.endpoints),  # with those to fall back to
        "promptTokens": pick.prompt_tokens,
        "matchedBy": pick.matched_by,
        "predictedTokens": pick.predicted_tokens,
        "promptBlocks": pick.prompt_blocks,
        "matchedBlocks": pick.matched_blocks,
        "usage": usage
        and {  # as the pod told
            "promptTokens": usage.prompt_tokens,
            "cachedTokens": usage.cached_tokens,
            "completionTokens": usage.completion_tokens,
        },
        "status": pick.status,
        "outcome": pick.outcome,  # None while it runs
        "firstTokenSeconds": pick.first_token_seconds,
        "seconds": pick.seconds,
    }


def detail(pick: Pick) -> dict[str, Any]:
    """One pick with its candidates' scores, best first, and what the filters dropped."""
    decision = pick.decision
    chosen, total = decision.endpoints[0], decision.total

    def place(row: int) -> tuple[float, bool]:
        return -float(total[row]), decision.candidates[row] != chosen

    return summary(pick) | {
        "considered": decision.considered,  # of which the best are kept
        "dropped": [{"filter": name, "endpoints": count} for name, count in decision.dropped],
        "weights": dict(decision.weights),
        "candidates": [
            {
                "endpoint": decision.candidates[row],
                "matchedTokens": _number(decision.matched, row),
                "scores": {name: _number(column, row) for name, column in decision.scores.items()},
                "total": _number(total, row),
            }
            for row in sorted(range(len(decision.candidates)), key=place)
        ],
    }


def _number(column: Column, row: int) -> float | None:
    """A cell; JSON knows no NaN."""
    value = float(column[row])
    return round(value, 6) if isfinite(value) else None
