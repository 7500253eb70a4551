from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from picker.prefix import intake
from picker.prefix.events import Cleared, Event, Removed, Stored, Tier
from picker.prefix.index import BlockIndex, Lookup, Source, TokenPrompt
from tests.picker.prefix.model import Key, Model, Pod, chain

WEIGHTS = {Tier.GPU: 1.0, Tier.CPU: 0.8, Tier.STORAGE: 0.5}
FLAVOURS = 3  # ways in which engines hash
MEDIUMS = st.sampled_from([None, "GPU", "gpu", None, "CPU", "cpu", "DISK"])
GROUPS = st.sampled_from([0, 0, 0, 0, 1, 7])


class Prompts:
    """All prompts are paths in a small tree, whose blocks engines name in their own ways."""

    def __init__(self) -> None:
        self._names: list[dict[Key, int]] = [{} for _ in range(FLAVOURS)]

    def name(self, flavour: int, key: Key) -> int:
        """The hash of a block. With two of the flavours small numbers, that mean other blocks."""
        names = self._names[flavour]
        return names.setdefault(key, len(names) + 1 if flavour < 2 else 2**64 - 1 - len(names))


def prompt(text: str, adapter: str | None = None, **extras: tuple[str, ...]) -> TokenPrompt:
    """A prompt of one token a character, with the extras of block n under `bn`."""
    tokens = np.array([ord(character) for character in text], np.uint32)
    return TokenPrompt(tokens, adapter, {int(name[1:]): each for name, each in extras.items()})


PROMPTS = [
    prompt("aaaaaa"),
    prompt("aaaabb"),
    prompt("ababab"),
    prompt("bbbbbb"),
    prompt("aaaaaa", "S"),
    prompt("ababab", "S"),
    prompt("aaaaaa", b0=("S",)),
    prompt("aaaaaa", "S", b0=("S",)),
    prompt("aaaaaa", b0=("S", "t")),
    prompt("aaaaaa", b1=("image",)),
    prompt("aaa"),
    prompt(""),
]


def keys_of(prompt: TokenPrompt, size: int) -> list[Key]:
    count = len(prompt.tokens) // size
    extras = [prompt.extras.get(block) for block in range(count)]
    return chain((size, prompt.adapter), prompt.tokens.tolist(), extras)


Part = tuple[TokenPrompt, int, int, int]  # of a prompt: block size, first block, blocks
Plan = tuple[str, Part, str | None, int]  # an event: kind, blocks, medium, group

SIZES = st.sampled_from([1, 1, 1, 2])
PARTS = st.tuples(
    st.sampled_from(PROMPTS), SIZES, st.sampled_from([0, 0, 0, 1, 2, 3, 4]), st.integers(1, 6)
)
KINDS = st.sampled_from(["stored"] * 5 + ["copy"] + ["removed"] * 3 + ["lost"] + ["odd"])
PLANS = st.lists(st.tuples(KINDS, PARTS, MEDIUMS, GROUPS), min_size=1, max_size=8)


