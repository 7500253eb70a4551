"""Where the fewest of our own requests are."""

from __future__ import annotations

from dataclasses import dataclass

from scorers.pods import Column, Pods, Request
from scorers.scale import behind


@dataclass(frozen=True, slots=True)
class Inflight:
    """1 - (requests - least) / span, over our own requests that have not ended; 0 from `span` on.

    Known at once, where queue and running lag by a scrape. llm-d's active-request-scorer counts
    the same, but relative to the most loaded candidate; here one request more weighs the same
    whatever the others do.
    """

    span: float = 64.0  # requests more than the least loaded candidate has

    def __post_init__(self) -> None:
        if not self.span > 0:
            raise ValueError("span must be above 0")

    def score(self, request: Request, pods: Pods) -> Column:
        return behind(pods.inflight, self.span)
