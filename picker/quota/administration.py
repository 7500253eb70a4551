"""All that administrators can do and see, whether at a store or through a picker's admin service.

`Desk` does it at a store, `picker.quota.client.RemoteDesk` asks a server that has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from picker.quota.editor import Corrected, Diff, Editor, Why, Written
from picker.quota.ledger import Denial, Reservation, Use, UseKey
from picker.quota.model import Grant, Limit, Subject
from picker.quota.policy import Policy
from picker.quota.store import Entry, Fault
from picker.quota.views import Verdict, View, own_views, uses, verdict, views


class Administration(Protocol):
    """Everything that `warmpath quota` asks for; see Editor for what changes something.

    All calls raise StoreDown; those that name something raise QuotaError when it cannot be, and
    NotFound when it is not there; those that write raise Conflict.
    """

    async def read(self) -> Policy: ...

    async def set(
        self,
        name: str,
        limits: Sequence[Limit] = (),
        *,
        parent: str | None = None,
        keep: Sequence[str] = (),
        why: Why,
    ) -> Written: ...

    async def unset(
        self, name: str, names: Sequence[str] | None = None, *, model: str = "", why: Why
    ) -> Written: ...

    async def block(self, name: str, reason: str, *, why: Why) -> Written: ...

    async def unblock(self, name: str, *, why: Why) -> Written: ...

    async def expire(self, name: str, at: float | None, *, why: Why) -> Written: ...

    async def grant(self, name: str, grant: Grant, *, why: Why) -> Written: ...

    async def revoke_grant(self, name: str, id: str, *, why: Why) -> Written: ...

    async def create_key(
        self, parent: str, id: str | None = None, *, expires: float | None = None, why: Why
    ) -> tuple[Written, str]: ...

    async def rotate_key(self, name: str, *, why: Why) -> tuple[Written, str]: ...

    async def revoke_key(self, name: str, *, why: Why) -> Written: ...

    async def apply(
        self, subjects: Mapping[str, Subject], *, prune: bool = False, why: Why
    ) -> Diff: ...

    async def adjust(
        self, name: str, limit: str, amount: int, *, model: str = "", why: Why
    ) -> list[Corrected]: ...

    async def reset(
        self, name: str, limit: str | None = None, *, model: str = "", why: Why
    ) -> list[Corrected]: ...

    async def release(self, id: str, *, why: Why) -> bool: ...

    async def views(self, subject: str, model: str = "") -> list[View]:
        """How each limit stands that a subject's requests meet, its own first."""
        ...

    async def own_views(self, subjects: Sequence[str]) -> list[View]:
        """How the limits of some subjects stand, without those above them."""
        ...

    async def verdict(
        self, subject: str, model: str, *, prompt_tokens: int, output_tokens: int
    ) -> Verdict:
        """Whether a request would pass now. Nothing is charged."""
        ...

    async def uses(self, since: int, subject: str = "") -> dict[UseKey, Use]:
        """The books of a subject and all below it, from a day on (days since 1970, UTC)."""
        ...

    async def denials(self) -> list[Denial]: ...

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]: ...

    async def reservations(self, subject: str = "") -> list[Reservation]: ...

    async def verify(self) -> list[Fault]: ...

    async def status(self) -> dict[str, str | int | float]: ...

    async def close(self) -> None: ...


class Desk(Editor):
    """An editor who also looks around in the store."""

    async def views(self, subject: str, model: str = "") -> list[View]:
        return await views(self.store, await self.read(), subject, model)

    async def own_views(self, subjects: Sequence[str]) -> list[View]:
        return await own_views(self.store, await self.read(), subjects)

    async def verdict(
        self, subject: str, model: str, *, prompt_tokens: int, output_tokens: int
    ) -> Verdict:
        policy = await self.read()
        return await verdict(
            self.store,
            policy,
            subject,
            model,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )

    async def uses(self, since: int, subject: str = "") -> dict[UseKey, Use]:
        return await uses(self.store, await self.read(), since, subject)

    async def denials(self) -> list[Denial]:
        return await self.store.denials()

    async def audit(self, subject: str = "", limit: int = 100) -> list[Entry]:
        return await self.store.audit(subject, limit)

    async def reservations(self, subject: str = "") -> list[Reservation]:
        return await self.store.reservations(subject)

    async def verify(self) -> list[Fault]:
        return await self.store.verify()

    async def status(self) -> dict[str, str | int | float]:
        return await self.store.status()

    async def close(self) -> None:
        await self.store.close()
