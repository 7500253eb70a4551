"""The other end of the gRPC admin service: a desk that asks a picker's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import grpc
import msgspec
from google.protobuf.message import Message

from picker.quota import admin_pb2 as pb
from picker.quota.editor import Corrected, Diff, Why, Written
from picker.quota.ledger import Denial, Reservation, Use, UseKey
from picker.quota.messages import put, take
from picker.quota.model import Grant, Limit, NotFound, OnFailure, QuotaError, Subject
from picker.quota.policy import Policy, Record
from picker.quota.service import BEARER, CONFLICT, MAX_ASKED, MAX_TOLD, SERVICE
from picker.quota.store import Conflict, Entry, Fault, StoreDown
from picker.quota.views import Verdict, View

SECONDS = 30.0  # that a server may take for an answer: picks go first there
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_TOLD),
    ("grpc.max_send_message_length", MAX_ASKED),
]

M = TypeVar("M", bound=Message)


class Refused(OSError):
    """The server does not do it: it does not know our token, or not the call."""


class RemoteDesk:
    """Administers the quotas of the picker at an address.

    Args:
        server: `HOST:PORT`.
        token: one of the server's file of tokens.
        authority: certificates (PEM) that the server's must follow from; None: no TLS.
    """

    def __init__(self, server: str, token: str, authority: bytes | None = None) -> None:
        self._server = server
        self._metadata = (("authorization", f"{BEARER}{token}"),)
        if authority is None:
            self._channel = grpc.aio.insecure_channel(server, OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(authority)
            self._channel = grpc.aio.secure_channel(server, credentials, OPTIONS)

    async def close(self) -> None:
        await self._channel.close()

    async def read(self) -> Policy:
        told = await self._call("Read", pb.ReadRequest(), pb.Policy)
        policy = Policy(cast(OnFailure, told.on_failure))
        records = {name: take(record, Record) for name, record in told.records.items()}
        policy.replace(told.version, records)
        return policy

    async def set(
        self,
        name: str,
        limits: Sequence[Limit] = (),
        *,
        parent: str | None = None,
        keep: Sequence[str] = (),
        why: Why,
    ) -> Written:
        asked = pb.SetRequest(name=name, parent=parent, keep=keep, why=_why(why))
        asked.limits.extend(put(pb.Limit(), limit) for limit in limits)
        return await self._write("Set", asked)

    async def unset(
        self, name: str, names: Sequence[str] | None = None, *, model: str = "", why: Why
    ) -> Written:
        asked = pb.UnsetRequest(
            name=name, limits=names or (), whole=names is None, model=model, why=_why(why)
        )
        return await self._write("Unset", asked)

    async def block(self, name: str, reason: str, *, why: Why) -> Written:
        return await self._write("Block", pb.BlockRequest(name=name, reason=reason, why=_why(why)))

    async def unblock(self, name: str, *, why: Why) -> Written:
        return await self._write("Unblock", pb.UnblockRequest(name=name, why=_why(why)))

    async def expire(self, name: str, at: float | None, *, why: Why) -> Written:
        return await self._write("Expire", pb.ExpireRequest(name=name, at=at, why=_why(why)))

    async def grant(self, name: str, grant: Grant, *, why: Why) -> Written:
        asked = pb.GrantRequest(name=name, grant=put(pb.Grant(), grant), why=_why(why))
        return await self._write("Grant", asked)

    async def revoke_grant(self, name: str, id: str, *, why: Why) -> Written:
        asked = pb.RevokeGrantRequest(name=name, id=id, why=_why(why))
        return await self._write("RevokeGrant", asked)

    async def create_key(
        self, parent: str, id: str | None = None, *, expires: float | None = None, why: Why
    ) -> tuple[Written, str]:
        asked = pb.CreateKeyRequest(parent=parent, id=id, expires=expires, why=_why(why))
        made = await self._call("CreateKey", asked, pb.CreatedKey)
        return take(made.written, Written), made.secret

    async def rotate_key(self, name: str, *, why: Why) -> tuple[Written, str]:
        asked = pb.RotateKeyRequest(name=name, why=_why(why))
        made = await self._call("RotateKey", asked, pb.CreatedKey)
        return take(made.written, Written), made.secret

    async def revoke_key(self, name: str, *, why: Why) -> Written:
        return await self._write("RevokeKey", pb.RevokeKeyRequest(name=name, why=_why(why)))

    async def apply(
        self, subjects: Mapping[str, Subject], *, prune: bool = False, why: Why
    ) -> Diff:
        asked = pb.ApplyRequest(prune=prune, why=_why(why))
        for name, subject in subjects.items():
            put(asked.subjects[name], subject)
        return take(await self._call("Apply", asked, pb.Diff), Diff)

    async def adjust(
        self, name: str, limit: str, amount: int, *, model: str = "", why: Why
    ) -> list[Corrected]:
        asked = pb.AdjustRequest(name=name, limit=limit, amount=amount, model=model, why=_why(why))
        told = await self._call("Adjust", asked, pb.CorrectedList)
        return [take(each, Corrected) for each in told.corrected]

    async def reset(
        self, name: str, limit: str | None = None, *, model: str = "", why: Why
    ) -> list[Corrected]:
        asked = pb.ResetRequest(name=name, limit=limit, model=model, why=_why(why))
        told = await self._call("Reset", asked, pb.CorrectedList)
        return [take(each, Corrected) for each in told.corrected]

    async def release(self, id: str, *, why: Why) -> bool:
        asked = pb.ReleaseRequest(id=id, why=_why(why))
        return (await self._call("Release", asked, pb.Released)).released

    async def views(self, subject: str, model: str = "") -> list[View]:
        asked = pb.ViewsRequest(subject=subject, model=model)
        told = await self._call("Views", asked, pb.ViewList)
        return [take(view, View) for view in told.views]

    async def own_views(self, subjects: Sequence[str]) -> list[View]:
        asked = pb.OwnViewsRequest(subjects=subjects)
        told = await self._call("OwnViews", asked, pb.ViewList)
        return [take(view, View) for view in told.views]

    async def verdict(
        self, subject: str, model: str, *, prompt_tokens: int, output_tokens: int
    ) -> Verdict:
        asked = pb.VerdictRequest(
            subject=subject, model=model, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        return take(await self._call("Verdict", asked, pb.VerdictReply), Verdict)

    async def uses(self, since: int, subject: str = "") -> dict[UseKey, Use]:
        told = await self._call("Uses", pb.UsesRequest(since=since, subject=subject), pb.UseList)
        return {(row.day, row.subject, row.model): take(row.use, Use) for row in told.rows}

    async def denials(self) -> list[Denial]:
        told = await self._call("Denials", pb.DenialsRequest(), pb.DenialList)
        return [take(denial, Denial) for denial in told.denials]

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]:
        asked = pb.AuditRequest(subject=subject, limit=limit)
        told = await self._call("Audit", asked, pb.EntryList)
        return [take(entry, Entry) for entry in told.entries]

    async def reservations(self, subject: str = "") -> list[Reservation]:
        asked = pb.ReservationsRequest(subject=subject)
        told = await self._call("Reservations", asked, pb.ReservationList)
        return [take(held, Reservation) for held in told.reservations]

    async def verify(self) -> list[Fault]:
        told = await self._call("Verify", pb.VerifyRequest(), pb.FaultList)
        return [take(fault, Fault) for fault in told.faults]

    async def status(self) -> dict[str, str | int | float]:
        told = await self._call("Status", pb.StatusRequest(), pb.StoreStatus)
        return msgspec.json.decode(told.json, type=dict[str, str | int | float])

    async def _write(self, call: str, asked: Message) -> Written:
        return take(await self._call(call, asked, pb.Written), Written)

    async def _call(self, name: str, asked: Message, kind: type[M]) -> M:
        """The server's answer, or its refusal as what a store would raise."""
        call: Any = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        try:
            answer: M = await call(asked, metadata=self._metadata, timeout=SECONDS)
        except grpc.aio.AioRpcError as refused:
            raise self._why_not(refused) from refused
        return answer

    def _why_not(self, refused: grpc.aio.AioRpcError) -> Exception:
        code, message = refused.code(), refused.details() or ""
        if code is grpc.StatusCode.NOT_FOUND:
            return NotFound(message)
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return QuotaError(message)
        if code is grpc.StatusCode.ABORTED:
            told = dict(refused.trailing_metadata() or ()).get(CONFLICT)
            if told is not None:
                found = pb.Conflict.FromString(told)
                return Conflict(found.subject, found.expected, found.found)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return StoreDown(f"{self._server} does not answer: {message}")
        return Refused(f"{self._server}: {message} ({code.name.lower()})")


def _why(why: Why) -> pb.Why:
    return put(pb.Why(), why)
