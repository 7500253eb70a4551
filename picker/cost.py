"""What serving a request costs: the measure of service that tenants share.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), sections 3.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Cost = Callable[[int, int], float]
"""Prompt tokens and output tokens -> cost. It must not fall when either grows."""


@dataclass(frozen=True, slots=True)
class TokenCost:
    """input*p + output*o + product*p*o + output_squared*o² + request, of p prompt and o output
    tokens. The default is the paper's: an output token costs twice an input token."""

    input: float = 1.0
    output: float = 2.0
    product: float = 0.0
    output_squared: float = 0.0
    request: float = 0.0

    def __call__(self, prompt_tokens: int, output_tokens: int) -> float:
        cost = self.input * prompt_tokens + self.output * output_tokens + self.request
        if self.product or self.output_squared:
            cost += output_tokens * (
                self.product * prompt_tokens + self.output_squared * output_tokens
            )
        return cost

    def most(self, tokens: float, requests: int) -> float:
        """No requests, of which there are at most so many with at most so many tokens, cost more.

        With what the pods hold at once this is U of the paper: the counters of two tenants that
        wait never differ by more (lemma 4.3), and the service of two that wait all the time never
        by more than 2U, over any interval (theorem 4.4).
        """
        return (
            max(self.input, self.output) * tokens
            + (self.product / 4 + self.output_squared) * tokens * tokens
            + self.request * requests
        )


PROFILED = TokenCost(2.1, 1.0, 0.04, 0.032, 11.46)
"""The time that Llama-2-7b took on an A10G, as the paper fitted it."""
