"""What the precise index must do, in dicts and sets: slow, and plain to see."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from picker.prefix.events import Event, Removed, Stored, Tier

Key = tuple[Any, ...]  # a chain: (block size, adapter), then (tokens, extra keys) of each block


def chain(before: Key, tokens: Sequence[int], extras: Sequence[Any]) -> list[Key]:
    """The keys of blocks that come after another one, of which a block's size is the first part."""
    keys = []
    for block, extra in enumerate(extras):
        part = tokens[block * before[0] : (block + 1) * before[0]]
        before = (*before, (tuple(part), frozenset(Counter(extra or ()).items())))
        keys.append(before)
    return keys


@dataclass(eq=False)
class Waiting:
    event: Stored
    removed: list[Removed] = field(default_factory=list)


@dataclass(eq=False)
class Pod:
    """One source."""

    means: dict[int, Key] = field(default_factory=dict)
    held: dict[Key, Counter[tuple[Tier, int]]] = field(default_factory=lambda: defaultdict(Counter))
    orphans: list[Waiting] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    young: set[Key] = field(default_factory=set)  # expected of a pick
    old: set[Key] = field(default_factory=set)


class Model:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def tiers(self, pod: Pod, key: Key) -> set[Tier]:
        return {tier for tier, _ in +pod.held[key]} if key in pod.held else set()

    def known(self, pod: Pod, name: int) -> Key | None:
        key = pod.means.get(name)
        return key if key is not None and self.tiers(pod, key) else None

    def apply(self, pod: Pod, event: Event, siblings: Sequence[Pod]) -> None:
        if isinstance(event, Removed) and event.group in pod.skipped:
            self.counts["skipped"] += len(event.hashes)
        elif isinstance(event, Removed):
            self._remove(pod, event)
        elif not isinstance(event, Stored):
            pod.__init__()  # type: ignore[misc]
        elif event.kind not in (None, "full_attention"):
            pod.skipped.add(event.group)
            self.counts["skipped"] += len(event.hashes)
        elif event.tokens and len(event.tokens) != len(event.hashes) * event.block_size:
            self.counts["misaligned"] += len(event.hashes)
        elif len(set(event.hashes)) < len(event.hashes):
            self.counts["repeated"] += len(event.hashes)
        elif event.parent in event.hashes:
            self.counts["self-parent"] += len(event.hashes)
        elif not event.tokens:
            keys = [self.known(pod, name) for name in event.hashes]
            self.counts["unresolved"] += keys.count(None)
            self._hold(pod, event, [key for key in keys if key is not None], siblings)
        elif self._store(pod, event, siblings):
            self._adopt(pod, siblings)

    def _store(self, pod: Pod, event: Stored, siblings: Sequence[Pod]) -> bool:
        before = (
            (event.block_size, event.lora_name)
            if event.parent is None
            else self.known(pod, event.parent)
        )
        if before is None:
            pod.orphans.append(Waiting(event))
            return False
        extras = [Counter(extra or ()) for extra in event.extra_keys or [None] * len(event.hashes)]
        for extra in extras:
            extra.subtract({event.lora_name: 1} if extra[event.lora_name] else {})
        keys = chain(before, event.tokens, [list(extra.elements()) for extra in extras])
        for name, key in zip(event.hashes, keys, strict=True):
            if self.known(pod, name) not in (None, key):
                self.counts["conflict"] += len(keys)
                return False
        pod.means.update(zip(event.hashes, keys, strict=True))
        self._hold(pod, event, keys, siblings)
        return True

    def _hold(self, pod: Pod, event: Stored, keys: list[Key], siblings: Sequence[Pod]) -> None:
        self.counts["stored"] += len(keys)
        for key in keys:
            pod.held[key][event.tier, event.group] += 1
            for each in siblings:
                each.young.discard(key)
                each.old.discard(key)

    def _adopt(self, pod: Pod, siblings: Sequence[Pod]) -> None:
        removed: list[Removed] = []
        while True:
            for waiting in pod.orphans:
                if self.known(pod, waiting.event.parent or 0):
                    break
            else:
                break
            pod.orphans.remove(waiting)
            self._store(pod, waiting.event, siblings)
            removed += waiting.removed
        for event in removed:
            self._remove(pod, event)

    def _remove(self, pod: Pod, event: Removed) -> None:
        for name in event.hashes:
            key = self.known(pod, name)
            if key is not None and pod.held[key][event.tier, event.group] > 0:
                pod.held[key][event.tier, event.group] -= 1
                self.counts["removed"] += 1
            elif not self._cancel(pod, name, event):
                self.counts["unknown"] += 1

    def _cancel(self, pod: Pod, name: int, event: Removed) -> bool:
        for waiting in pod.orphans:
            gone = [each for removed in waiting.removed for each in removed.hashes]
            same = (waiting.event.tier, waiting.event.group) == (event.tier, event.group)
            if same and name in waiting.event.hashes and name not in gone:
                waiting.removed.append(Removed([name], event.medium, event.group))
                return True
        return False
