"""The engine's thread as coroutines see it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tests.worker.engines import (
    FaultInjectingRunner,
    SteppedRunner,
    make_engine,
    metric,
    simulated,
    token_ids,
)
from tests.worker.subscriber import KVSubscriber
from worker.config import EngineConfig
from worker.engine import Engine
from worker.events import Publisher
from worker.loop import MAX_FAILED_STEPS, EngineDeadError, EngineLoop, QueueFullError, Stream
from worker.metrics import Metrics
from worker.profiles import PROFILES
from worker.scheduler import Scheduled
from worker.sequence import Output, Sample, SamplingParams
from worker.simulate import SimulatedRunner

PATIENCE = 20.0  # seconds


@asynccontextmanager
async def running(
    engine: Engine, unblock: Callable[[], None] = lambda: None
) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine)
    loop.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield loop
    finally:
        unblock()
        await loop.close()


async def everything(stream: Stream) -> list[Output]:
    return [output async for output in stream]


async def reason(stream: Stream) -> str | None:
    return (await everything(stream))[-1].finish_reason


def ask(loop: EngineLoop, prompt: list[int], max_tokens: int = 4, **options: Any) -> Stream:
    return loop.submit(prompt, SamplingParams(max_tokens=max_tokens), **options)


class Stepped:
    """A loop whose steps the test allows one by one."""

    def __init__(self, loop: EngineLoop, engine: Engine, runner: SteppedRunner) -> None:
        self.loop = loop
        self.engine = engine
        self._runner = runner

    @property
    def num_steps(self) -> int:
        return self._runner.num_steps

    async def begin(self) -> None:
        """Wait until the next step has been scheduled; it runs once it is allowed to."""
        assert await asyncio.to_thread(self._runner.entered.acquire, timeout=PATIENCE)

    def allow(self, steps: int = 1) -> None:
        self._runner.allowed.release(steps)


@asynccontextmanager
async def stepped(**limits: Any) -> AsyncIterator[Stepped]:
    runner = SteppedRunner(simulated())
    engine = make_engine(runner, **limits)
    async with running(engine, partial(runner.allowed.release, 10_000)) as loop:
        yield Stepped(loop, engine, runner)


# Streams


async def test_a_stream_gives_every_token_and_then_ends():
    async with running(make_engine()) as loop:
        outputs = await everything(ask(loop, [1, 2, 3], max_tokens=7))
    assert [output.finish_reason for output in outputs] == [None] * 6 + ["length"]


async def test_many_at_once_get_what_each_would_get_alone():
    prompts = [[id] * (id % 9 + 1) for id in range(60)]
    async with running(make_engine()) as loop:
        alone = [token_ids(await everything(ask(loop, prompt))) for prompt in prompts]
        streams = [ask(loop, prompt) for prompt in prompts]
        together = await asyncio.gather(*map(everything, streams))
        assert [token_ids(outputs) for outputs in together] == alone
        assert loop.num_unfinished == 0


async def test_next_gives_all_that_has_come_since():
    async with stepped() as test:
        stream = ask(test.loop, [1], max_tokens=3)
        test.allow(3)
        outputs = []
        while len(outputs) < 3:
            outputs += await stream.next()
        assert outputs[-1].finish_reason == "length"


async def test_priority_salt_and_order_reach_the_scheduler():
    async with stepped(max_num_seqs=1) as test:
        first = ask(test.loop, [1] * 9, max_tokens=1)
        await test.begin()
        ended: list[str] = []

        async def follow(name: str, stream: Stream) -> int:
            outputs = await everything(stream)
            ended.append(name)
            return outputs[0].num_cached_tokens

        followers = [
            asyncio.create_task(follow(name, ask(test.loop, [1] * 9, 1, **options)))
            for name, options in [
                ("late", {"priority": 9}),
                ("salted", {"cache_salt": "mine"}),
                ("plain", {}),
                ("urgent", {"priority": -9}),
            ]
        ]
        test.allow(5)
        cached = await asyncio.gather(*followers)
        assert await reason(first) == "length"
        assert ended == ["urgent", "salted", "plain", "late"]
        assert cached == [8, 0, 8, 8]


# Ends


async def test_an_abort_frees_its_blocks_after_the_step_that_runs():
    async with stepped() as test:
        stream = ask(test.loop, [1] * 9, max_tokens=50)
        test.allow(3)
        for _ in range(4):
            await test.begin()
        stream.end("abort")
        cleared = asyncio.create_task(test.loop.reset_prefix_cache())
        test.allow()
        assert await cleared, "no sequence holds a block any more"
        assert test.num_steps == 4
        assert test.loop.num_unfinished == 0
        assert test.engine.pool.num_free == test.engine.pool.num_blocks
        assert metric(test.engine, "vllm:request_success_total", finished_reason="abort") == 1


async def test_the_gauges_show_when_the_last_one_has_left():
    async with stepped(max_num_seqs=1) as test:
        streams = [ask(test.loop, [1], max_tokens=50) for _ in range(2)]
        test.allow(2)
        for _ in range(3):
            await test.begin()
        assert metric(test.engine, "vllm:num_requests_running") == 1
        assert metric(test.engine, "vllm:num_requests_waiting") == 1
        for stream in streams:
            stream.end("abort")
        test.allow()
        assert await test.loop.reset_prefix_cache()
        await test.loop.close()
        assert metric(test.engine, "vllm:num_requests_running") == 0
        assert metric(test.engine, "vllm:num_requests_waiting") == 0
        assert metric(test.engine, "vllm:kv_cache_usage_perc") == 0


async def test_to_end_twice_or_too_late_does_nothing():
    async with running(make_engine()) as loop:
        stream = ask(loop, [1])
        assert await reason(stream) == "length"
        stream.end("abort")
        other = ask(loop, [1], max_tokens=50)
        other.end("stop")
        other.end("abort")
        assert await reason(ask(loop, [2])) == "length"
        assert metric(loop._engine, "vllm:request_success_total", finished_reason="abort") == 0


async def test_others_are_not_disturbed_by_an_end():
    async with stepped() as test:
        leaver, stayer = ask(test.loop, [1], max_tokens=50), ask(test.loop, [2], max_tokens=9)
        test.allow(2)
        await leaver.next()
        leaver.end("stop")
        test.allow(50)
        assert len(await everything(stayer)) == 9


# Limits


async def test_a_full_queue_turns_newcomers_away_until_it_moves():
    async with stepped(max_num_seqs=1, max_num_queued_reqs=2) as test:
        streams = [ask(test.loop, [1], max_tokens=1)]
        await test.begin()
        streams += [ask(test.loop, [1], max_tokens=1) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            ask(test.loop, [1])
        assert test.loop.num_unfinished == 3
        test.allow(3)
        assert [await reason(stream) for stream in streams] == ["length"] * 3
        again = ask(test.loop, [1], max_tokens=1)
        test.allow()
        assert await reason(again) == "length"


# The prefix cache


async def test_a_reset_while_idle_is_told_at_once():
    publisher = Publisher("127.0.0.1", 0, 0, "kv@test@m", linger=0.1)
    try:
        engine = make_engine(publisher=publisher)
        with KVSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            async with running(engine) as loop:
                await everything(ask(loop, [1] * 20))
                await asyncio.to_thread(subscriber.poll_until, lambda s: len(s.blocks) == 5)
                assert await loop.reset_prefix_cache()
                await asyncio.to_thread(subscriber.poll_until, lambda s: not s.blocks)
        assert subscriber.events[-1] == {"type": "AllBlocksCleared"}
    finally:
        publisher.close()


async def test_a_reset_is_refused_while_sequences_run():
    async with stepped() as test:
        stream = ask(test.loop, [1] * 9, max_tokens=2)
        await test.begin()
        refused = asyncio.create_task(test.loop.reset_prefix_cache())
        await asyncio.sleep(0)  # it has asked
        test.allow()
        assert not await refused
        test.allow()
        assert await reason(stream) == "length"


async def test_nobody_has_to_wait_for_a_reset():
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with stepped() as test:
        stream = ask(test.loop, [1], max_tokens=2)
        await test.begin()
        reset = asyncio.create_task(test.loop.reset_prefix_cache())
        await asyncio.sleep(0)
        reset.cancel()
        test.allow(2)
        assert await reason(stream) == "length"
        assert await test.loop.reset_prefix_cache()
    assert errors == []


# The thread


async def test_an_idle_thread_sleeps():
    class Watched(Engine):
        looks = 0

        @property
        def has_work(self) -> bool:
            self.looks += 1
            return super().has_work

    plain = make_engine()
    engine = Watched(plain.config, simulated(), plain._metrics)
    async with running(engine) as loop:
        await everything(ask(loop, [1]))
        assert await loop.reset_prefix_cache()
        before = engine.looks
        await asyncio.sleep(0.3)
        assert engine.looks - before <= 3, "it polls"  # those on its way to sleep
        assert await reason(ask(loop, [1])) == "length"


async def test_closing_ends_what_is_open_and_takes_no_more():
    async with stepped() as test:
        stream, other = ask(test.loop, [1], max_tokens=50), ask(test.loop, [2], max_tokens=50)
        await test.begin()
        closing = asyncio.create_task(test.loop.close())
        await asyncio.sleep(0)
        test.allow()
        await closing
        assert test.num_steps == 1, "it stops after the step that runs"
        assert [await reason(stream), await reason(other)] == ["abort", "abort"]
        assert not test.loop.healthy
        with pytest.raises(EngineDeadError):
            ask(test.loop, [1])
        with pytest.raises(EngineDeadError):
            await test.loop.reset_prefix_cache()


async def test_a_failing_model_is_reported_and_survived(caplog: pytest.LogCaptureFixture):
    runner = FaultInjectingRunner(simulated())
    async with running(make_engine(runner)) as loop:
        runner.broken = True
        with caplog.at_level(logging.CRITICAL):
            for failures in range(1, MAX_FAILED_STEPS + 1):
                assert loop.healthy
                assert await reason(ask(loop, [1])) == "error"
                assert loop._engine.failed_steps == failures
        assert not loop.healthy
        runner.broken = False
        assert await reason(ask(loop, [1])) == "length"
        assert loop.healthy


async def test_nobody_waits_for_a_dead_engine(caplog: pytest.LogCaptureFixture):
    class FaultInjectingEngine(Engine):
        def step(self) -> list[tuple[int, Output]]:
            reached.set()
            doomed.wait(PATIENCE)
            raise RuntimeError("injected fault")

    plain = make_engine()
    engine = FaultInjectingEngine(plain.config, simulated(), plain._metrics)
    reached, doomed = threading.Event(), threading.Event()
    async with running(engine) as loop:
        streams = [ask(loop, [1])]
        await asyncio.to_thread(reached.wait, PATIENCE)
        streams.append(ask(loop, [1]))
        reset = asyncio.create_task(loop.reset_prefix_cache())
        await asyncio.sleep(0)
        doomed.set()
        assert [await reason(stream) for stream in streams] == ["error", "error"]
        with pytest.raises(EngineDeadError):
            await reset
        with pytest.raises(EngineDeadError):
            ask(loop, [1])
        with pytest.raises(EngineDeadError):
            await loop.reset_prefix_cache()
        assert not loop.healthy
    assert "The engine died" in caplog.text


class SlowToWarmUp(SimulatedRunner):
    """Injects a warm-up that lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__(PROFILES["instant"], b"abcdef")
        self.may_end = threading.Event()
        self.threads: list[str] = []

    def warm_up(self) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.may_end.wait(60)

    def run(self, batch: list[Scheduled]) -> list[Sample]:
        self.threads.append(threading.current_thread().name)
        return super().run(batch)


