"""The gRPC admin service of a picker: proto/admin.proto over a desk.

Who asks is whom the token belongs to, and the audit log names them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message

from picker.quota import admin_pb2 as pb
from picker.quota.administration import Administration
from picker.quota.editor import Why, Written
from picker.quota.messages import put, take
from picker.quota.model import Grant, Limit, NotFound, QuotaError, Subject
from picker.quota.store import Conflict, StoreDown
from picker.quota.tokens import Tokens
from picker.quota.unhurried import unhurried

log = logging.getLogger(__name__)

SERVICE = "warmpath.quota.v1.QuotaAdmin"
CONFLICT = "warmpath-conflict-bin"  # trailing metadata: a message Conflict
BEARER = "Bearer "
MAX_ASKED = 16 << 20  # bytes of an import: some 100,000 subjects
MAX_TOLD = 256 << 20  # bytes of an answer: how those stand
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_ASKED),
    ("grpc.max_send_message_length", MAX_TOLD),
]
CODES = (
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (QuotaError, grpc.StatusCode.INVALID_ARGUMENT),
    (Conflict, grpc.StatusCode.ABORTED),
    (StoreDown, grpc.StatusCode.UNAVAILABLE),
)

Call = Callable[[Administration, Any], Awaitable[Message]]
L = TypeVar("L", bound=Message)


class AdminService:
    """Answers for a store.

    Args:
        desk: makes an actor's.
        tokens: who may ask.
    """

    def __init__(self, desk: Callable[[str], Administration], tokens: Tokens) -> None:
        self._desk = cache(desk)  # an actor's remembers what it has read
        self._tokens = tokens

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on a gRPC server that has not started yet."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(call),
                request_deserializer=getattr(pb, f"{name}Request").FromString,
                response_serializer=lambda reply: reply.SerializeToString(),
            )
            for name, call in CALLS.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _handler(self, call: Call) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Message]]:
        async def handle(request: Any, context: grpc.aio.ServicerContext) -> Message:
            actor = await self._actor(context)
            try:
                return await call(self._desk(actor), request)
            except tuple(kind for kind, _ in CODES) as problem:
                if isinstance(problem, Conflict):
                    told = put(pb.Conflict(), problem).SerializeToString()
                    context.set_trailing_metadata(((CONFLICT, told),))
                code = next(code for kind, code in CODES if isinstance(problem, kind))
                await context.abort(code, str(problem))
            raise AssertionError("abort raises")

        return handle

    async def _actor(self, context: grpc.aio.ServicerContext) -> str:
        """Whose token a call carries; the call ends when it is nobody's."""
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        actor = None
        if isinstance(given, str) and given.startswith(BEARER):
            try:
                actor = self._tokens.actor(given.removeprefix(BEARER))
            except ValueError as problem:
                log.error("Nobody can administer quotas: %s", problem)
                why = "the tokens here cannot be read: its log tells why"
                await context.abort(grpc.StatusCode.INTERNAL, why)
        if actor is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this token is not known here")
            raise AssertionError("abort raises")
        return actor


async def _read(admin: Administration, _: pb.ReadRequest) -> pb.Policy:
    policy = await admin.read()
    told = pb.Policy(version=policy.version, on_failure=policy.on_failure)
    async for name, record in unhurried(list(policy.records.items())):
        put(told.records[name], record)
    return told


async def _set(admin: Administration, asked: pb.SetRequest) -> pb.Written:
    limits = [take(limit, Limit) for limit in asked.limits]
    parent, keep, why = _given(asked, "parent"), list(asked.keep), _why(asked)
    return _written(await admin.set(asked.name, limits, parent=parent, keep=keep, why=why))


async def _unset(admin: Administration, asked: pb.UnsetRequest) -> pb.Written:
    names = None if asked.whole else list(asked.limits)
    return _written(await admin.unset(asked.name, names, model=asked.model, why=_why(asked)))


async def _block(admin: Administration, asked: pb.BlockRequest) -> pb.Written:
    return _written(await admin.block(asked.name, asked.reason, why=_why(asked)))


async def _unblock(admin: Administration, asked: pb.UnblockRequest) -> pb.Written:
    return _written(await admin.unblock(asked.name, why=_why(asked)))


async def _expire(admin: Administration, asked: pb.ExpireRequest) -> pb.Written:
    return _written(await admin.expire(asked.name, _given(asked, "at"), why=_why(asked)))


async def _grant(admin: Administration, asked: pb.GrantRequest) -> pb.Written:
    return _written(await admin.grant(asked.name, take(asked.grant, Grant), why=_why(asked)))


async def _revoke_grant(admin: Administration, asked: pb.RevokeGrantRequest) -> pb.Written:
    return _written(await admin.revoke_grant(asked.name, asked.id, why=_why(asked)))


