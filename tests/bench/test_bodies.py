"""The chat bodies of the benchmarks."""

from __future__ import annotations

import json
from itertools import takewhile

import pytest

from bench.bodies import NONCE, chat_bodies


@pytest.mark.parametrize("size", [250, 1000, 4000, 8192, 220 * 1024])
def test_bodies_have_their_size_and_one_nonce(size: int) -> None:
    bodies = chat_bodies(size, 8)
    assert [len(body) for body in bodies] == [size] * 8
    assert [body.count(NONCE.encode()) for body in bodies] == [1] * 8
    for body in bodies:
        last = json.loads(body)["messages"][-1]
        assert last["role"] == "user"
        assert last["content"].startswith(NONCE)


def test_bodies_share_prefixes_as_conversations_do() -> None:
    bodies = chat_bodies(8192, 16)

    def shared(a: int, b: int) -> float:
        same = (x == y for x, y in zip(bodies[a], bodies[b], strict=True))
        return sum(takewhile(bool, same)) / 8192

    assert 0.4 < shared(0, 8) < 0.5  # the system prompt
    assert 0.8 < shared(0, 1) < 0.9  # also the turns before
    assert shared(0, 2) < 0.1
    assert len(set(bodies)) == 16


def test_the_same_seed_gives_the_same_bodies() -> None:
    assert chat_bodies(1000, 4) == chat_bodies(1000, 4)
    assert chat_bodies(1000, 4) != chat_bodies(1000, 4, seed=1)


def test_a_body_cannot_be_smaller_than_its_frame() -> None:
    with pytest.raises(ValueError, match="at least"):
        chat_bodies(20, 1)
