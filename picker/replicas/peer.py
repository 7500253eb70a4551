"""One other picker, followed at its address for as long as it is wanted."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError

from picker.replicas import replica_pb2 as pb
from picker.replicas.server import METHOD, metadata
from picker.replicas.told import Told

log = logging.getLogger(__name__)

SILENT_SECONDS = 3.0  # without an update, after which a connection is given up
FORGET_SECONDS = 3.0  # without a connection, after which what the picker has on pods is forgotten
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two tries
MAX_UPDATE = 16 << 20  # bytes
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_UPDATE),
    ("grpc.use_local_subchannel_pool", 1),  # a new try is a new connection
    ("grpc.enable_retries", 0),
]


class Peer:
    """Reads what the picker at an address tells, and begins again whenever that ends."""

    def __init__(self, address: str, hello: pb.Hello, secret: bytes, told: Told) -> None:
        """`hello`: who we are."""
        self.address = address
        self.replica: int | None = None  # who is there, once it was heard
        self.connected = False
        self.is_self = False  # the address is our own
        self.tried = asyncio.Event()  # it has told all that there is, or cannot be had
        self.updated = time.monotonic()  # when it was heard last
        self.error: str | None = None  # why it is not connected
        self._hello = hello
        self._secret = secret
        self._told = told
        self._forgetting: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Until cancelled, or found to be ourselves."""
        pause = FIRST_PAUSE
        try:
            while not self.is_self:
                try:
                    await self._follow()
                    self._lost("it ends")
                except grpc.aio.AioRpcError as problem:
                    self.is_self = problem.code() is grpc.StatusCode.ALREADY_EXISTS
                    self._lost(f"{problem.code().name}: {(problem.details() or '')[:200]}")
                except (DecodeError, ValueError):
                    self._lost("it sends what is no update")
                except TimeoutError:
                    self._lost(f"nothing came for {SILENT_SECONDS:g} s")
                except Exception as fault:  # of our own: it must not end this in silence
                    if self.error is None:
                        log.exception("What the picker at %s tells cannot be used", self.address)
                    self._lost(f"{type(fault).__name__}: {fault}")
                self.tried.set()
                pause = FIRST_PAUSE if self.connected else min(2 * pause, LONGEST_PAUSE)
                self.connected = False
                await asyncio.sleep(pause)
        finally:
            self.connected = False
            self.forget()

    def forget(self) -> None:
        """It is gone: what it had on pods counts no more."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        if self.replica is not None:
            self._told.gone(self.replica)

    async def _follow(self) -> None:
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call = channel.unary_stream(
                METHOD,
                request_serializer=pb.Hello.SerializeToString,
            )(self._hello, metadata=metadata(self._secret))
            loop = asyncio.get_running_loop()
            with suppress(asyncio.InvalidStateError):
                async with asyncio.timeout(SILENT_SECONDS) as silence:
                    while (data := await call.read()) is not grpc.aio.EOF:
                        silence.reschedule(loop.time() + SILENT_SECONDS)
                        await self._take(data)

    async def _take(self, data: bytes) -> None:
        update = pb.Update.FromString(data)
        if update.replica == self._hello.replica or not update.replica:
            raise ValueError("an update of nobody, or of ours")
        if not self.connected:
            self._found(update.replica)
        self.updated = time.monotonic()
        self._told.received_bytes += len(data)
        for _ in self._told.apply(update):
            await asyncio.sleep(0)
        if update.complete:
            self.tried.set()

    def _found(self, replica: int) -> None:
        if self.replica != replica:
            self.forget()  # another one was there before
        elif self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        self.replica = replica
        self.connected = True
        self.error = None
        log.info("We follow picker %016x at %s", replica, self.address)

    def _lost(self, why: str) -> None:
        if self.is_self:
            return
        if self.error is None:
            log.warning("The picker at %s tells us nothing: %s", self.address, why)
        self.error = why
        if self.connected:
            loop = asyncio.get_running_loop()
            self._forgetting = loop.call_later(FORGET_SECONDS, self.forget)