class World:
    """The index, and the model beside it. Pods are known by their place in a list."""

    def __init__(self, capacity: int) -> None:
        self.index = BlockIndex(capacity, 4096, fresh=10)
        self.model = Model()
        self.prompts = Prompts()
        self.pods: dict[Source, tuple[Pod, int]] = {}  # with the flavour
        self.now = 0.0

    def source(self, number: int) -> Source:
        return list(self.pods)[number % len(self.pods)]

    def open(self, slot: int, flavour: int) -> None:
        self.pods[self.index.open(slot % self.index.capacity)] = (Pod(), flavour)

    def close(self, number: int) -> None:
        source = self.source(number)
        self.index.close(source)
        del self.pods[source]
        self.index.apply(source, [Stored([1], None, [97], 1)])  # nobody hears it

    def clear(self, number: int, flavour: int, told: bool) -> None:
        source = self.source(number)
        if told:
            self.index.apply(source, [Cleared()])
        else:
            self.index.clear(source)
        self.pods[source] = (Pod(), flavour)

    def tell(self, number: int, plans: list[Plan]) -> None:
        source = self.source(number)
        pod, flavour = self.pods[source]
        events: list[Event | None] = []
        for kind, part, medium, group in plans:
            held = [name for name in pod.means if self.model.known(pod, name)]
            if kind == "removed" and held:
                first = part[2] * 5 % len(held)
                events.append(Removed(held[first : first + part[3]], medium, group))
            else:
                events.append(self._event(flavour, kind, part, medium, group))
        self._apply(source, [event for event in events if event is not None])

    def lie(self, number: int, part: Part, other: Part) -> None:
        """A hash that means another block than before."""
        source = self.source(number)
        pod, flavour = self.pods[source]
        event = self._event(flavour, "stored", part, None, 0)
        named = self._event(flavour, "stored", other, None, 0)
        if (
            isinstance(event, Stored)
            and isinstance(named, Stored)
            and (event.parent is None or self.model.known(pod, event.parent))
            and self.model.known(pod, named.hashes[-1])
        ):
            event.hashes[-1] = named.hashes[-1]
            self._apply(source, [event])

    def pick(self, slot: int, prompt: TokenPrompt) -> None:
        slot %= self.index.capacity
        lookup = self.index.match(prompt)
        self.index.expect(slot, lookup)
        pods = [pod for source, (pod, _) in self.pods.items() if source.slot == slot]
        if pods:
            keys = keys_of(prompt, int(lookup.block_sizes[slot]))
            for key in keys[lookup.blocks[slot] :]:
                if not any(self.model.tiers(pod, key) for pod in pods):
                    pods[0].young.add(key)

    def wait(self) -> None:
        self.now += 10
        self.index.expire(self.now)
        self.tidy(10_000)
        for pod, _ in self.pods.values():
            pod.old, pod.young = pod.young, set()

    def tidy(self, slices: int) -> None:
        for _ in range(slices):
            if not self.index.tidy():
                return
        assert slices < 10_000, "it is never done"

    def check(self) -> None:
        for prompt in PROMPTS:
            self._compare(prompt, self.index.match(prompt))
        stats, counts = self.index.stats, self.model.counts
        refused = ("misaligned", "repeated", "self-parent", "conflict")
        assert stats.stored == counts["stored"]
        assert stats.removed == counts["removed"]
        assert stats.unknown_removed == counts["unknown"]
        assert stats.skipped == counts["skipped"]
        assert stats.unresolved == counts["unresolved"]
        assert stats.refused == {name: counts[name] for name in refused if counts[name]}
        pods = [pod for pod, _ in self.pods.values()]
        assert stats.orphans == sum(len(each.event.hashes) for pod in pods for each in pod.orphans)
        for source, (pod, _) in self.pods.items():
            held = dict.fromkeys(Tier, 0)
            for key in pod.held:
                for tier in self.model.tiers(pod, key):
                    held[tier] += 1
            assert self.index.held(source) == held

    def end(self) -> None:
        """Once all pods are gone, nothing is left."""
        while self.pods:
            self.close(0)
        for _ in range(3):
            self.wait()
        stats = self.index.stats
        assert (stats.blocks, stats.aliases, stats.held, stats.orphans) == (0, 0, 0, 0)

    def _apply(self, source: Source, events: Sequence[Event]) -> None:
        self.index.apply(source, events)
        siblings = [pod for each, (pod, _) in self.pods.items() if each.slot == source.slot]
        for event in events:
            self.model.apply(self.pods[source][0], event, siblings)

    def _event(
        self, flavour: int, kind: str, part: Part, medium: str | None, group: int
    ) -> Event | None:
        prompt, size, first, count = part
        keys = keys_of(prompt, size)
        names = [self.prompts.name(flavour, key) for key in keys]
        hashes = names[first : first + count]
        if not hashes:
            return Cleared() if kind == "odd" and first == 4 else None
        if kind in ("removed", "lost"):
            return Removed(hashes[:2], medium, group)
        tokens = prompt.tokens[first * size : (first + len(hashes)) * size].tolist()
        extras = [
            (*prompt.extras.get(block, ()), *([prompt.adapter] if prompt.adapter else ()))
            for block in range(first, first + len(hashes))
        ]
        stored = Stored(
            hashes,
            names[first - 1] if first else None,
            [] if kind == "copy" else tokens,
            size,
            medium=medium,
            lora_name=prompt.adapter,
            extra_keys=extras if any(extras) else None,
            group=group,
        )
        if kind == "odd":
            oddity = (first + count) % 5
            if oddity == 0:
                stored.tokens = [*tokens, 5]
            elif oddity == 1:
                stored.parent = hashes[-1]
            elif oddity == 2:
                stored.kind, stored.group = "sliding_window", 7
            elif oddity == 3:
                stored.hashes = [*hashes, hashes[0]]
                stored.tokens = [*tokens, *tokens[:size]]
                if extras and stored.extra_keys:
                    stored.extra_keys = [*extras, extras[0]]
            else:
                stored.kind = "full_attention"
        return stored

    def _compare(self, prompt: TokenPrompt, lookup: Lookup) -> None:
        capacity = self.index.capacity
        blocks, tokens, weighted = [0] * capacity, [0] * capacity, [0.0] * capacity
        for size in sorted(lookup.keys):
            keys = keys_of(prompt, size)
            assert len(lookup.keys[size]) == len(keys)
            counts, weights = [0] * capacity, [0.0] * capacity
            for source, (pod, _) in self.pods.items():
                depth, weight = self._depth(pod, keys)
                counts[source.slot] = max(depth, counts[source.slot])
                weights[source.slot] = max(weight, weights[source.slot])
            for slot in range(capacity):
                if counts[slot] * size > tokens[slot]:
                    blocks[slot], tokens[slot] = counts[slot], counts[slot] * size
                    weighted[slot] = weights[slot] * size
        assert lookup.blocks.tolist() == blocks
        assert lookup.tokens.tolist() == tokens
        assert lookup.weighted.tolist() == pytest.approx(weighted)
        for slot in range(capacity):
            if blocks[slot]:
                assert lookup.num_blocks(slot) * lookup.block_sizes[slot] <= len(prompt.tokens)

    def _depth(self, pod: Pod, keys: list[Key]) -> tuple[int, float]:
        weight = 0.0
        for depth, key in enumerate(keys):
            weights = [WEIGHTS[tier] for tier in self.model.tiers(pod, key)]
            if key in pod.young or key in pod.old:
                weights.append(1.0)
            if not weights:
                return depth, weight
            weight += max(weights)
        return len(keys), weight