async def test_what_comes_during_the_warm_up_waits_for_it():
    runner = SlowToWarmUp()
    config = EngineConfig(num_blocks=64, max_model_len=256)
    loop = EngineLoop(Engine(config, runner, Metrics("test", config, "none")))
    loop.start()
    warming = asyncio.ensure_future(loop.warm_up())
    stream = loop.submit([1, 2, 3], SamplingParams(max_tokens=2))
    runner.may_end.set()
    await warming
    assert [output.finish_reason async for output in stream] == [None, "length"]
    assert runner.threads == ["engine"] * 3, "and nothing touches the model from elsewhere"
    await loop.close()


async def test_a_failed_warm_up_is_told():
    class Fails(SimulatedRunner):
        def warm_up(self) -> None:
            raise RuntimeError("no memory")

    config = EngineConfig(num_blocks=64, max_model_len=256)
    runner = Fails(PROFILES["instant"], b"abcdef")
    loop = EngineLoop(Engine(config, runner, Metrics("test", config, "none")))
    loop.start()
    with pytest.raises(EngineDeadError):
        await loop.warm_up()
    assert not loop.healthy


async def test_an_idle_engine_takes_as_many_as_can_run_at_once():
    config = EngineConfig(num_blocks=64, max_model_len=64, max_num_seqs=8, max_num_queued_reqs=2)
    runner = SlowToWarmUp()
    loop = EngineLoop(Engine(config, runner, Metrics("test", config, "none")))
    loop.start()
    warming = asyncio.create_task(loop.warm_up())
    await asyncio.sleep(0)  # lets the task begin: from here on the engine is busy
    streams = [loop.submit([1], SamplingParams(max_tokens=1)) for _ in range(10)]
    with pytest.raises(QueueFullError):
        loop.submit([1], SamplingParams(max_tokens=1))
    runner.may_end.set()
    await warming
    for stream in streams:
        assert [output.finish_reason async for output in stream] == ["length"]
    await loop.close()
