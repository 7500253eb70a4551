"""Events come out of the backlog as they went in, in portions that do not hold the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.prefix import backlog
from picker.prefix.backlog import Backlog
from picker.prefix.events import Cleared, Event, Removed, Stored

SIZE = 2
BLOCKS = 8


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BLOCKS", BLOCKS)
    monkeypatch.setattr(backlog, "EVENTS", 4)


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(["stored", "copied", "removed", "cleared"]))
    count = draw(st.integers(0, 30))
    hashes = [draw(st.integers(0, 2**32)) * 100 + i for i in range(count)]
    if kind == "cleared":
        return Cleared()
    if kind == "removed":
        return Removed(hashes, "GPU", 1)
    tokens = list(range(count * SIZE)) if kind == "stored" else []
    keys: Any = draw(st.sampled_from([None, [("salt", i) for i in range(count)]]))
    return Stored(hashes, 5, tokens, SIZE, medium="CPU", extra_keys=keys, group=3)


def blocks(told: list[Event]) -> Iterator[tuple[Any, ...]]:
    """What events say of each block by itself."""
    for event in told:
        if isinstance(event, Cleared):
            yield ("cleared",)
        elif isinstance(event, Removed):
            yield from (("removed", name, event.medium, event.group) for name in event.hashes)
        else:
            parent = event.parent
            for i, name in enumerate(event.hashes):
                tokens = tuple(event.tokens[i * SIZE : (i + 1) * SIZE])
                extra = event.extra_keys[i] if event.extra_keys else None
                yield ("stored", name, parent, tokens, extra, event.medium, event.group)
                parent = name


@given(st.lists(events(), max_size=12))
def test_portions_say_what_was_told_in_order(told: list[Event]) -> None:
    queue = Backlog()
    queue.add(told)
    portions = []
    while portion := queue.take():
        portions.append(portion)
    assert list(blocks([event for portion in portions for event in portion])) == list(blocks(told))
    for portion in portions:
        sizes = [len(getattr(event, "hashes", [])) for event in portion]
        assert len(portion) <= 4 and max(sizes) <= BLOCKS and sum(sizes) < 2 * BLOCKS


def test_an_event_whose_lists_do_not_belong_together_is_refused_as_a_whole() -> None:
    queue = Backlog()
    wrong = Stored(list(range(30)), None, [1, 2, 3], SIZE)
    queue.add([wrong])
    assert queue.take() == [wrong]


def test_what_is_cleared_never_comes() -> None:
    queue = Backlog()
    queue.add([Removed(list(range(20)))])
    queue.take()
    queue.clear()
    assert queue.take() == []


def test_there_is_enough_with_one_large_event_or_many_small_ones() -> None:
    queue = Backlog()
    queue.add([Removed([1])] * 3)
    assert not queue.enough
    queue.add([Removed([1])])
    assert queue.enough
    queue.take()
    queue.add([Removed(list(range(20)))])
    queue.take()
    assert queue.enough  # of its 20 blocks, 12 are left
    queue.take()
    assert not queue.enough
