"""What each pod holds, as its engine tells by KV events.

Where a request's tokens cannot be had, it is matched by its bytes, with what was sent where.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import numpy as np

from picker import config
from picker.pool import Endpoint, Pool
from picker.prefix.approximate import ApproximatePrefix, Use
from picker.prefix.index import BlockIndex, Lookup
from picker.prefix.keys import TokenPrompt
from picker.prefix.match import By, Match
from picker.prefix.subscriber import Subscriptions
from picker.prefix.tokens import Tokens
from picker.request import LLMRequest
from scorers.pods import Column

HOUSEKEEPING = 0.25  # seconds between two looks at what has expired


class EventsPrefix:
    """Matches prompts with what the pods' engines say that they cache. See PrefixProducer.

    It owns the index, those who feed it, and the tokenizer.
    """

    def __init__(self, pool: Pool, settings: config.Prefix) -> None:
        self.index = BlockIndex(pool.capacity, settings.index_blocks, fresh=settings.fresh)
        self.approximate = ApproximatePrefix(pool, settings)
        self.subscriptions = Subscriptions(pool, settings, self.index)
        self.tokens = Tokens(pool, settings)
        self._housekeeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the tokenizer, and follow all pods from now on.

        Raises:
            ConfigError: there is no such tokenizer.
        """
        await self.tokens.start()
        await self.subscriptions.start()
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def stop(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        await self.subscriptions.stop()
        await self.tokens.stop()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING)
            self.index.expire(time.monotonic())
            while self.index.tidy():
                await asyncio.sleep(0)  # the requests that came meanwhile go first

    def resized(self, endpoint: Endpoint, kv_tokens: int) -> None:
        """An endpoint has told the size of its KV cache, in tokens."""
        self.approximate.resized(endpoint, kv_tokens)

    @property
    def blocks(self) -> int:
        """See PrefixProducer."""
        return self.index.stats.held + self.approximate.blocks

    def prepare(self, request: LLMRequest) -> Awaitable[None] | None:
        """The tokens of the prompt."""
        return self.tokens.prepare(request)

    def match(self, request: LLMRequest) -> Match:
        """See PrefixProducer."""
        if request.token_ids is None:
            return self.approximate.match(request)
        lookup = self.index.match(self._prompt(request))
        cached = _found(lookup, len(request.token_ids))
        num_blocks = max(map(len, lookup.keys.values()), default=0)  # of the smallest there are
        return Match(lookup.weighted, cached, lookup.blocks, num_blocks, By.EVENTS, lookup)

    def _prompt(self, request: LLMRequest) -> TokenPrompt:
        assert request.token_ids is not None
        adapter = request.model if request.model in self.index.adapters else None
        extras = {} if request.cache_salt is None else {0: (request.cache_salt,)}
        return TokenPrompt(request.token_ids, adapter, extras)

    def learn(self, match: Match, endpoint: Endpoint) -> Lookup | Use:
        """The endpoint will hold the prompt's blocks: they count before it tells."""
        if not isinstance(match.mark, Lookup):
            return self.approximate.learn(match, endpoint)
        if endpoint.alive:
            self.index.expect(endpoint.slot, match.mark)
        return match.mark

    def moved(self, use: Lookup | Use, picked: Endpoint, served: Endpoint) -> tuple[int, int]:
        """See PrefixProducer. What was expected of the picked one vanishes with time."""
        if not isinstance(use, Lookup):
            return self.approximate.moved(use, picked, served)
        if not served.alive or served.slot >= len(use.blocks):
            return 0, 0
        self.index.expect(served.slot, use)
        return int(use.blocks[served.slot]), int(use.tokens[served.slot])


def _found(lookup: Lookup, num_tokens: int) -> Column:
    """Tokens that engines find cached: all they hold, but never a prompt's last token.

    An engine has to compute something to get the first token's logits, and it computes whole
    blocks: of a prompt that ends with a full block, it computes this one again.
    """
    whole = lookup.tokens >= num_tokens
    cached = lookup.tokens.astype(np.float32)
    if whole.any():
        cached[whole] -= cached[whole] / lookup.blocks[whole]
    return cached
