from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker import config
from picker.pool import Pool
from picker.prefix import approximate
from picker.prefix.approximate import ApproximatePrefix
from picker.prefix.match import Match
from picker.request import Kind, LLMRequest

SETTINGS = config.Prefix(block_bytes=config.Size(64), max_blocks=1024)
TEXT = b"".join(b"%063d\n" % line for line in range(5000))  # each block another


def request(prompt: bytes, *, tokens: int | None = None, salt: bytes = b"m") -> LLMRequest:
    return LLMRequest(
        id="r",
        method="POST",
        path="/v1/completions",
        headers={},
        body=b"",
        kind=Kind.COMPLETION,
        model="m",
        prompt=prompt,
        prompt_tokens=(len(prompt) + 3) // 4 if tokens is None else tokens,
        salt=salt,
        subset=None,
    )


def address(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250 + 1}:8000"


def set_pods(pool: Pool, pods: int) -> None:
    pool.update([config.EndpointSpec(address=address(number)) for number in range(pods)])


class Cluster:
    """A pool and its index."""

    def __init__(self, pods: int) -> None:
        self.pool = Pool("test")
        set_pods(self.pool, pods)
        self.prefix = ApproximatePrefix(self.pool, SETTINGS)

    def serve(self, prompt: bytes, pod: int) -> Match:
        match = self.prefix.match(request(prompt))
        self.prefix.learn(match, self.pool.endpoints[address(pod)])
        return match

    def tokens(self, prompt: bytes, pod: int, **asked: object) -> float:
        match = self.prefix.match(request(prompt, **asked))  # type: ignore[arg-type]
        return float(match.tokens[self.pool.endpoints[address(pod)].slot])


def test_a_prompt_is_expected_where_it_was_sent() -> None:
    cluster = Cluster(3)
    assert not cluster.serve(TEXT[:640], 1).tokens.any()
    match = cluster.prefix.match(request(TEXT[:640]))
    assert match.tokens.dtype == np.float32
    assert match.tokens.tolist() == [0, 160, 0, *[0] * (cluster.pool.capacity - 3)]
    assert match.blocks.tolist() == [0, 10, 0, *[0] * (cluster.pool.capacity - 3)]
    assert match.num_blocks == 10


def test_the_next_turn_finds_the_turns_before() -> None:
    cluster = Cluster(2)
    cluster.serve(TEXT[:700], 0)
    assert cluster.tokens(TEXT[:1400], 0) == 160  # the ten full blocks
    cluster.serve(TEXT[:1400], 1)
    assert cluster.tokens(TEXT[:2000], 0) == 160
    assert cluster.tokens(TEXT[:2000], 1) == 336


def test_a_changed_byte_ends_the_match() -> None:
    cluster = Cluster(1)
    cluster.serve(TEXT[:640], 0)
    assert cluster.tokens(TEXT[:200] + b"#" + TEXT[201:640], 0) == 48
    assert cluster.tokens(b"#" + TEXT[1:640], 0) == 0


def test_another_salt_matches_nothing() -> None:
    cluster = Cluster(1)
    cluster.serve(TEXT[:640], 0)
    assert cluster.tokens(TEXT[:640], 0, salt=b"other") == 0


