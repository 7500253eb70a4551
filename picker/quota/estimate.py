"""How long an answer will be, before it is known: what to reserve of output tokens."""

from __future__ import annotations

from collections import OrderedDict

FACTOR = 0.2  # of the newest, as a mean of about five: VTC's predictor (arXiv 2401.00588, 4.4)
MAX_KNOWN = 10_000  # pairs of subject and model; those not seen for longest go first


class Outputs:
    """Means of the last answers' lengths, by subject and model.

    Args:
        default: tokens of those who had no answer yet.
    """

    def __init__(self, default: int) -> None:
        self.default = default
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expected(self, subject: str, model: str, most: int | None) -> int:
        """Tokens to reserve: the most that the request allows, else what is usual."""
        if most is not None:
            return max(0, most)
        mean = self._means.get((subject, model))
        return self.default if mean is None else round(mean)

    def learn(self, subject: str, model: str, tokens: int) -> None:
        """An answer was so long."""
        key = subject, model
        mean = self._means.get(key)
        self._means[key] = tokens if mean is None else mean + FACTOR * (tokens - mean)
        self._means.move_to_end(key)
        if len(self._means) > MAX_KNOWN:
            self._means.popitem(last=False)