async def _create_key(admin: Administration, asked: pb.CreateKeyRequest) -> pb.CreatedKey:
    id, expires = _given(asked, "id"), _given(asked, "expires")
    written, secret = await admin.create_key(asked.parent, id, expires=expires, why=_why(asked))
    return pb.CreatedKey(written=_written(written), secret=secret)


async def _rotate_key(admin: Administration, asked: pb.RotateKeyRequest) -> pb.CreatedKey:
    written, secret = await admin.rotate_key(asked.name, why=_why(asked))
    return pb.CreatedKey(written=_written(written), secret=secret)


async def _revoke_key(admin: Administration, asked: pb.RevokeKeyRequest) -> pb.Written:
    return _written(await admin.revoke_key(asked.name, why=_why(asked)))


async def _apply(admin: Administration, asked: pb.ApplyRequest) -> pb.Diff:
    subjects = {
        name: take(subject, Subject) async for name, subject in unhurried(asked.subjects.items())
    }
    return put(pb.Diff(), await admin.apply(subjects, prune=asked.prune, why=_why(asked)))


async def _views(admin: Administration, asked: pb.ViewsRequest) -> pb.ViewList:
    return await _list(pb.ViewList(), await admin.views(asked.subject, asked.model))


async def _own_views(admin: Administration, asked: pb.OwnViewsRequest) -> pb.ViewList:
    return await _list(pb.ViewList(), await admin.own_views(list(asked.subjects)))


async def _verdict(admin: Administration, asked: pb.VerdictRequest) -> pb.VerdictReply:
    verdict = await admin.verdict(
        asked.subject,
        asked.model,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
    )
    return put(pb.VerdictReply(), verdict)


async def _uses(admin: Administration, asked: pb.UsesRequest) -> pb.UseList:
    found = pb.UseList()
    uses = await admin.uses(asked.since, asked.subject)
    async for (day, subject, model), use in unhurried(uses.items()):
        put(found.rows.add(day=day, subject=subject, model=model).use, use)
    return found


async def _adjust(admin: Administration, asked: pb.AdjustRequest) -> pb.CorrectedList:
    corrected = await admin.adjust(
        asked.name, asked.limit, asked.amount, model=asked.model, why=_why(asked)
    )
    return await _list(pb.CorrectedList(), corrected)


async def _reset(admin: Administration, asked: pb.ResetRequest) -> pb.CorrectedList:
    limit = _given(asked, "limit")
    corrected = await admin.reset(asked.name, limit, model=asked.model, why=_why(asked))
    return await _list(pb.CorrectedList(), corrected)


async def _reservations(admin: Administration, asked: pb.ReservationsRequest) -> pb.ReservationList:
    return await _list(pb.ReservationList(), await admin.reservations(asked.subject))


async def _release(admin: Administration, asked: pb.ReleaseRequest) -> pb.Released:
    return pb.Released(released=await admin.release(asked.id, why=_why(asked)))


async def _denials(admin: Administration, _: pb.DenialsRequest) -> pb.DenialList:
    return await _list(pb.DenialList(), await admin.denials())


async def _audit(admin: Administration, asked: pb.AuditRequest) -> pb.EntryList:
    return await _list(pb.EntryList(), await admin.audit(asked.subject, asked.limit))


async def _verify(admin: Administration, _: pb.VerifyRequest) -> pb.FaultList:
    return await _list(pb.FaultList(), await admin.verify())


async def _status(admin: Administration, _: pb.StatusRequest) -> pb.StoreStatus:
    return pb.StoreStatus(json=msgspec.json.encode(await admin.status()).decode())


CALLS: dict[str, Call] = {
    "Read": _read,
    "Set": _set,
    "Unset": _unset,
    "Block": _block,
    "Unblock": _unblock,
    "Expire": _expire,
    "Grant": _grant,
    "RevokeGrant": _revoke_grant,
    "CreateKey": _create_key,
    "RotateKey": _rotate_key,
    "RevokeKey": _revoke_key,
    "Apply": _apply,
    "Views": _views,
    "OwnViews": _own_views,
    "Verdict": _verdict,
    "Uses": _uses,
    "Adjust": _adjust,
    "Reset": _reset,
    "Reservations": _reservations,
    "Release": _release,
    "Denials": _denials,
    "Audit": _audit,
    "Verify": _verify,
    "Status": _status,
}


def _why(asked: Any) -> Why:
    return take(asked.why, Why)


def _given(message: Message, field: str) -> Any:
    """An optional field; None where it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def _written(written: Written) -> pb.Written:
    return put(pb.Written(), written)


async def _list(message: L, items: Iterable[object]) -> L:
    """Fill the one repeated field of a message."""
    (field,) = message.DESCRIPTOR.fields
    held = getattr(message, field.name)
    async for item in unhurried(items):
        put(held.add(), item)
    return message
