"""The gRPC service that other pickers follow us by."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from picker import grpc_port
from picker.replicas import replica_pb2 as pb
from picker.replicas.news import News

log = logging.getLogger(__name__)

SERVICE = "warmpath.replica.v1.Replica"
METHOD = f"/{SERVICE}/Follow"
BEARER = "Bearer "
MAX_FOLLOWERS = 64
MAX_HELLO = 4096  # bytes
ANEW_SECONDS = 1.0  # between two times that a follower is told all that there is


class ReplicaServer:
    """Tells our news to whoever is of our pool, and knows the secret where there is one."""

    def __init__(self, news: News, pool: str, secret: bytes, host: str, port: int) -> None:
        self._news = news
        self._pool = pool
        self._token = token(secret)
        self._host = host
        self._port = port
        self._server = grpc_port.new_server([("grpc.max_receive_message_length", MAX_HELLO)])
        handler = grpc.unary_stream_rpc_method_handler(self._follow)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Follow": handler}),)
        )

    async def start(self) -> int:
        """Listen. Returns the port. Raises OSError."""
        return await grpc_port.start(self._server, self._host, self._port)

    async def stop(self) -> None:
        self._news.stop()
        await self._server.stop(None)

    async def _follow(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        hello = await self._checked(request, context)
        outbox = self._news.follow(hello.replica)
        log.info("Picker %016x follows us", hello.replica)
        try:
            while True:
                update = await outbox.next()
                if update is not None:
                    await context.write(update)
                    continue
                self._news.flush()  # what has changed so far is part of what there is
                outbox.begin()
                for part in self._news.snapshot():
                    await context.write(part)
                    if outbox.lost:  # more came meanwhile than can be kept
                        await asyncio.sleep(ANEW_SECONDS)
                        break
        finally:
            self._news.unfollow(outbox)

    async def _checked(self, request: bytes, context: grpc.aio.ServicerContext) -> pb.Hello:
        """Whoever asks; a call that may not be is aborted."""
        code = grpc.StatusCode
        told = dict(context.invocation_metadata()).get("authorization", "")
        if self._token and not hmac.compare_digest(
            str(told).encode(errors="replace"), f"{BEARER}{self._token}".encode()
        ):
            await context.abort(code.UNAUTHENTICATED, "replicas.secret is another one here")
        try:
            hello: pb.Hello = pb.Hello.FromString(request)
        except DecodeError:
            await context.abort(code.INVALID_ARGUMENT, "not a Hello")
        if hello.pool != self._pool:
            why = f"this picker serves the pool {self._pool}, not {hello.pool[:64]!r}"
            await context.abort(code.FAILED_PRECONDITION, why)
        if not hello.replica or hello.replica == self._news.replica:
            await context.abort(code.ALREADY_EXISTS, "this is the asking picker itself")
        if self._news.followers >= MAX_FOLLOWERS:
            await context.abort(code.RESOURCE_EXHAUSTED, f"{MAX_FOLLOWERS} pickers follow already")
        return hello


def token(secret: bytes) -> str:
    """What a call shows to prove that it knows a secret; empty without one."""
    if not secret:
        return ""
    return hmac.new(secret, b"warmpath replica", hashlib.sha256).hexdigest()


def metadata(secret: bytes) -> tuple[tuple[str, Any], ...]:
    """Of a call."""
    return (("authorization", BEARER + token(secret)),) if secret else ()
