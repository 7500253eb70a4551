"""Who of several pickers leads, as one of them sees it: a state machine without input or output.

All agree by one Lease that only its last reader may write. Its holder writes it again and again; to
the others it is valid for its duration from when *they* saw it change, by their own clocks. The
holder believes itself for less, the deadline, from when it *asked* for its last write. So however
long messages take, and whatever the clocks show, nobody leads beside another as long as no clock
runs faster than another by more than the duration exceeds the deadline. (That is what client-go's
leader election keeps to, too, and both can take part in one election.)

Times are seconds of a clock that never jumps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST = 3600.0  # seconds that another's lease is believed
SHORTEST = 1.0


@dataclass(frozen=True, slots=True)
class Lease:
    """What a Lease says."""

    holder: str = ""  # "": nobody
    duration: float = 0.0  # seconds that it is valid from when it was seen to change
    version: str = ""  # of the object, by which it is replaced; "": there is none yet
    transitions: int = 0  # times that its holder changed
    acquired: str = ""  # since when the holder has it, as written there


NOBODY = Lease()  # there is none


class Election:
    """One candidate's view. It writes only what `proposal` or `resignation` says."""

    def __init__(self, identity: str, *, duration: float, deadline: float) -> None:
        """
        Args:
            identity: that no other candidate has or had.
            duration: seconds that others have to wait for us when we are gone; whole ones.
            deadline: seconds that we believe ourselves without having written; less than that.
        """
        self.identity = identity
        self._duration = duration
        self._deadline = deadline
        self._seen: Lease | None = None  # as read or written last; None: nothing yet
        self._changed_at = -math.inf  # when it was seen to change
        self._until = -math.inf  # that we lead

    def leads(self, now: float) -> bool:
        return now < self._until

    @property
    def until(self) -> float:
        """When we cease to lead unless the lease is written before; in the past: we do not."""
        return self._until

    @property
    def holder(self) -> str:
        """Who holds the lease as far as is known; "": nobody."""
        return "" if self._seen is None else self._seen.holder

    def read(self, lease: Lease, now: float) -> None:
        """The lease is so; the answer came `now`. NOBODY: there is none."""
        if self._seen is None or lease.version != self._seen.version:
            self._seen, self._changed_at = lease, now
        if lease.holder != self.identity:
            self._until = -math.inf  # somebody took it, or took it away from us

    def proposal(self, now: float) -> Lease | None:
        """What to write now, in the place of what was seen; None: nothing, somebody holds it."""
        seen = self._seen
        if seen is None:
            return None
        mine = seen.holder == self.identity
        if seen.holder and not mine:
            valid = min(max(seen.duration, SHORTEST), LONGEST)
            if now < self._changed_at + valid:
                return None
        return Lease(
            self.identity,
            self._duration,
            seen.version,
            seen.transitions + (not mine and seen.version != ""),
            seen.acquired if mine else "",
        )

    def wrote(self, lease: Lease, asked: float, now: float) -> None:
        """A proposal, sent when it was `asked`, was taken, and so the lease is `now`."""
        self._seen, self._changed_at = lease, now
        if lease.holder == self.identity:
            self._until = max(self._until, asked + self._deadline)

    def resign(self) -> Lease | None:
        """Lead no more. What to write so that others need not wait; None: nothing."""
        seen, self._until = self._seen, -math.inf
        if seen is None or seen.holder != self.identity:
            return None
        return Lease("", SHORTEST, seen.version, seen.transitions, "")
