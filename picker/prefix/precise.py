"""What each pod holds, as its engine tells by KV events.

Where a request's tokens cannot be had, it is matched by its bytes, with what was sent where; and so
it is for pods that tell nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from picker import config
from picker.pool import Endpoint, Pool
from picker.prefix.approximate import ApproximatePrefix, Use
from picker.prefix.index import BlockIndex, Lookup
from picker.prefix.keys import TokenPrompt
from picker.prefix.match import By, Match, Prepare
from picker.prefix.subscriber import Subscriptions
from picker.prefix.tokens import Tokens
from picker.request import LLMRequest
from scorers.pods import Column

HOUSEKEEPING = 0.25  # seconds between two looks at what has expired, and at who tells
FIRST_ROUND = 3.0  # seconds that pods are given to tell what they hold, before the first pick
MAX_NAMED = 5  # pods in a line of the log
log = logging.getLogger(__name__)


class _Mark(NamedTuple):
    """A prompt, as this producer knows it."""

    lookup: Lookup
    cached: Column
    guess: Match | None = None  # for pods that tell nothing


class _Use(NamedTuple):
    """A prompt that was sent to a pod."""

    lookup: Lookup
    cached: Column
    guessed: Use | None = None  # where the pod tells nothing


class EventsPrefix:
    """Matches prompts with what the pods' engines say that they cache. See PrefixProducer.

    It owns the index, those who feed it, and the tokenizer.
    """

    def __init__(self, pool: Pool, settings: config.Prefix) -> None:
        self.index = BlockIndex(pool.capacity, settings.index_blocks, fresh=settings.fresh)
        self.approximate = ApproximatePrefix(pool, settings)
        self.subscriptions = Subscriptions(pool, settings, self.index)
        self.tokens = Tokens(pool, settings)
        self._pool = pool
        self._silent: Sequence[Endpoint] = ()  # tell nothing, when last looked at
        self._housekeeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the tokenizer, and follow all pods from now on.

        Raises:
            ConfigError: there is no such tokenizer.
        """
        await self.tokens.start()
        await self.subscriptions.start()
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def first_round(self) -> None:
        """See PrefixProducer. Who is late is named in the log."""
        try:
            async with asyncio.timeout(FIRST_ROUND):
                while self.subscriptions.behind():  # noqa: ASYNC110  # sockets tell, one by one
                    await asyncio.sleep(0.01)
        except TimeoutError:
            late = [endpoint.address for endpoint in self.subscriptions.behind()]
            log.warning(
                "KV events of %d pods did not come within %g s, and they are matched by what is "
                "sent to them until some do: %s%s",
                len(late),
                FIRST_ROUND,
                ", ".join(late[:MAX_NAMED]),
                ", ..." if len(late) > MAX_NAMED else "",
            )
        self._silent = self.subscriptions.silent(self._pool.endpoints.values())

    async def stop(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        await self.subscriptions.stop()
        await self.tokens.stop()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING)
            self._silent = self.subscriptions.silent(self._pool.endpoints.values())
            self.index.expire(time.monotonic())
            while self.index.tidy():  # noqa: ASYNC110
                await asyncio.sleep(0)  # the requests that came meanwhile go first

    def resized(self, endpoint: Endpoint, kv_tokens: int) -> None:
        """An endpoint has told the size of its KV cache, in tokens; so it answers."""
        self.approximate.resized(endpoint, kv_tokens)
        self.subscriptions.answers(endpoint)

    @property
    def blocks(self) -> int:
        """See PrefixProducer."""
        return self.index.stats.held + self.approximate.blocks

    def prepare(self, request: LLMRequest) -> Prepare | None:
        """The tokens of the prompt."""
        return self.tokens.prepare(request)

    def match(self, request: LLMRequest) -> Match:
        """See PrefixProducer."""
        if request.token_ids is None:
            return self.approximate.match(request)
        lookup = self.index.match(self._prompt(request))
        cached = _found(lookup, len(request.token_ids))
        num_blocks = max(map(len, lookup.keys.values()), default=0)  # of the smallest there are
        mark = _Mark(lookup, cached)
        silent = self.subscriptions.silent(self._silent)  # some may just have begun to tell
        if not silent:
            return Match(lookup.weighted, cached, lookup.blocks, num_blocks, By.EVENTS, mark)
        guess = self.approximate.match(request)
        slots = [endpoint.slot for endpoint in silent]
        tokens, blocks = lookup.weighted.copy(), lookup.blocks.copy()
        tokens[slots] = cached[slots] = guess.cached[slots]
        if guess.num_blocks:
            blocks[slots] = guess.blocks[slots] * num_blocks // guess.num_blocks
        mark = mark._replace(guess=guess)
        return Match(tokens, cached, blocks, num_blocks, By.EVENTS, mark, frozenset(slots))

    def _prompt(self, request: LLMRequest) -> TokenPrompt:
        assert request.token_ids is not None
        adapter = request.model if request.model in self.index.adapters else None
        extras = {} if request.cache_salt is None else {0: (request.cache_salt,)}
        return TokenPrompt(request.token_ids, adapter, extras)

    def learn(self, match: Match, endpoint: Endpoint) -> _Use | Use:
        """The endpoint will hold the prompt's blocks: they count before it tells."""
        mark = match.mark
        if not isinstance(mark, _Mark):
            return self.approximate.learn(match, endpoint)
        if endpoint.slot in match.guessed:
            assert mark.guess is not None
            guessed = self.approximate.learn(mark.guess, endpoint)
            return _Use(mark.lookup, mark.cached, guessed)
        if endpoint.alive:
            self.index.expect(endpoint.slot, mark.lookup)
        return _Use(mark.lookup, mark.cached)

    def moved(self, use: _Use | Use, picked: Endpoint, served: Endpoint) -> tuple[int, int]:
        """See PrefixProducer. What was expected of the picked one vanishes with time."""
        if isinstance(use, Use):
            return self.approximate.moved(use, picked, served)
        if use.guessed is not None:
            guess = self.approximate.moved(use.guessed, picked, served)
            if self.subscriptions.silent([served]):
                return guess
        lookup = use.lookup
        if not served.alive or served.slot >= len(lookup.blocks):
            return 0, 0
        self.index.expect(served.slot, lookup)
        return int(lookup.blocks[served.slot]), round(float(use.cached[served.slot]))


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
