"""Pickers that follow each other over gRPC: who may, and what becomes of those who vanish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from picker.config import Config, ReplicasSection
from picker.replicas import outbox
from picker.replicas import replica_pb2 as pb
from picker.replicas.peers import check_settings
from picker.replicas.server import METHOD, metadata
from picker.service import check_config, check_start
from tests.picker.replicas.parts import ADDRESSES, Node, until
from tests.worker.process import free_ports

A, B, C = ADDRESSES
PROMPT = list(range(1, 30))
SECRET = b"a secret of many bytes"


@asynccontextmanager
async def cut_wire(port: int):
    """A way to a port that can be cut without either end being told, and mended."""
    open_ = asyncio.Event()
    open_.set()
    writers = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await open_.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await open_.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], open_
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_each_learns_what_the_other_does_and_a_new_one_what_there_was():
    ports = free_ports(3)
    async with Node(ports[0], ports) as one, Node(ports[1], ports) as two:
        await until(lambda: one.connected[0] and two.connected[0])
        one.picker.pick(A, 700)
        one.picker.learn(A, PROMPT)
        one.picker.sessions.keep(b"s" * 16, one.picker[B])
        one.picker.serve("ann", 50, priority=3)
        await until(lambda: two.picker.loads()[A] == (1, 700))
        await until(lambda: two.picker.holds(PROMPT)[A] == len(PROMPT))
        await until(lambda: two.picker.homes() == {b"s" * 16: B})
        await until(lambda: two.picker.service() == {(3, "ann"): 50.0})
        async with Node(ports[2], ports) as three:
            await three.replicas.first_round()
            assert three.connected == [True, True]
            assert three.picker.loads()[A] == (1, 700)
            assert three.picker.holds(PROMPT) == {A: len(PROMPT), B: 0, C: 0}
            assert three.picker.homes() == {b"s" * 16: B}
            three.picker.pick(B, 10)
            await until(lambda: one.picker.loads()[B] == two.picker.loads()[B] == (1, 10))


async def test_what_a_picker_had_on_pods_is_forgotten_when_it_is_gone_but_not_what_it_taught():
    ports = free_ports(2)
    async with Node(ports[0], ports) as one:
        async with Node(ports[1], ports) as two:
            await until(lambda: one.connected[0] and two.connected[0])
            two.picker.pick(A, 700)
            two.picker.learn(A, PROMPT)
            await until(lambda: one.picker.loads()[A] == (1, 700))
            await until(lambda: one.picker.holds(PROMPT)[A] == len(PROMPT))
        await until(lambda: one.picker.loads()[A] == (0, 0))
        assert one.picker.holds(PROMPT)[A] == len(PROMPT)
        # Another one comes at the same address, and is told by the survivor.
        async with Node(ports[1], ports) as two:
            await until(lambda: two.picker.holds(PROMPT)[A] == len(PROMPT))
            two.picker.pick(B, 5)
            await until(lambda: one.picker.loads() == {A: (0, 0), B: (1, 5), C: (0, 0)})


async def test_a_cut_wire_is_noticed_and_what_was_missed_is_told_afterwards():
    ports = free_ports(2)
    async with (
        cut_wire(ports[1]) as (port, wire),
        Node(ports[1], []) as two,
        Node(ports[0], [port]) as one,
    ):
        two.picker.pick(A, 700)
        await until(lambda: one.picker.loads()[A] == (1, 700))
        wire.clear()
        two.picker.end(A, 700)
        two.picker.pick(B, 300)
        two.picker.learn(B, PROMPT)
        await until(lambda: one.picker.loads()[A] == (0, 0))
        assert one.picker.loads()[B] == (0, 0)
        assert one.connected == [False]
        wire.set()
        await until(lambda: one.picker.loads() == {A: (0, 0), B: (1, 300), C: (0, 0)})
        await until(lambda: one.picker.holds(PROMPT)[B] == len(PROMPT))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"secret": b"another secret, of as many bytes"}, "UNAUTHENTICATED"),
        ({}, "UNAUTHENTICATED"),
        ({"secret": SECRET, "pool": "other"}, "serves the pool test, not 'other'"),
    ],
)
async def test_only_pickers_of_the_pool_that_know_the_secret_are_told(other, why):
    ports = free_ports(2)
    async with Node(ports[0], [], secret=SECRET) as one, Node(ports[1], ports[:1], **other) as two:
        await until(lambda: two.replicas.peers.all[0].error)
        assert why in two.replicas.peers.all[0].error
        assert one.replicas.news.followers == 0
    async with Node(ports[0], [], secret=SECRET), Node(ports[1], ports[:1], secret=SECRET) as two:
        await until(lambda: two.connected == [True])


async def test_ones_own_address_among_the_peers_does_no_harm():
    (port,) = free_ports(1)
    async with Node(port, [port]) as one:
        await until(lambda: not one.replicas.peers.all)
        one.picker.pick(A, 5)
        assert one.picker.loads()[A] == (1, 5)
        assert one.replicas.state()["peers"] == []


async def test_pickers_are_found_behind_a_name():
    (port,) = free_ports(1)
    async with Node(port, []), Node(0, [], service=f"localhost:{port}") as two:
        await until(lambda: any(two.connected))


async def test_a_name_that_cannot_be_one_keeps_nobody_waiting(caplog):
    async with Node(0, [], service="two..dots:1") as one:
        await one.replicas.first_round()
        assert "two..dots is not found" in caplog.text


async def test_a_fault_of_ours_does_not_end_the_hearing(caplog):
    ports = free_ports(2)
    async with Node(ports[0], []) as one, Node(ports[1], ports[:1]) as two:
        apply, faults = two.replicas.told.apply, iter([KeyError("x")])

        def faulty(update: pb.Update) -> Iterator[None]:
            for fault in faults:
                raise fault
            return apply(update)

        two.replicas.told.apply = faulty
        one.picker.pick(A, 5)
        await until(lambda: two.picker.loads()[A] == (1, 5))
    assert "KeyError" in caplog.text


async def test_a_follower_that_falls_behind_is_told_all_anew(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_BYTES", 1 << 16)
    (port,) = free_ports(1)
    async with Node(port, []) as one, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(METHOD)(
            pb.Hello(replica=9, pool="test").SerializeToString(), metadata=metadata(b"")
        )
        first = pb.Update.FromString(await call.read())
        assert first.HasField("begin")
        # It reads nothing while megabytes come: what is kept for it stays small.
        for prompt in range(3000):
            one.picker.learn(A, range(1000 * prompt, 1000 * prompt + 400))
            if prompt % 50 == 0:
                await asyncio.sleep(0)
            (kept,) = one.replicas.news._outboxes
            assert kept._size <= 1 << 16
        one.picker.pick(B, 77)
        loads = {}
        begun = 0
        async with asyncio.timeout(30):
            while loads.get(B) != 77 or not begun:
                update = pb.Update.FromString(await call.read())
                begun += update.HasField("begin")
                loads |= {load.pod.address: load.tokens for load in update.loads}
        assert one.replicas.news.snapshots >= 2


class Impostor:
    """Answers Follow with whatever a test wants."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = messages
        self.asked = 0

    @asynccontextmanager
    async def running(self):
        async def follow(_: bytes, context: grpc.aio.ServicerContext) -> None:
            self.asked += 1
            for message in self._messages:
                await context.write(message)

        server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(follow)
        service, method = METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(None)


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff no protobuf",
        pb.Update(number=1).SerializeToString(),
        b"\x00" * (17 << 20),
    ],
    ids=["garbage", "nobody's", "too long"],
)
async def test_what_is_no_update_changes_nothing_and_is_asked_for_again(message):
    impostor = Impostor(message)
    async with impostor.running() as port, Node(0, [port]) as one:
        await until(lambda: impostor.asked >= 2)
        assert one.replicas.peers.all[0].error
        assert one.picker.loads() == dict.fromkeys(ADDRESSES, (0, 0))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"peers": ["10.0.0.1"]}, "replicas.peers: address '10.0.0.1' has no port"),
        ({"peers": ["name:1"]}, "is a name"),
        ({"peers": [f"10.0.0.1:{port}" for port in range(1, 66)]}, "64 are the most"),
        ({"service": "pickers"}, "'pickers' is no name:port"),
        ({"service": "pickers:0"}, "must be 1 to 65535"),
        ({"service": "a:1", "peers": ["10.0.0.1:1"]}, "not both"),
    ],
)
def test_settings_that_cannot_be_are_refused(section, why):
    with pytest.raises(ValueError, match="replicas") as refused:
        check_settings(ReplicasSection(**section))
    assert why in str(refused.value)


def test_a_secret_that_cannot_be_read_refuses_a_start_but_no_change(tmp_path):
    secret = tmp_path / "secret"
    peers = ReplicasSection(peers=["10.0.0.1:1"], secret=str(secret))
    config = Config(replicas=peers)
    for content, why in ((None, "No such file"), (b"x" * 15, "must hold 16 to")):
        if content is not None:
            secret.write_bytes(content)
        check_config(config)
        with pytest.raises(ValueError, match=why):
            check_start(config)
    secret.write_bytes(SECRET)
    check_start(config)
