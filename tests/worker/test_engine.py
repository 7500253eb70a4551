"""The engine over a simulated model: what it answers, counts, survives, and tells subscribers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from random import Random

import pytest

from tests.worker.engines import (
    SIZE,
    FaultInjectingRunner,
    add,
    make_engine,
    metric,
    run,
    simulated,
    token_ids,
)
from tests.worker.subscriber import KVSubscriber
from worker.blocks import ROOT, chain_hash, root_key, wire_hash
from worker.engine import Engine
from worker.events import Publisher
from worker.sequence import Adapter

# Answers


def test_an_answer_ends_at_max_tokens():
    engine = make_engine()
    add(engine, 0, [1, 2, 3], max_tokens=5)
    outputs = run(engine)[0]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert all(token in range(100, 200) for token in token_ids(outputs))


def test_an_answer_ends_where_the_context_does():
    engine = make_engine(max_model_len=16)
    add(engine, 0, [1] * 10, max_tokens=100)
    outputs = run(engine)[0]
    assert len(outputs) == 6
    assert outputs[-1].finish_reason == "length"


def test_a_stop_token_ends_an_answer_and_is_named():
    engine = make_engine(simulated([7]))
    add(engine, 0, [1], max_tokens=5, stop_token_ids=frozenset({3, 7}))
    (output,) = run(engine)[0]
    assert (output.token_id, output.finish_reason, output.stop_reason) == (7, "stop", 7)


def test_a_stop_token_counts_only_after_min_tokens():
    engine = make_engine(simulated([7]))
    add(engine, 0, [1], max_tokens=9, min_tokens=3, stop_token_ids=frozenset({7}))
    outputs = run(engine)[0]
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]


def test_a_stop_token_in_the_last_place_is_still_a_stop():
    engine = make_engine(simulated([7]))
    add(engine, 0, [1], max_tokens=1, stop_token_ids=frozenset({7}))
    assert run(engine)[0][0].finish_reason == "stop"


def test_the_first_output_tells_what_was_cached():
    engine = make_engine()
    for id in range(2):
        add(engine, id, [1] * 10)
        run_outputs = run(engine)[id]
        assert [output.num_cached_tokens for output in run_outputs] == [id * 8, 0, 0, 0]


def test_prompt_logprobs_come_with_the_first_token():
    engine = make_engine(max_num_batched_tokens=8)
    add(engine, 0, [1] * 10, prompt_logprobs=0)
    first, *rest = run(engine)[0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 10
    assert all(output.prompt_logprobs is None for output in rest)


PROMPTS = [[id, *range(id * 3)] for id in range(10)]


def answers(**limits: object) -> tuple[Engine, dict[int, list[int | None]]]:
    engine = make_engine(**limits)
    for id, prompt in enumerate(PROMPTS):
        add(engine, id, prompt, max_tokens=20)
    return engine, {id: token_ids(outputs) for id, outputs in run(engine).items()}


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 4},
        {"num_blocks": 16},
        {"num_blocks": 16, "preallocate": True},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_limits_change_the_pace_but_not_the_answers(limits: dict[str, object]):
    _, expected = answers()
    engine, got = answers(**limits)
    assert got == expected
    assert engine.pool.num_free == engine.pool.num_blocks
    if limits == {"num_blocks": 16}:
        assert metric(engine, "vllm:num_preemptions_total") > 0


# Ends from outside


@pytest.mark.parametrize("steps", range(5))
def test_an_end_from_outside_frees_everything_at_once(steps: int):
    """While it waits, amid its prefill, and while it decodes."""
    engine = make_engine(max_num_seqs=1)
    first = add(engine, 0, [1], max_tokens=2)
    second = add(engine, 1, [1] * 40, max_tokens=9)
    for _ in range(steps):
        engine.step()
    engine.end(second.id, "abort")
    engine.end(first.id, "abort")
    assert not engine.has_work
    assert engine.num_unfinished == 0
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.pool.check()


def test_ends_of_unknown_sequences_are_ignored():
    engine = make_engine()
    engine.end(5, "abort")
    add(engine, 0, [1])
    run(engine)
    engine.end(0, "stop")
    engine.end(0, "abort")
    assert metric(engine, "vllm:request_success_total", finished_reason="abort") == 0


def test_what_two_compute_in_the_same_step_is_held_once():
    engine = make_engine()
    for id in range(2):
        add(engine, id, [1] * 8)
    engine.step()
    assert metric(engine, "vllm:kv_cache_usage_perc") == 2 / 64
    assert len(run(engine)) == 2


# Metrics


def test_the_numbers_add_up():
    engine = make_engine(num_blocks=16, max_num_seqs=3)
    prompts = {id: [id % 3] * (5 + 2 * id) for id in range(8)}
    for id, prompt in prompts.items():
        add(engine, id, prompt, max_tokens=20)
    engine.step()
    assert metric(engine, "vllm:num_requests_running") == 3
    assert metric(engine, "vllm:num_requests_waiting") == 5
    assert metric(engine, "vllm:kv_cache_usage_perc") == engine.pool.usage > 0
    engine.end(7, "abort")
    engine.end(6, "stop")
    outputs = run(engine)
    assert metric(engine, "vllm:num_requests_running") == 0
    assert metric(engine, "vllm:num_requests_waiting") == 0
    assert metric(engine, "vllm:kv_cache_usage_perc") == 0
    produced = sum(map(len, outputs.values())) + 3  # and those of the first step
    assert metric(engine, "vllm:generation_tokens_total") == produced == 6 * 20
    assert metric(engine, "vllm:prompt_tokens_total") == sum(len(prompts[id]) for id in range(6))
    for reason, count in {"length": 6, "abort": 1, "stop": 1, "error": 0}.items():
        name = "vllm:request_success_total"
        assert metric(engine, name, finished_reason=reason) == count
    assert metric(engine, "vllm:time_to_first_token_seconds_count") == 6
    assert metric(engine, "vllm:inter_token_latency_seconds_count") == produced - 6
    assert metric(engine, "vllm:num_preemptions_total") > 0
    cached = metric(engine, "vllm:prompt_tokens_cached_total")
    assert cached == metric(engine, "vllm:prefix_cache_hits_total") > 0


# A runner that fails


@pytest.fixture
def failing() -> tuple[Engine, FaultInjectingRunner]:
    runner = FaultInjectingRunner(simulated())
    return make_engine(runner, max_num_seqs=2), runner


def test_a_failed_step_ends_those_who_ran_with_an_error(
    failing: tuple[Engine, FaultInjectingRunner], caplog: pytest.LogCaptureFixture
):
    engine, runner = failing
    for id in range(3):
        add(engine, id, [id] * 9, max_tokens=5)
    engine.step()
    runner.broken = True
    with caplog.at_level(logging.ERROR):
        failed = engine.step()
    assert sorted(id for id, _ in failed) == [0, 1]
    assert all(output.finish_reason == "error" for _, output in failed)
    assert "injected fault" in caplog.text
    assert metric(engine, "vllm:request_success_total", finished_reason="error") == 2
    assert metric(engine, "vllm:num_requests_running") == 0
    assert metric(engine, "vllm:num_requests_waiting") == 1
    runner.broken = False
    outputs = run(engine)
    assert [len(outputs[2]), outputs[2][-1].finish_reason] == [5, "length"]


def test_nothing_computed_by_a_failed_step_is_ever_reused(
    failing: tuple[Engine, FaultInjectingRunner],
):
    engine, runner = failing
    add(engine, 0, [1] * 9)
    run(engine)
    add(engine, 1, [2] * 9)
    runner.broken = True
    engine.step()
    assert engine.pool.num_cached == 0
    engine.pool.check()
    runner.broken = False
    for id, token in ((2, 1), (3, 2)):
        add(engine, id, [token] * 9)
        assert run(engine)[id][0].num_cached_tokens == 0


def test_failures_in_a_row_are_counted(failing: tuple[Engine, FaultInjectingRunner]):
    engine, runner = failing
    runner.broken = True
    for id in range(2):
        add(engine, id, [1])
        engine.step()
        assert engine.failed_steps == id + 1
    runner.broken = False
    add(engine, 2, [1])
    run(engine)
    assert engine.failed_steps == 0


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_in_a_long_and_troubled_life(seed: int):
    """Random lengths, priorities, aborts and failures."""
    random = Random(seed)
    runner = FaultInjectingRunner(simulated())
    engine = make_engine(runner, num_blocks=20, max_num_batched_tokens=12)
    ended: dict[int, str] = {}
    alive: set[int] = set()
    for id in range(300):
        prompt = [random.randrange(2)] * random.randint(1, 63)
        add(engine, id, prompt, random.randint(1, 30), priority=random.randrange(3))
        alive.add(id)
        for _ in range(random.randrange(12)):
            runner.broken = random.random() < 0.01
            for done, output in engine.step() if engine.has_work else ():
                assert done in alive, "output after the end"
                if output.finish_reason is not None:
                    ended[done] = output.finish_reason
                    alive.remove(done)
        if random.random() < 0.1 and alive:
            victim = random.choice(sorted(alive))
            engine.end(victim, "abort")
            alive.remove(victim)
            ended[victim] = "abort"
        engine.pool.check()
    runner.broken = False
    ended |= {id: outputs[-1].finish_reason for id, outputs in run(engine, 10_000).items()}
    assert ended.keys() == set(range(300))
    for reason in ("length", "abort", "error"):
        count = list(ended.values()).count(reason)
        assert count > 0
        assert metric(engine, "vllm:request_success_total", finished_reason=reason) == count
    assert engine.num_unfinished == 0
    assert engine.pool.num_free == engine.pool.num_blocks


# KV events: a subscriber knows what the engine holds


ADAPTER = Adapter("lora-sql", 3)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher("127.0.0.1", 0, 0, "kv@test@m", linger=0.1)
    yield publisher
    publisher.close()


def small_engine(publisher: Publisher, runner: FaultInjectingRunner | None = None) -> Engine:
    return make_engine(runner, publisher, num_blocks=24, max_num_batched_tokens=16)


def assert_mirrored(subscriber: KVSubscriber, publisher: Publisher, engine: Engine) -> None:
    """The subscriber has heard everything, and believes what is true."""
    subscriber.poll_until(lambda s: s.last + 1 == publisher._next_seq)
    assert set(subscriber.blocks) == engine.pool.cached_hashes()
    assert subscriber.lost == subscriber.unknown_removals == 0
    digests = {None: ROOT}

    def digest(name: int | None) -> bytes:
        """Computed from tokens and parents as they were announced."""
        if name not in digests:
            block = subscriber.blocks[name]
            extra = list(block.extra or ())
            adapter = ADAPTER if extra[:1] == [ADAPTER.name] else None
            salt = extra[-1] if extra and extra[-1].startswith("salt") else None
            key = root_key(adapter, salt) if block.parent is None else b""
            digests[name] = chain_hash(digest(block.parent), block.tokens, key)
        return digests[name]

    assert all(wire_hash(digest(name)) == name for name in subscriber.blocks)
    assert all(len(block.tokens) == SIZE for block in subscriber.blocks.values())


def live(engine: Engine, random: Random, steps: int, ids: Iterator[int]) -> None:
    """Sequences that share prefixes come, go, and outgrow the memory."""
    for _ in range(steps):
        if random.random() < 0.3:
            prompt = [random.randrange(2)] * random.choice([4, 8, 16, 24])
            prompt += [random.randrange(3) for _ in range(random.randrange(12))]
            salt = random.choice([None, None, "salt-a", "salt-b"])
            adapter = random.choice([None, None, ADAPTER])
            max_tokens = random.randint(1, 28)
            add(engine, next(ids), prompt, max_tokens, cache_salt=salt, adapter=adapter)
        if engine.has_work:
            engine.step()
            if random.random() < 0.02:
                for running in engine.scheduler.running[::2]:
                    engine.end(running.id, "abort")


@pytest.mark.parametrize("seed", range(4))
def test_a_subscriber_knows_exactly_what_is_cached(seed: int, publisher: Publisher):
    engine = small_engine(publisher)
    random, ids = Random(seed), itertools.count()
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        for _ in range(5):
            live(engine, random, 100, ids)
            assert_mirrored(subscriber, publisher, engine)
            run(engine)
            assert_mirrored(subscriber, publisher, engine)
            assert engine.reset_prefix_cache()
            assert_mirrored(subscriber, publisher, engine)
        assert subscriber.gaps == []
        kinds = {event["type"] for event in subscriber.events}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert metric(engine, "vllm:num_preemptions_total") > 0


def test_a_late_joiner_catches_up_by_replay(publisher: Publisher):
    engine = small_engine(publisher)
    live(engine, Random(5), 300, itertools.count())
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        assert_mirrored(subscriber, publisher, engine)
        assert subscriber.blocks
        assert not subscriber.topics, "nothing came live"


def test_a_restarted_engine_holds_nothing_of_before(publisher: Publisher):
    """Same ports, new process: its numbers start at 0 again."""
    engine = small_engine(publisher)
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        live(engine, Random(6), 1000, itertools.count())
        run(engine)
        for _ in range(400):  # what is sent before the subscription arrives is dropped
            engine.reset_prefix_cache()
            if subscriber.receive(0.05):
                break
        assert subscriber.topics
        assert_mirrored(subscriber, publisher, engine)
        while subscriber.receive(0.1):
            pass  # live messages that the replay brought already
        ports = [
            int(at.rsplit(":", 1)[1]) for at in (publisher.endpoint, publisher.replay_endpoint)
        ]
        publisher.close()
        successor = Publisher("127.0.0.1", *ports, "kv@test@m", linger=0.1)
        try:
            engine = small_engine(successor)
            while not subscriber.restarts:
                assert engine.reset_prefix_cache()
                assert successor._next_seq < 200, "no restart noticed"
                subscriber.receive(0.1)
            live(engine, Random(7), 50, itertools.count())
            assert_mirrored(subscriber, successor, engine)
            assert subscriber.blocks
            assert subscriber.restarts == 1
        finally:
            successor.close()


def test_a_failed_step_tells_subscribers_to_forget(publisher: Publisher):
    runner = FaultInjectingRunner(simulated())
    engine = small_engine(publisher, runner)
    with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        add(engine, 0, [1] * 9)
        run(engine)
        assert_mirrored(subscriber, publisher, engine)
        assert subscriber.blocks
        runner.broken = True
        add(engine, 1, [2] * 9)
        engine.step()
        assert_mirrored(subscriber, publisher, engine)
        assert not subscriber.blocks
        assert subscriber.events[-1] == {"type": "AllBlocksCleared"}


def test_without_a_subscriber_events_do_not_pile_up():
    engine = make_engine()
    live(engine, Random(8), 100, itertools.count())
    assert engine.pool.events == []
