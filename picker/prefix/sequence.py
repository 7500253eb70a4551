"""The order of one publisher's batches: which are due, missing, told twice, or of another process.

A publisher numbers its batches from 0. Live ones may be lost; a replay brings the latest again, as
far back as the publisher keeps them. What has been applied is, at all times, an unbroken run of one
process's batches: where that cannot be had, all is forgotten and a new run begins.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

MAX_HELD = 100_000  # live batches that wait for a replay
MAX_HELD_BYTES = 64 << 20
MAX_ANSWERS = 200_000  # of replays in a row; publishers keep 10,000 batches unless told otherwise


class Follower(Protocol):
    """Does what a sequence finds right."""

    def apply(self, payload: bytes) -> None:
        """This batch is next."""

    def forget(self) -> None:
        """What was applied so far is not known to be true any more."""

    def ask(self, first: int) -> None:
        """Begin a replay from this number on, instead of one that runs.

        It ends with `replay_ended` or `replay_failed`, or when `replaying` is False.
        """


@dataclass(slots=True)
class Counts:
    """What a sequence has seen; all grow."""

    gaps: int = 0  # live batches that did not follow the one before
    replays: int = 0  # asked for
    failed_replays: int = 0
    restarts: int = 0  # times that the publisher was found to be another process
    forgotten: int = 0  # times that all was forgotten: restarts, and batches lost for good


class Sequence:
    """Live batches go in by `live`, those of a replay by `replayed`; `advance` applies one.

    Every replay begins with the batch that was applied last. If that comes back as it was, what
    follows belongs to the same process, however often the connection was lost in between. Live
    batches wait meanwhile. For this to hold,

    - `reconnected` is called before the first live batch of a new connection comes in, and
    - live batches that are here come in before answers.

    A publisher that replays nothing can only be believed: that it is another process is seen when
    its numbers fall, and the first that does not follow the one before ends the run.
    """

    def __init__(self, follower: Follower, *, replayable: bool) -> None:
        self.counts = Counts()
        self.replaying = False
        self._follower = follower
        self._replayable = replayable
        self._due: int | None = None  # the next number; None: any, since nothing is known
        self._last = b""  # the batch before that
        self._newest = -1  # number of the latest live batch of this process
        self._held: deque[tuple[int, bytes]] = deque()  # live, not yet looked at
        self._held_bytes = 0
        self._doubted = False  # reconnected since anything was proven
        # Of the running or latest replay:
        self._sought = -1  # the latest live number when it was asked for
        self._proven = False  # it is of the process that the last batch was of, if there was one
        self._moved = False  # it has brought something new
        self._holed = False  # it left something out after that, and is heard no more
        self._stale = False  # reconnected since it was asked for
        self._answers = 0  # of it and those right before it

    # What comes in

    def live(self, number: int, payload: bytes) -> None:
        """A live batch came. Live numbers only fall when the publisher is a new process."""
        if number <= self._newest:
            self._restart()
        self._newest = number
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        too_many = len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES
        if too_many and self.replaying:
            self._give_up()

    def advance(self) -> bool:
        """Look at one live batch. False: there is none, or a replay must end first."""
        if self.replaying or not self._held:
            return False
        number, payload = self._held[0]
        due = self._due
        missing = due is not None and number > due
        if number > self._sought and (missing or (due is None and self._replayable)):
            self.counts.gaps += missing
            if self._replayable:
                self._ask()
                return True
        self._held.popleft()
        self._held_bytes -= len(payload)
        if due is None or number >= due:
            self._take(number, payload)
        return True

    def reconnected(self) -> None:
        """The next live batch may be of another process, and some may have been missed."""
        if self.replaying:
            self._doubted = self._stale = True
        elif self._replayable:
            self._doubted = True
            self._ask()

    def check(self) -> None:
        """Ask whether anything was missed."""
        if self._replayable and not self.replaying:
            self._ask()

    def replayed(self, number: int, payload: bytes) -> None:
        """A batch of the running replay came."""
        if not self.replaying:
            return
        self._answers += 1
        if self._answers > MAX_ANSWERS:
            self._give_up()
            return
        if not self._proven:
            assert self._due is not None
            if number < self._due - 1:
                return
            if number == self._due - 1 and payload != self._last:
                self._restart()
                return
            self._proven, self._doubted = True, self._stale
            if number >= self._due:
                self._begin_anew()  # the batch that was applied last is no longer kept: no proof
        due = self._due
        if due is not None and number > due and self._moved:
            self._holed = True
        if not self._holed and (due is None or number >= due):
            self._take(number, payload)
            self._moved = True

    def replay_ended(self) -> None:
        """The publisher has sent all that it keeps."""
        if not self.replaying:
            return
        if not self._proven:
            self._restart()  # it does not know what we applied last
        elif self._holed or self._stale:
            self._ask()  # where answers got lost, the same again brings more
        else:
            self._end()

    def replay_failed(self) -> None:
        """The publisher does not answer, or stopped in the middle."""
        if not self.replaying:
            return
        if self._moved:
            self.counts.failed_replays += 1
            self._ask()
        else:
            self._give_up()

    # What follows from it

    def _take(self, number: int, payload: bytes) -> None:
        if number != self._due:
            self._forget()
        self._due = number + 1
        self._last = payload
        self._follower.apply(payload)

    def _ask(self) -> None:
        self.counts.replays += 1
        self.replaying = True
        self._sought = self._newest
        self._proven = self._due is None  # there is nothing to prove
        if self._proven:
            self._doubted = False
        self._moved = self._holed = self._stale = False
        self._follower.ask(0 if self._due is None else self._due - 1)

    def _give_up(self) -> None:
        """Go on with what is live, whatever is missing before it."""
        self.counts.failed_replays += 1
        if self._doubted:
            self._begin_anew()
        self._sought = self._newest
        self._end()

    def _end(self) -> None:
        self.replaying = self._doubted = False
        self._answers = 0

    def _restart(self) -> None:
        """The publisher is another process. A replay brings all that it has sent so far."""
        self.counts.restarts += 1
        self._begin_anew()
        if self._replayable:
            self._ask()

    def _begin_anew(self) -> None:
        """Nothing is known, and live batches that wait may be of a process that is no more."""
        self._forget()
        self._newest = -1
        self._held.clear()
        self._held_bytes = 0

    def _forget(self) -> None:
        if self._due is not None:
            self.counts.forgotten += 1
            self._due = None
            self._last = b""
            self._follower.forget()