def test_tokens_count_as_this_request_counts_them() -> None:
    cluster = Cluster(1)
    cluster.serve(TEXT[:640], 0)
    assert cluster.tokens(TEXT[:640], 0, tokens=640) == 640
    assert cluster.tokens(TEXT[:1280], 0, tokens=100) == 50


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 2_000_000))
def test_a_prompt_served_before_is_whole_but_for_its_last_block(size: int, tokens: int) -> None:
    cluster = Cluster(1)
    prompt = TEXT[:size]
    cluster.serve(prompt, 0)
    found = cluster.tokens(prompt, 0, tokens=tokens)
    assert found <= tokens
    assert found == pytest.approx(tokens * (size // 64 * 64) / size if size else 0, rel=1e-6)
    if size and size % 64 == 0:
        assert found == tokens


def test_a_prompt_without_text_matches_nothing() -> None:
    cluster = Cluster(2)
    for prompt in (b"", b"short"):
        match = cluster.serve(prompt, 0)
        assert match.num_blocks == 0
        assert match.tokens.tolist() == [0] * cluster.pool.capacity
    assert cluster.prefix.blocks == 0


def test_the_first_blocks_of_a_long_prompt_are_enough() -> None:
    cluster = Cluster(1)
    cluster.serve(TEXT, 0)
    assert cluster.tokens(TEXT, 0) == 1024 * 16


def test_a_removed_pod_is_forgotten_and_its_slot_starts_empty() -> None:
    cluster = Cluster(2)
    cluster.serve(TEXT[:640], 0)
    cluster.serve(TEXT[:640], 1)
    old = cluster.pool.endpoints[address(1)]
    set_pods(cluster.pool, 1)
    assert cluster.prefix.blocks == 10
    set_pods(cluster.pool, 2)
    assert cluster.pool.endpoints[address(1)].slot == old.slot
    assert cluster.tokens(TEXT[:640], 1) == 0
    assert cluster.tokens(TEXT[:640], 0) == 160


def test_what_a_dead_pod_served_or_told_is_not_the_next_ones() -> None:
    cluster = Cluster(1)
    old = cluster.pool.endpoints[address(0)]
    match = cluster.prefix.match(request(TEXT[:640]))
    use = cluster.prefix.learn(match, old)
    set_pods(cluster.pool, 0)
    cluster.prefix.learn(match, old)
    set_pods(cluster.pool, 1)
    cluster.prefix.learn(match, old)
    assert cluster.prefix.moved(use, old, old) == (0, 0)
    cluster.prefix.resized(old, 16)
    assert cluster.tokens(TEXT[:640], 0) == 0
    cluster.serve(TEXT[:640], 0)
    assert cluster.tokens(TEXT[:640], 0) == 160


def test_a_prompt_may_move_to_a_pod_that_came_after_its_pick() -> None:
    cluster = Cluster(1)
    picked = cluster.pool.endpoints[address(0)]
    use = cluster.prefix.learn(cluster.prefix.match(request(TEXT[:640])), picked)
    set_pods(cluster.pool, 40)
    served = cluster.pool.endpoints[address(39)]
    assert cluster.prefix.moved(use, picked, served) == (0, 0)
    assert cluster.tokens(TEXT[:640], 39) == 160
    assert cluster.tokens(TEXT[:640], 0) == 0


def test_a_prompt_that_moved_is_told_what_was_held_there() -> None:
    cluster = Cluster(2)
    cluster.serve(TEXT[:320], 1)
    picked, served = (cluster.pool.endpoints[address(pod)] for pod in (0, 1))
    use = cluster.prefix.learn(cluster.prefix.match(request(TEXT[:640])), picked)
    assert cluster.prefix.moved(use, picked, served) == (5, 80)


def test_the_column_grows_with_the_pool() -> None:
    cluster = Cluster(1)
    cluster.serve(TEXT[:640], 0)
    for pods in (16, 17, 100, 3):
        set_pods(cluster.pool, pods)
        match = cluster.prefix.match(request(TEXT[:640]))
        assert len(match.tokens) == cluster.pool.capacity
        assert match.tokens[cluster.pool.slots].tolist() == [160] + [0] * (pods - 1)


def test_a_pool_without_endpoints_matches_nothing() -> None:
    cluster = Cluster(0)
    match = cluster.prefix.match(request(TEXT[:640]))
    assert match.tokens.tolist() == [0] * cluster.pool.capacity


def test_a_pod_holds_as_much_as_its_cache_and_loses_tails_first() -> None:
    cluster = Cluster(1)
    endpoint = cluster.pool.endpoints[address(0)]
    cluster.prefix.resized(endpoint, 160)  # ten blocks of 64 bytes
    cluster.serve(TEXT[:1280], 0)
    assert cluster.tokens(TEXT[:1280], 0) == 160
    cluster.serve(TEXT[1280:1536], 0)
    assert cluster.tokens(TEXT[:1280], 0) == 96
    cluster.prefix.resized(endpoint, 80)
    assert cluster.tokens(TEXT[1280:1536], 0) == 64
    assert cluster.tokens(TEXT[:1280], 0) == 16
    cluster.prefix.resized(endpoint, 320)
    cluster.serve(TEXT[:1280], 0)
    assert cluster.tokens(TEXT[:1280], 0) == 320


@pytest.mark.parametrize("kv_tokens", [0, -1, -(10**30), 10**30])
def test_a_pod_may_tell_any_size(kv_tokens: int) -> None:
    cluster = Cluster(1)
    cluster.prefix.resized(cluster.pool.endpoints[address(0)], kv_tokens)
    cluster.serve(TEXT[:640], 0)
    assert cluster.tokens(TEXT[:640], 0) == (160 if kv_tokens > 0 else 0)


def test_all_pods_share_what_the_index_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "MAX_BLOCKS", 1000)
    cluster = Cluster(2)
    for endpoint in cluster.pool.endpoints.values():
        cluster.prefix.resized(endpoint, 10**9)
    cluster.serve(TEXT[:64_000], 0)
    cluster.serve(TEXT[:64_000], 1)
    assert cluster.prefix.blocks == 1000
    set_pods(cluster.pool, 20)
    for pod in range(20):
        cluster.serve(TEXT[:64_000], pod)
        assert cluster.prefix.blocks <= 1000
    assert cluster.tokens(TEXT[:64_000], 7) == 50 * 16
    set_pods(cluster.pool, 1)
    cluster.serve(TEXT[:64_000], 0)
    assert cluster.tokens(TEXT[:64_000], 0) == 1000 * 16


def test_pods_come_and_go_and_leave_nothing() -> None:
    cluster = Cluster(0)
    for pods in (3, 30, 7, 300, 1, 0, 12, 0):
        set_pods(cluster.pool, pods)
        for pod in range(pods):
            cluster.serve(TEXT[: 64 * (pod + 1)], pod)
            assert cluster.tokens(TEXT, pod) == 16 * (pod + 1)
        assert (cluster.prefix.blocks > 0) == (pods > 0)
    assert cluster.prefix.blocks == 0