NUMBERS = st.integers(0, 5)


class IndexMachine(RuleBasedStateMachine):
    """The index does what the model does, whatever pods tell."""

    @initialize(capacity=st.integers(1, 4), sources=st.integers(1, 4))
    def start(self, capacity: int, sources: int) -> None:
        self.world = World(capacity)
        for number in range(sources):
            self.world.open(number, number % FLAVOURS)

    @rule(slot=NUMBERS, flavour=st.integers(0, FLAVOURS - 1))
    def open(self, slot: int, flavour: int) -> None:
        self.world.open(slot, flavour)

    @rule(capacity=NUMBERS)
    def grow(self, capacity: int) -> None:
        self.world.index.grow(capacity)

    @precondition(lambda self: len(self.world.pods) > 1)
    @rule(number=NUMBERS)
    def close(self, number: int) -> None:
        self.world.close(number)

    @rule(number=NUMBERS, flavour=st.integers(0, FLAVOURS - 1), told=st.booleans())
    def clear(self, number: int, flavour: int, told: bool) -> None:
        self.world.clear(number, flavour, told)

    @rule(number=NUMBERS, plans=PLANS)
    def tell(self, number: int, plans: list[Plan]) -> None:
        self.world.tell(number, plans)

    @rule(number=NUMBERS, plans=PLANS, part=PARTS)
    def tell_all_of_a_prompt(self, number: int, plans: list[Plan], part: Part) -> None:
        self.world.tell(number, [("stored", (*part[:2], 0, 6), None, 0), *plans])

    @rule(number=NUMBERS, part=PARTS, other=PARTS)
    def lie(self, number: int, part: Part, other: Part) -> None:
        self.world.lie(number, part, other)

    @rule(slot=NUMBERS, prompt=st.sampled_from(PROMPTS))
    def pick(self, slot: int, prompt: TokenPrompt) -> None:
        self.world.pick(slot, prompt)

    @rule()
    def wait(self) -> None:
        self.world.wait()

    @rule(slices=NUMBERS)
    def tidy(self, slices: int) -> None:
        self.world.tidy(slices)

    @invariant()
    def both_are_equal(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("few", [intake.FEW, 0], ids=["few", "many"])
@pytest.mark.parametrize("seed", range(5))
def test_long_lives(seed: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the machine does, but with more that has happened before, and by each way of doing it."""
    monkeypatch.setattr(intake, "FEW", few)
    random = Random(seed)
    world = World(random.randint(1, 4))

    def part() -> Part:
        return (
            random.choice(PROMPTS),
            random.choice([1, 1, 1, 2]),
            random.choice([0, 0, 0, 1, 2, 3, 4]),
            random.randint(1, 6),
        )

    def plan() -> Plan:
        kind = random.choice(["stored"] * 5 + ["copy"] + ["removed"] * 5 + ["lost", "odd"])
        medium = random.choice([None, "GPU", "gpu", None, None, "CPU", "cpu", "DISK"])
        return kind, part(), medium, random.choice([0] * 9 + [1, 7])

    for step in range(300):
        deed = random.choice(["tell"] * 12 + ["pick"] * 3 + ["lie", "wait", "tidy", "life", "grow"])
        number = random.randrange(6)
        if deed == "life" or not world.pods:
            if len(world.pods) < 5:
                world.open(number, random.randrange(FLAVOURS))
            elif random.random() < 0.5:
                world.close(number)
            else:
                world.clear(number, random.randrange(FLAVOURS), random.random() < 0.5)
        elif deed == "tell":
            world.tell(number, [plan() for _ in range(random.randint(1, 10))])
        elif deed == "pick":
            world.pick(number, random.choice(PROMPTS))
        elif deed == "lie":
            world.lie(number, part(), part())
        elif deed == "wait":
            world.wait()
        elif deed == "tidy":
            world.tidy(random.randint(1, 5))
        else:
            world.index.grow(random.randrange(6))
        if step % 4 == 0:
            world.check()
    world.end()


TOKENS = np.arange(100, dtype=np.uint32)


def blocks_of(index: BlockIndex, tokens: np.ndarray = TOKENS) -> list[int]:
    return index.match(TokenPrompt(tokens)).blocks.tolist()


def test_a_pick_counts_before_any_pod_has_told_anything() -> None:
    index = BlockIndex(3, 1000)
    index.open(0)
    index.open(2)
    lookup = index.match(TokenPrompt(TOKENS))
    assert lookup.num_blocks(2) == 6  # of 16 tokens, as nobody has told of another size
    for slot in (1, 2):
        index.expect(slot, lookup)
    assert blocks_of(index) == [0, 0, 6]  # the pod at slot 1 tells nothing, and may not exist
    assert index.stats.held == 0


def test_a_wrong_guess_vanishes_and_a_right_one_becomes_true() -> None:
    index = BlockIndex(2, 1000, fresh=2.0)
    sources = [index.open(0), index.open(1)]
    index.expire(100.0)
    index.tidy()
    for slot in (0, 1):
        index.expect(slot, index.match(TokenPrompt(TOKENS)))
    index.apply(sources[0], [Stored([1, 2, 3, 4, 5, 6], None, TOKENS[:96].tolist(), 16)])
    for now, expected in ((101.9, [6, 6]), (102.1, [6, 6]), (104.2, [6, 0])):
        index.expire(now)
        while index.tidy():
            pass
        assert blocks_of(index) == expected
    index.apply(sources[0], [Removed([6]), Removed([5])])
    assert blocks_of(index) == [4, 0]


def test_what_a_pod_removes_is_gone_though_it_was_expected() -> None:
    index = BlockIndex(1, 1000)
    source = index.open(0)
    index.expect(0, index.match(TokenPrompt(TOKENS)))
    index.apply(source, [Stored([1, 2, 3, 4, 5, 6], None, TOKENS[:96].tolist(), 16)])
    index.apply(source, [Removed([3])])
    assert blocks_of(index) == [2]


def test_picks_may_be_told_not_to_count() -> None:
    index = BlockIndex(1, 1000, fresh=0)
    index.open(0)
    index.expect(0, index.match(TokenPrompt(TOKENS)))
    assert blocks_of(index) == [0]


@pytest.mark.parametrize("few", [intake.FEW, 0])
def test_events_count_in_their_order(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a block that waited for its parent is removed at once."""
    monkeypatch.setattr(intake, "FEW", few)
    index = BlockIndex(1, 1000)
    source = index.open(0)
    parts = TOKENS[:96].reshape(6, 16).tolist()
    index.apply(source, [Stored([2], 1, parts[1], 16)])
    index.apply(
        source, [Stored([1], None, parts[0], 16), Removed([2]), Stored([3], 2, parts[2], 16)]
    )
    assert blocks_of(index) == [1]
    assert (index.stats.held, index.stats.orphans) == (1, 1)
    index.apply(
        source,
        [
            Removed([1]),
            Stored([1], None, parts[0], 16),
            Stored([1], None, parts[0], 16),
            Removed([1]),
            Stored([2], 1, parts[1], 16),
        ],
    )
    assert blocks_of(index) == [3]
    index.apply(source, [Removed([1])])
    assert blocks_of(index) == [0]


def test_a_block_under_two_hashes_is_held_until_both_are_removed() -> None:
    index = BlockIndex(1, 1000)
    source = index.open(0)
    for name in (1, 2):
        index.apply(source, [Stored([name], None, [5] * 16, 16)])
    index.apply(source, [Removed([1])])
    assert blocks_of(index, np.full(16, 5, np.uint32)) == [1]
    index.apply(source, [Removed([2])])
    assert blocks_of(index, np.full(16, 5, np.uint32)) == [0]
    assert index.stats.unknown_removed == 0


def test_a_group_that_is_not_the_first_is_the_main_one_where_it_alone_has_full_attention() -> None:
    """Of a model whose first group has a sliding window; it costs no counting."""
    index = BlockIndex(1, 1000)
    source = index.open(0)
    tokens = TOKENS[:96].tolist()
    window = Stored([1, 2], None, tokens[:32], 16, group=0, kind="sliding_window")
    index.apply(source, [window, Stored([1, 2], None, tokens[:32], 16, group=3)])
    assert blocks_of(index) == [2]
    index.apply(source, [Removed([1, 2], group=0)])
    assert blocks_of(index) == [2]
    index.apply(source, [Removed([2], group=3)])
    assert blocks_of(index) == [1]
    assert index.stats.skipped == 4


def test_adapters_are_known_by_name() -> None:
    index = BlockIndex(1, 1000)
    source = index.open(0)
    index.apply(source, [Stored([1], None, [5] * 16, 16, lora_name="a")])
    assert set(index.adapters) == {"a"}
    tokens = np.full(16, 5, np.uint32)
    assert index.match(TokenPrompt(tokens, "a")).blocks.tolist() == [1]
    assert index.match(TokenPrompt(tokens)).blocks.tolist() == [0]
