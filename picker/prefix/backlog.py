"""Events that were read and are not in the index yet, given out in portions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from picker.prefix.events import Cleared, Event, Removed, Stored, num_blocks

EVENTS = 512  # of one portion, at most
BLOCKS = 1024  # of one portion, about: an event of more is cut


class Backlog:
    """A queue of events. One portion of it holds the event loop for about two milliseconds."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._blocks = 0  # in these

    def __len__(self) -> int:
        return len(self._events)

    @property
    def enough(self) -> bool:
        """Whether there is a portion, so that reading may wait."""
        return self._blocks >= BLOCKS or len(self._events) >= EVENTS

    def add(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        self._blocks += sum(map(num_blocks, events))

    def clear(self) -> None:
        self._events.clear()
        self._blocks = 0

    def take(self) -> list[Event]:
        """The next portion, in order; empty when nothing is left."""
        events, room = self._events, BLOCKS
        portion: list[Event] = []
        while events and room > 0 and len(portion) < EVENTS:
            event = events.popleft()
            if not isinstance(event, Cleared):
                if len(event.hashes) > BLOCKS and _can_be_cut(event):
                    event, rest = _cut(event, BLOCKS)
                    events.appendleft(rest)
                room -= len(event.hashes)
            portion.append(event)
        self._blocks -= BLOCKS - room
        return portion


def _cut(event: Stored | Removed, blocks: int) -> tuple[Stored | Removed, Stored | Removed]:
    """An event as two that say the same: of its first `blocks` blocks, and of the others."""
    first, rest = event.hashes[:blocks], event.hashes[blocks:]
    if isinstance(event, Removed):
        return replace(event, hashes=first), replace(event, hashes=rest)
    tokens, keys = event.tokens, event.extra_keys
    border = blocks * event.block_size
    return (
        replace(event, hashes=first, tokens=tokens[:border], extra_keys=keys and keys[:blocks]),
        replace(
            event,
            hashes=rest,
            parent=first[-1],
            tokens=tokens[border:],
            extra_keys=keys and keys[blocks:],
        ),
    )


def _can_be_cut(event: Stored | Removed) -> bool:
    """Whether its lists belong together; else it is refused as a whole."""
    if isinstance(event, Removed):
        return True
    count = len(event.hashes)
    return len(event.tokens) in (0, count * event.block_size) and (
        not event.extra_keys or len(event.extra_keys) == count
    )
