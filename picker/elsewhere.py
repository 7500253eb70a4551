"""What other pickers of the pool have on one pod, beside what we have there ourselves."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_UNSEEN = 64  # pieces of news of one picker that are told apart


class Share(NamedTuple):
    """What one picker has on a pod."""

    requests: int = 0  # that have not ended
    tokens: int = 0  # of their prompts, before their first tokens
    sent: int = 0  # requests ever
    waiting: int = 0  # of these: unanswered, and seen by no scrape of that picker
    age: float = 0.0  # seconds since the last of them was sent


class _Other:
    """One other picker's share, and what of it no scrape of ours has seen."""

    __slots__ = ("share", "unseen")

    def __init__(self) -> None:
        self.share = Share()
        self.unseen: deque[tuple[float, int]] = deque()  # when how many requests were sent

    def told(self, share: Share, now: float, scraped: float) -> int:
        new = share.sent - self.share.sent
        if new < 0:  # it counts anew
            new = share.waiting
        self.share = share
        sent = now - max(0.0, share.age)
        if new > 0 and sent > scraped:
            self.unseen.append((sent, new))
            if len(self.unseen) > MAX_UNSEEN:
                (_, first), (sent, second) = self.unseen.popleft(), self.unseen.popleft()
                self.unseen.appendleft((sent, first + second))
        return new

    def seen(self, began: float) -> None:
        while self.unseen and self.unseen[0][0] <= began:
            self.unseen.popleft()

    @property
    def waiting(self) -> int:
        """Whichever picker's scrapes have seen more of them knows best."""
        return min(self.share.waiting, sum(count for _, count in self.unseen))


class Elsewhere:
    """The shares of all other pickers. The sums are what a pod has beside our own requests."""

    __slots__ = ("_others", "requests", "tokens", "waiting")

    def __init__(self) -> None:
        self._others: dict[int, _Other] = {}  # by replica
        self.requests = 0
        self.tokens = 0
        self.waiting = 0

    def told(self, replica: int, share: Share | None, now: float, scraped: float) -> bool:
        """A picker's share is this from now on; None: it is gone. Returns whether it sent more.

        `scraped`: when our last scrape that was answered began, by the same clock as `now`.
        """
        new = 0
        if share is None:
            self._others.pop(replica, None)
        else:
            new = self._others.setdefault(replica, _Other()).told(share, now, scraped)
        self._add_up()
        return new > 0

    def seen(self, began: float) -> None:
        """A scrape that began at `began` has told of all that was sent before."""
        for other in self._others.values():
            other.seen(began)
        self._add_up()

    def _add_up(self) -> None:
        shares = [other.share for other in self._others.values()]
        self.requests = sum(share.requests for share in shares)
        self.tokens = sum(share.tokens for share in shares)
        self.waiting = sum(other.waiting for other in self._others.values())
