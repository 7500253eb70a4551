"""A cluster in virtual time: conversations, pods, and what a picker knows of them.

Pods take the time that a worker's profile says, batch continuously with chunked prefill, and
cache prefixes in the KV memory that is left; the picker sees scraped numbers that are up to 50 ms
old, counts its own requests, and learns prefixes from its own picks, as the real one does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scorers.pods import Adapters, Pods
from worker.profiles import Profile

UNIT = 64  # tokens of a simulated block
MAX_RUNNING = 256  # sequences in a batch
SCRAPE_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class Turn:
    """One request, and what came of it."""

    blocks: list[int]  # names of the blocks of its prompt
    prompt_tokens: int
    output_tokens: int
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    pod: int = -1
    started: float = 0.0
    uncached: int = 0  # as the picker believes
    cached: int = 0  # in truth
    left: int = 0  # tokens of the prompt still to compute
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations: each turn's prompt is a system prompt, all turns before, and a question."""

    groups: int  # distinct system prompts; 0: each conversation has its own
    system: int  # tokens
    question: int
    answer: int
    turns: int
    think_seconds: float

    def conversation(self, number: int, random: np.random.Generator) -> Iterator[Turn]:
        """Its turns. Lengths vary by a factor of two both ways around the mean."""
        group = int(random.integers(self.groups)) if self.groups else number
        own = group if self.groups else number
        system = [own << 24 | index for index in range(self.system // UNIT)]
        private = (number + 1) << 44
        tokens = 0
        for _ in range(self.turns):
            tokens += _about(self.question, random)
            blocks = system + [private | index for index in range(tokens // UNIT)]
            answer = _about(self.answer, random)
            yield Turn(blocks, len(system) * UNIT + tokens, answer)
            tokens += answer


def _about(mean: int, random: np.random.Generator) -> int:
    return max(1, int(mean * random.uniform(0.5, 1.5)))


class Pod:
    """A model server: one step after another, each with one token budget."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._capacity = profile.num_blocks * 16 // UNIT
        self.waiting: deque[Turn] = deque()
        self._prefilling: list[Turn] = []
        self._decoding: list[tuple[int, int, Turn]] = []  # heap: (step of its end, number, turn)
        self._context = 0  # tokens that decoding turns read in a step
        self._cache: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._used: dict[int, int] = {}  # cached block -> turns that run on it
        self._outputs = 0  # blocks for what running turns will say
        self._step = 0
        self._numbers = itertools.count()
        self.busy = False

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_usage(self) -> float:
        return min(1.0, (len(self._used) + self._outputs) / self._capacity)

    def step(self) -> float:
        """Plan a step; the seconds it takes."""
        budget = self._profile.max_num_batched_tokens - len(self._decoding)
        computed = len(self._decoding)
        for turn in self._prefilling:
            budget, computed = self._compute(turn, budget, computed)
        while self.waiting and budget > 0 and self.running < MAX_RUNNING and self._fits():
            turn = self.waiting.popleft()
            self._admit(turn)
            budget, computed = self._compute(turn, budget, computed)
        return self._profile.step_seconds(computed, self._context)

    def finish_step(self, now: float) -> tuple[list[Turn], list[Turn]]:
        """Turns that got their first token, and those that ended."""
        self._step += 1
        self._context += len(self._decoding)
        ended = []
        while self._decoding and self._decoding[0][0] <= self._step:
            turn = heapq.heappop(self._decoding)[2]
            self._context -= turn.prompt_tokens + turn.output_tokens
            turn.ended = now
            self._release(turn)
            ended.append(turn)
        first = [turn for turn in self._prefilling if not turn.left]
        if first:
            self._prefilling = [turn for turn in self._prefilling if turn.left]
            for turn in first:
                turn.first_token = now
                self._context += turn.prompt_tokens
                end = self._step + turn.output_tokens
                heapq.heappush(self._decoding, (end, next(self._numbers), turn))
        return first, ended

    def _compute(self, turn: Turn, budget: int, computed: int) -> tuple[int, int]:
        tokens = min(turn.left, budget)
        turn.left -= tokens
        return budget - tokens, computed + tokens

    def _fits(self) -> bool:
        turn = self.waiting[0]
        new = sum(block not in self._used for block in turn.blocks) + _blocks(turn.output_tokens)
        return not self._used or len(self._used) + self._outputs + new <= self._capacity

    def _admit(self, turn: Turn) -> None:
        matched = 0
        for block in turn.blocks:
            if block not in self._cache:
                break
            matched += 1
        turn.cached = min(matched * UNIT, turn.prompt_tokens - 1)
        turn.left = turn.prompt_tokens - turn.cached
        for block in turn.blocks:
            self._cache[block] = None
            self._used[block] = self._used.get(block, 0) + 1
        for block in reversed(turn.blocks):
            self._cache.move_to_end(block)
        self._outputs += _blocks(turn.output_tokens)
        self._evict()
        self._prefilling.append(turn)

    def _release(self, turn: Turn) -> None:
        for block in turn.blocks:
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
        self._outputs -= _blocks(turn.output_tokens)

    def _evict(self) -> None:
        """Forget unused blocks, oldest first; what runs stays."""
        pinned = []
        while len(self._cache) + self._outputs > self._capacity and self._cache:
            block, _ = self._cache.popitem(last=False)
            if block in self._used:
                pinned.append(block)
        for block in reversed(pinned):
            self._cache[block] = None
            self._cache.move_to_end(block, last=False)


def _blocks(tokens: int) -> int:
    return -(-tokens // UNIT)


class Picker:
    """What the real one knows of its pods: scraped loads, its own requests, learnt prefixes."""

    def __init__(self, pods: Sequence[Pod], blocks: int) -> None:
        n = len(pods)
        self._pods = pods
        self._limit = blocks
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in pods]
        self._addresses = [f"10.0.0.{row}:8000" for row in range(n)]
        self._waiting, self._running, self._kv = np.zeros((3, n), np.float32)
        self.inflight, self._tokens = np.zeros((2, n), np.float32)
        self._cold_at = np.zeros(n)

    def scrape(self) -> None:
        for row, pod in enumerate(self._pods):
            self._waiting[row] = len(pod.waiting)
            self._running[row], self._kv[row] = pod.running, pod.kv_usage

    def columns(self, turn: Turn) -> Pods:
        n = len(self._addresses)
        return Pods(
            self._addresses,
            [{}] * n,
            [Adapters()] * n,
            np.ones(n, np.bool_),
            self._waiting.copy(),
            self._running.copy(),
            self._kv.copy(),
            self.inflight.copy(),
            self._tokens.copy(),
            np.array([self._match(held, turn) for held in self._held], np.float32),
            self._cold_at.copy(),
            np.zeros(n, np.bool_),
        )

    def picked(self, turn: Turn, now: float) -> None:
        held = self._held[turn.pod]
        turn.uncached = turn.prompt_tokens - self._match(held, turn)
        if turn.uncached == turn.prompt_tokens:
            self._cold_at[turn.pod] = now
        self.inflight[turn.pod] += 1
        self._tokens[turn.pod] += turn.uncached
        self._waiting[turn.pod] += 1
        for block in reversed(turn.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._limit:
            held.popitem(last=False)

    def first_token(self, turn: Turn) -> None:
        self._tokens[turn.pod] -= turn.uncached

    def ended(self, turn: Turn) -> None:
        self.inflight[turn.pod] -= 1

    @staticmethod
    def _match(held: OrderedDict[int, None], turn: Turn) -> int:
        matched = 0
        for block in turn.blocks:
            if block not in held:
                break
            matched += 1
        return min(matched * UNIT, turn.prompt_tokens)


Policy = Callable[[Turn, Picker], int]
"""A turn and what the picker knows -> the pod's row."""


def simulate(
    policy: Policy,
    workload: Workload,
    profile: Profile,
    *,
    pods: int,
    conversations_per_second: float,
    seconds: float,
    seed: int = 0,
) -> list[Turn]:
    """Turns that started in the second half of the time, when caches are warm."""
    random = np.random.default_rng(seed)
    servers = [Pod(profile) for _ in range(pods)]
    picker = Picker(servers, profile.num_blocks * 16 // UNIT)
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = itertools.count()
    turns: list[Turn] = []

    def at(time: float, what: Callable[[float], None]) -> None:
        if time < seconds:
            heapq.heappush(events, (time, next(order), what))

    def arrive(conversation: Iterator[Turn], now: float) -> None:
        turn = next(conversation, None)
        if turn is None:
            return
        turn.started = now
        turn.pod = policy(turn, picker)
        picker.picked(turn, now)
        turns.append(turn)
        followers[id(turn)] = conversation
        servers[turn.pod].waiting.append(turn)
        if not servers[turn.pod].busy:
            step(turn.pod, now)

    def step(row: int, now: float) -> None:
        server = servers[row]
        server.busy = bool(server.waiting or server.running)
        if server.busy:
            at(now + server.step(), lambda then: finish(row, then))

    def finish(row: int, now: float) -> None:
        first, ended = servers[row].finish_step(now)
        for turn in first:
            picker.first_token(turn)
        for turn in ended:
            picker.ended(turn)
            conversation = followers.pop(id(turn))
            think = random.exponential(workload.think_seconds)
            at(now + think, lambda then, c=conversation: arrive(c, then))
        step(row, now)

    def scrape(now: float) -> None:
        picker.scrape()
        at(now + SCRAPE_SECONDS, scrape)

    def begin(now: float) -> None:
        arrive(workload.conversation(next(numbers), random), now)
        at(now + random.exponential(1 / conversations_per_second), begin)

    followers: dict[int, Iterator[Turn]] = {}
    numbers = itertools.count()
    scrape(0.0)
    begin(0.0)
    while events:
        now, _, what = heapq.heappop(events)
        what(now)
    return [turn for turn in turns if turn.started > seconds / 2]
