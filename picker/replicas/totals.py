"""What each tenant got here, in all: counts that others compare with what they were told before."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_TENANTS = 100_000  # with their priorities; beyond that the longest unserved are forgotten

Who = tuple[int, str]  # priority and tenant


def _new_life() -> int:
    return secrets.randbits(64)


@dataclass(slots=True)
class Total:
    """Of one tenant at one priority."""

    service: float = 0.0  # over the tenant's weight
    requests: int = 0
    life: int = field(default_factory=_new_life)  # another one than of a total forgotten before


class Totals:
    """By priority and tenant. They only end by being forgotten, and then begin another life."""

    def __init__(self) -> None:
        self._totals: OrderedDict[Who, Total] = OrderedDict()  # the longest unserved first

    def charge(self, who: Who, more: float, *, goes: bool) -> None:
        """A tenant's service grew, by less than 0 for a refund; `goes`: of a new request."""
        total = self._totals.get(who)
        if total is None:
            total = self._totals[who] = Total()
            if len(self._totals) > MAX_TENANTS:
                self._totals.popitem(last=False)
        else:
            self._totals.move_to_end(who)
        total.service += more
        total.requests += goes

    def find(self, who: Who) -> Total | None:
        return self._totals.get(who)
