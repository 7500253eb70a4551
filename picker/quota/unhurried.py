"""Long work on a loop that has more urgent things to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 20  # subjects or limits: about a millisecond


async def unhurried(items: Iterable[T]) -> AsyncIterator[T]:
    """Items, where picks go first after each few of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
