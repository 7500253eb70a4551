"""What a store says, taken over into a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from picker.quota.policy import Policy
from picker.quota.store import Changes, Store


class Reader:
    """Keeps a policy up to date with a store, a page at a time: there may be many records.

    Args:
        policy: changed by nobody else.
        emptied: called before the policy is emptied because the store is.
    """

    def __init__(
        self, store: Store, policy: Policy, emptied: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._store = store
        self._policy = policy
        self._emptied = emptied
        self._reading: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Take over what was written before this call. Who come while somebody reads share the
        next reading: the one that has begun may have passed by what they ask for.

        Raises:
            StoreDown: it does not answer.
        """
        earlier = self._reading
        if earlier is not None and not earlier.done():
            await asyncio.shield(earlier)
        if self._reading is earlier:
            self._reading = asyncio.get_running_loop().create_task(self._read())
        assert self._reading is not None
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        """Read to the end. Until then the policy keeps its version: to the store it is stale."""
        policy = self._policy
        page = await self._first()
        whole, named = page.whole, set(page.records)
        while page.after:
            policy.update(policy.version, page.records)
            page = await self._store.changes(page.version, page.after)
            if page.whole:  # what was read until now is of another past
                page = await self._first()
                whole, named = page.whole, set()
            named |= page.records.keys()
        gone = policy.records.keys() - named if whole else ()
        policy.update(page.version, {**page.records, **dict.fromkeys(gone)})

    async def _first(self) -> Changes:
        page = await self._store.changes(self._policy.version)
        if not page.version and self._policy.records and self._emptied is not None:
            await self._emptied()
            page = await self._store.changes("")
        return page
