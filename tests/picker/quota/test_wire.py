"""The connection to Redis that all calls share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import hiredis
import pytest

from picker.quota.redis_url import parse
from picker.quota.wire import Wire, WireError
from tests.picker.quota.redis_server import DEADLINE, running

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def test_calls_made_at_once_are_answered_each_with_its_own() -> None:
    with running() as server:
        wire = Wire(parse(server.url), DEADLINE)
        answers = await asyncio.gather(
            *(wire.call("ECHO", f"{number}" * (1 + 997 * number % 40_000)) for number in range(200))
        )
        assert answers == [
            f"{number}".encode() * (1 + 997 * number % 40_000) for number in range(200)
        ]
        with server.client() as client:
            assert len(client.client_list()) == 2  # ours is one, for all of them
        wire.close()


async def test_a_refusal_fails_its_own_call_only() -> None:
    with running() as server:
        wire = Wire(parse(server.url), DEADLINE)
        first, wrong, last = await asyncio.gather(
            wire.call("ECHO", "a"),
            wire.call("EVALSHA", "0" * 40, 0),
            wire.call("ECHO", "b"),
            return_exceptions=True,
        )
        assert (first, last) == (b"a", b"b")
        assert isinstance(wrong, hiredis.ReplyError) and str(wrong).startswith("NOSCRIPT")
        wire.close()


async def test_it_greets_with_password_and_database() -> None:
    with running("--user", "alice", "on", ">p@ss", "~*", "+@all") as server:
        address = f"127.0.0.1:{server.port}"
        wire = Wire(parse(f"redis://alice:p%40ss@{address}/3"), DEADLINE)
        await wire.call("SET", "k", "v")
        assert b"db=3" in bytes(await wire.call("CLIENT", "INFO"))  # type: ignore[call-overload]
        assert b"user=alice" in bytes(await wire.call("CLIENT", "INFO"))  # type: ignore[call-overload]
        wire.close()
        wrong = Wire(parse(f"redis://alice:wrong@{address}/3"), DEADLINE)
        with pytest.raises(hiredis.ReplyError, match="WRONGPASS"):
            await wrong.call("GET", "k")


async def test_it_connects_again_after_its_server_was_gone() -> None:
    with running() as server:
        wire = Wire(parse(server.url), DEADLINE)
        await wire.call("PING")
        server.kill()
        with pytest.raises(OSError):
            await wire.call("PING")
        server.start()
        assert await wire.call("ECHO", "a") == b"a"
        wire.close()


async def test_a_cancelled_call_leaves_the_others_their_answers() -> None:
    with running() as server:
        wire = Wire(parse(server.url), DEADLINE)
        await wire.call("PING")
        calls = [asyncio.ensure_future(wire.call("ECHO", str(number))) for number in range(9)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[1::2] == [b"1", b"3", b"5", b"7"]
        assert await wire.call("ECHO", "next") == b"next"
        wire.close()


async def served(serve: Serve, seconds: float) -> None:
    """Call a server that is no Redis; the call must fail in time."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()

    async with await asyncio.start_server(run, "127.0.0.1", 0) as server:
        wire = Wire(parse(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"), seconds)
        began = time.monotonic()
        with pytest.raises(WireError):
            await wire.call("PING")
        assert time.monotonic() - began < DEADLINE
        wire.close()


async def test_silence_is_an_answer_after_the_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    await served(silent, 0.05)


async def test_nonsense_and_a_closed_connection_are_told_at_once() -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    await served(nonsense, DEADLINE)
    await served(rude, DEADLINE)
