"""The lean profile's open picks: from the picker's answer to the end of the response.

A pick is answered over HTTP, and its end is told by Envoy's access log: they meet by a name that
Envoy makes for each request. What can go wrong between the two is settled here:

* An entry comes about each running request every half second, and renews its ticket. One that is
  not renewed belongs to an Envoy that died, or to a log that was lost, and ends as aborted.
* The end can be told before the pick is asked for, when a client leaves at once and the question
  waits in a socket. Names that ended lately are remembered, so that such a pick ends as it opens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from picker.director import Outcome
from picker.usage import Usage

log = logging.getLogger(__name__)

MAX_OPEN = 100_000
MAX_ENDED = 4096  # names that are remembered
LEASE = 20  # sweeps without news, after which a ticket ends


class Pick(Protocol):
    """What a ticket stands for; `director.Pick` in full."""

    def response_started(self, status: int, served_by: str | None = None) -> None: ...
    def first_token(self, after: float | None = None) -> None: ...
    def end(
        self, outcome: Outcome, usage: Usage | None = None, *, after: float | None = None
    ) -> None: ...


@dataclass(slots=True)
class _Ticket:
    pick: Pick
    renewed: int  # the sweep before which news last came


class Tickets:
    """Open picks by the name of their request, the one with the oldest news first."""

    def __init__(self, *, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: dict[str, _Ticket] = {}
        self._ended: dict[str, None] = {}
        self._sweeps = 0
        self._told = False  # whether any news ever came

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: str, pick: Pick) -> None:
        """A request was sent on its way."""
        if name in self._ended:
            pick.end(Outcome.ABORTED)
            return
        if (asked_before := self._open.pop(name, None)) is not None:
            asked_before.pick.end(Outcome.ABORTED)
        elif len(self._open) >= self._max_open:
            self._drop_oldest()
        self._open[name] = _Ticket(pick, self._sweeps)

    def renew(self, name: str) -> Pick | None:
        """The request goes on. None when there is no ticket of that name."""
        self._told = True
        ticket = self._open.pop(name, None)
        if ticket is None:
            return None
        ticket.renewed = self._sweeps
        self._open[name] = ticket
        return ticket.pick

    def close(self, name: str) -> Pick | None:
        """The request is over: whoever calls this ends the pick. None: see `ended_early`."""
        self._told = True
        ticket = self._open.pop(name, None)
        return None if ticket is None else ticket.pick

    def ended_early(self, name: str) -> None:
        """The request is over, and may be asked about all the same."""
        self._ended[name] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def sweep(self) -> None:
        """End what had no news for LEASE sweeps.

        Sweeps are counted instead of seconds: a picker that was held up for a while first hears
        what came meanwhile.
        """
        self._sweeps += 1
        lost = 0
        while self._open:
            oldest = next(iter(self._open.values()))
            if self._sweeps - oldest.renewed <= LEASE:
                break
            self._drop_oldest()
            lost += 1
        if lost:
            hint = "" if self._told else ": does Envoy send its access log to the gRPC port?"
            log.warning("Envoy told nothing more about %d requests%s", lost, hint)

    def abandon(self) -> None:
        """End all."""
        while self._open:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).pick.end(Outcome.ABORTED)
