"""InferenceObjectives and InferenceModelRewrites of a pool, of both groups.

Their CRDs need not be installed: they are looked for again now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from picker.config import Kubernetes, Rewrite, RewriteTarget
from picker.kubernetes.client import Api
from picker.kubernetes.objects import (
    LLM_D_GROUP,
    X_GROUP,
    InferenceModelRewrite,
    InferenceObjective,
    PoolRef,
    RewriteRule,
    Thing,
)
from picker.kubernetes.pace import Pace
from picker.kubernetes.reflector import Phase, Reflector
from picker.kubernetes.resource import Resource
from picker.request import MAX_MODEL

log = logging.getLogger(__name__)

VERSION = "v1alpha2"
MAX_OBJECTIVES = 1000
MAX_RULES = 1000
MAX_MODELS = 1000  # that one rule matches, and that it has as targets
MAX_PRIORITY = 2**31 - 1
MAX_WEIGHT = 1_000_000

T = TypeVar("T", bound=Thing)
TakePriorities = Callable[[dict[str, int]], None]
TakeRules = Callable[[Sequence[Rewrite]], None]


class Policies:
    """Follows the policies of one pool, and hands them on whenever they have changed."""

    def __init__(
        self,
        api: Api,
        settings: Kubernetes,
        on_change: Callable[[], None],
        pace: Pace,
        *,
        on_priorities: TakePriorities | None,
        on_rules: TakeRules | None,
    ) -> None:
        """
        Args:
            on_priorities: takes the priorities by objective; None: nobody asks for them.
            on_rules: takes the rules of rewrites, in the order of their precedence; the same.
        """
        self._settings = settings
        self._on_priorities = on_priorities
        self._on_rules = on_rules
        self._objectives: list[Reflector[InferenceObjective]] = []
        self._rewrites: list[Reflector[InferenceModelRewrite]] = []
        self._seen: list[int] = []  # revisions of what was handed on
        self._problems: list[str] = []  # that were logged
        self._priorities: dict[str, int] = {}
        self._rules: list[Rewrite] = []
        for group in (X_GROUP, LLM_D_GROUP):  # of two objectives of one name the latter counts
            objectives = Resource(group, VERSION, "inferenceobjectives", api.namespace)
            rewrites = objectives._replace(plural="inferencemodelrewrites")
            if on_priorities is not None:
                self._objectives.append(
                    Reflector(api, objectives, InferenceObjective, on_change, pace)
                )
            if on_rules is not None:
                self._rewrites.append(
                    Reflector(api, rewrites, InferenceModelRewrite, on_change, pace)
                )

    @property
    def reflectors(self) -> list[Reflector[InferenceObjective] | Reflector[InferenceModelRewrite]]:
        return [*self._objectives, *self._rewrites]

    @property
    def settled(self) -> bool:
        """Whether it is known what there is, or why not: that must keep nobody from serving."""
        return all(each.phase is not Phase.STARTING for each in self.reflectors)

    def start(self) -> None:
        for reflector in self.reflectors:
            reflector.start()

    async def stop(self) -> None:
        for reflector in self.reflectors:
            await reflector.stop()

    def apply(self) -> None:
        """Hand on what has changed."""
        revisions = [each.revision for each in self.reflectors]
        if revisions == self._seen:
            return
        self._seen = revisions
        group, pool = self._settings.group, self._settings.pool
        problems: list[str] = []
        if self._on_priorities is not None:
            now = priorities(_all(self._objectives), group, pool, problems)
            if now != self._priorities:
                log.info("InferenceObjectives of the pool: %d", len(now))
                self._priorities = now
                self._on_priorities(now)
        if self._on_rules is not None:
            ordered = rules(_all(self._rewrites), group, pool, problems)
            if ordered != self._rules:
                log.info("Rules of InferenceModelRewrites of the pool: %d", len(ordered))
                self._rules = ordered
                self._on_rules(ordered)
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s", problem)
        self._problems = problems


def _all(reflectors: Iterable[Reflector[T]]) -> Iterable[T]:
    for reflector in reflectors:
        yield from reflector.objects.values()


def is_of(ref: PoolRef, group: str, pool: str) -> bool:
    """Whether a reference means this pool."""
    return (ref.group, ref.kind, ref.name) == (group, "InferencePool", pool)


def priorities(
    objectives: Iterable[InferenceObjective], group: str, pool: str, problems: list[str]
) -> dict[str, int]:
    """Priority by objective, of those for this pool; of two of one name the latter's.

    What is left out is put into `problems`, for people.
    """
    found: dict[str, int] = {}
    for objective in objectives:
        name = objective.metadata.name
        if not _counts(objective) or not is_of(objective.spec.pool_ref, group, pool):
            continue
        if name not in found and len(found) >= MAX_OBJECTIVES:
            problems.append(f"InferenceObjectives: only {MAX_OBJECTIVES} are followed")
            break
        priority = objective.spec.priority or 0
        found[name] = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
    return found


def rules(
    rewrites: Iterable[InferenceModelRewrite], group: str, pool: str, problems: list[str]
) -> list[Rewrite]:
    """The rules for this pool in the order of their precedence: those that name a model before
    those for any, then of the oldest resource, then as they stand there.

    What is left out is put into `problems`, for people.
    """
    own = [
        rewrite
        for rewrite in rewrites
        if _counts(rewrite) and is_of(rewrite.spec.pool_ref, group, pool)
    ]
    own.sort(key=lambda each: (each.metadata.creation_timestamp or "", each.metadata.name))
    exact, generic = list[Rewrite](), list[Rewrite]()
    for rewrite in own:
        for number, rule in enumerate(rewrite.spec.rules):
            if len(exact) + len(generic) >= MAX_RULES:
                problems.append(f"InferenceModelRewrites: only {MAX_RULES} rules are followed")
                return exact + generic
            read = _rule(rule)
            if read is None:
                name = rewrite.metadata.name
                problems.append(
                    f"InferenceModelRewrite {name}: spec.rules[{number}] is left out: a target is "
                    "no model's name, or a match is of a type that is not known"
                )
            else:
                (exact if read.models else generic).append(read)
    return exact + generic


def _rule(rule: RewriteRule) -> Rewrite | None:
    """None where a target is no model, or a match is none that we know: it must not match all."""
    matches = rule.matches or []
    models = [match.model.value for match in matches if match.model.type == "Exact"]
    if len(models) < len(matches) or not all(models) or len(models) > MAX_MODELS:
        return None
    targets = rule.targets
    if not 0 < len(targets) <= MAX_MODELS or not all(_fit(each.model_rewrite) for each in targets):
        return None
    return Rewrite(
        models=models,
        targets=[
            RewriteTarget(
                model=target.model_rewrite,
                weight=max(0, min(MAX_WEIGHT, 1 if target.weight is None else target.weight)),
            )
            for target in targets
        ],
    )


def _fit(name: str) -> bool:
    """Whether a model can be called so."""
    return 0 < len(name) <= MAX_MODEL and name.isprintable() and name == name.strip()


def _counts(thing: Thing) -> bool:
    return thing.metadata.deletion_timestamp is None
