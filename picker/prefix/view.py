"""The precise index and those who feed it, as people and programs are shown them.

Everything here becomes JSON as it stands, with camelCase names.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from picker.pool import Endpoint, Pool
from picker.prefix.events import Tier
from picker.prefix.index import Lookup
from picker.prefix.match import By, Match
from picker.request import LLMRequest

if TYPE_CHECKING:  # their packages need not be installed
    from picker.metrics import PickerMetrics
    from picker.prefix.precise import EventsPrefix
    from picker.prefix.subscription import Subscription


class _Shown(msgspec.Struct, rename="camel", frozen=True):
    pass


class Publisher(_Shown, frozen=True):
    """One publisher of KV events. Counts are from when we began to follow it."""

    address: str  # as ZMQ writes it
    replay: str  # where it sends batches again; empty: nowhere
    connected: bool
    replaying: bool  # batches come again, and live ones wait for them
    age_seconds: float | None  # since the last batch came; None: none did
    events_per_second: float
    batches: int
    events: int
    malformed: int  # events, batches and messages that cannot be understood
    unknown: int  # events of types that are not known
    gaps: int  # live batches that did not follow the one before
    replays: int  # asked for
    failed_replays: int
    restarts: int  # times that it was found to be another process
    cleared: int  # times that all that it holds was forgotten
    held: dict[str, int]  # blocks, by tier


class Pod(_Shown, frozen=True):
    """One pod's publishers."""

    address: str
    trouble: str  # why nobody is followed; empty if nothing is wrong
    publishers: list[Publisher]  # by rank

    @property
    def connected(self) -> bool:
        """Whether all of them are."""
        return bool(self.publishers) and all(each.connected for each in self.publishers)

    @property
    def age_seconds(self) -> float | None:
        """Since the last batch of any of them came."""
        ages = [each.age_seconds for each in self.publishers if each.age_seconds is not None]
        return min(ages, default=None)

    @property
    def held(self) -> dict[str, int]:
        """Blocks by tier, of all of them."""
        held = Counter[str]()
        for each in self.publishers:
            held.update(each.held)
        return dict(held)


class Changes(_Shown, frozen=True):
    """What became of blocks in events, and of blocks in the index, ever."""

    stored: int
    removed: int
    unknown_removed: int  # that were not held
    skipped: int  # of groups without full attention
    unresolved: int  # stored without token ids, under hashes that are not known
    evicted: int  # to make room
    dropped: int  # orphans, to make room for others


class Index(_Shown, frozen=True):
    """Sizes now; in blocks, but for the bytes."""

    blocks: int  # different ones
    max_blocks: int
    held: dict[str, int]  # by tier, by all pods together: what two of them hold counts twice
    orphans: int  # that wait for those before them
    engine_hashes: int
    bytes: int
    changes: Changes
    refused: dict[str, int]  # by reason


class All(_Shown, frozen=True):
    """All that is known of the index."""

    index: Index
    tokenizer: str
    missed_tokens: dict[str, int]  # prompts without, by reason
    matches: dict[str, int]  # picks, by what their prompts were compared with
    predictions: dict[str, dict[str, int]]  # the same, by how true the predictions were
    pods: list[Pod]


class Depth(_Shown, frozen=True):
    """How much of a prompt a pod holds, from its beginning on."""

    address: str
    matched_by: By
    blocks: int
    num_blocks: int  # of the prompt
    block_size: int | None  # in tokens; None: blocks are of bytes
    tokens: int  # of these blocks
    weighted_tokens: float  # the same, where those in slower tiers count less
    predicted_tokens: int  # that its engine should find cached


class Found(_Shown, frozen=True):
    """Where a prompt is held."""

    model: str | None
    prompt_tokens: int
    matched_by: By
    pods: list[Depth]


PODS_AT_ONCE = 50
CHANGES = Changes.__struct_fields__


class EventsView:
    """Looks at all of it; keeps nothing."""

    def __init__(self, prefix: EventsPrefix, pool: Pool) -> None:
        self._prefix = prefix
        self._pool = pool

    async def all(self, metrics: PickerMetrics, tokenizer: str) -> All:
        pods = []
        for number, pod in enumerate(self.pods(), 1):
            pods.append(pod)
            if number % PODS_AT_ONCE == 0:
                await asyncio.sleep(0)  # picks go first
        predictions: dict[str, dict[str, int]] = {}
        for (by, result), count in metrics.predictions.items():
            predictions.setdefault(by.value, {})[result.value] = count
        return All(
            index=self.index(),
            tokenizer=tokenizer,
            missed_tokens=self.missed_tokens(),
            matches={by.value: count for by, count in metrics.matches.items()},
            predictions=predictions,
            pods=pods,
        )

    def index(self) -> Index:
        stats = self._prefix.index.stats
        return Index(
            blocks=stats.blocks,
            max_blocks=stats.max_blocks,
            held=_by_tier(stats.tiers),
            orphans=stats.orphans,
            engine_hashes=stats.aliases,
            bytes=stats.num_bytes,
            changes=Changes(**{name: getattr(stats, name) for name in CHANGES}),
            refused=dict(stats.refused),
        )

    def missed_tokens(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self._prefix.tokens.missed.items()}

    def pods(self) -> Iterator[Pod]:
        """Each takes about ten microseconds."""
        now = time.monotonic()
        subscriptions = self._prefix.subscriptions
        for endpoint in list(self._pool.endpoints.values()):
            yield Pod(
                endpoint.address,
                subscriptions.trouble(endpoint),
                [_publisher(each, now) for each in subscriptions.of(endpoint)],
            )

    async def find(self, request: LLMRequest) -> Found:
        """Where the prompt of a request is held."""
        waiting = self._prefix.prepare(request)
        if waiting is not None:
            await waiting()
        match = self._prefix.match(request)
        pods = [_depth(match, endpoint) for endpoint in self._pool.endpoints.values()]
        return Found(request.model, request.prompt_tokens, match.by, pods)


def _publisher(subscription: Subscription, now: float) -> Publisher:
    counts, last = subscription.sequence.counts, subscription.last_batch
    return Publisher(
        address=subscription.address.live,
        replay=subscription.address.replay,
        connected=subscription.connected,
        replaying=subscription.sequence.replaying,
        age_seconds=None if last is None else round(now - last, 3),
        events_per_second=round(subscription.rate.per_second, 3),
        batches=subscription.batches,
        events=subscription.events,
        malformed=subscription.malformed,
        unknown=subscription.unknown,
        gaps=counts.gaps,
        replays=counts.replays,
        failed_replays=counts.failed_replays,
        restarts=counts.restarts,
        cleared=subscription.cleared,
        held=_by_tier(subscription.held),
    )


def _depth(match: Match, endpoint: Endpoint) -> Depth:
    slot, by = endpoint.slot, match.by_of(endpoint.slot)
    predicted = round(float(match.cached[slot]))
    lookup: Lookup | None = match.mark.lookup if by is By.EVENTS else None
    return Depth(
        address=endpoint.address,
        matched_by=by,
        blocks=int(match.blocks[slot]),
        num_blocks=lookup.num_blocks(slot) if lookup else match.num_blocks,
        block_size=int(lookup.block_sizes[slot]) if lookup else None,
        tokens=int(lookup.tokens[slot]) if lookup else predicted,
        weighted_tokens=round(float(match.tokens[slot]), 1),
        predicted_tokens=predicted,
    )


def _by_tier(blocks: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.name.lower(): count for tier, count in blocks.items()}
