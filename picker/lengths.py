"""How long a tenant's next answer will be: as long as its last ones, on average."""

from __future__ import annotations

from collections import OrderedDict, deque

LAST = 5  # answers that the mean is of, as in the VTC paper
MAX_TENANTS = 10_000  # that are remembered


class Lengths:
    """Output tokens of tenants' last answers."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, deque[int]] = OrderedDict()  # the longest unseen first

    def expected(self, tenant: str, most: int | None = None) -> int:
        """Output tokens of the tenant's next answer, which has at most so many; 0 if unknown."""
        last = self._last.get(tenant)
        if last is None:
            return 0
        mean = round(sum(last) / len(last))
        return mean if most is None else min(mean, most)

    def learn(self, tenant: str, tokens: int) -> None:
        """An answer to the tenant had so many."""
        last = self._last.get(tenant)
        if last is None:
            last = self._last[tenant] = deque(maxlen=LAST)
            if len(self._last) > MAX_TENANTS:
                self._last.popitem(last=False)
        else:
            self._last.move_to_end(tenant)
        last.append(tokens)
