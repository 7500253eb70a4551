"""Which model a request is sent as, in place of the one that it asks for.

Rules come from `rewrites` of the configuration, or from Kubernetes' InferenceModelRewrite objects.
A gateway that has decided itself says so in a header, where that is believed: it wins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random

from picker.config import Rewrite, RewriteTarget
from picker.refusal import Refusal
from picker.request import MAX_MODEL, LLMRequest


class Rewrites:
    """The rules in force.

    Raises:
        ValueError: a rule that cannot be; see `update`.
    """

    def __init__(
        self,
        rules: Sequence[Rewrite] = (),
        headers: Sequence[str] = (),
        random: Random | None = None,
    ) -> None:
        """
        Args:
            rules: see `update`.
            headers: of requests, to be believed; of those that are there, the first tells.
            random: chooses among targets.
        """
        self._headers = tuple(name.lower() for name in headers)
        self._random = random or Random()
        self._exact: Mapping[str, _Targets] = {}
        self._any: _Targets | None = None
        self.active = False  # whether a request can be rewritten at all
        self.update(rules)

    def update(self, rules: Sequence[Rewrite]) -> None:
        """Make these the rules, the first that matches a model counts.

        Raises:
            ValueError: a rule without targets, or with a name that no model can have; nothing has
                changed then.
        """
        exact: dict[str, _Targets] = {}
        of_any: _Targets | None = None
        for number, rule in enumerate(rules):
            targets = _Targets(rule.targets, number)
            for model in rule.models if of_any is None else ():
                exact.setdefault(model, targets)
            if not rule.models and of_any is None:
                of_any = targets
        self._exact, self._any = exact, of_any
        self.active = bool(rules or self._headers)

    def apply(self, request: LLMRequest) -> None:
        """Make a request one for its target; one that names no model stays as it is.

        Raises:
            Refusal: 400: a header that is believed names what no model can be called.
        """
        model = request.model
        if model is None:
            return
        target = self._told(request.headers) or self._target(model)
        if target is not None and target != model:
            request.send_as(target)

    def _told(self, headers: Mapping[str, str]) -> str | None:
        for name in self._headers:
            target = headers.get(name, "").strip()
            if target:
                if not (_fit(target) and target.isascii()):
                    raise Refusal(400, "invalid_model", f"the header {name} names no model")
                return target
        return None

    def _target(self, model: str) -> str | None:
        targets = self._exact.get(model, self._any)
        return None if targets is None else targets.choose(self._random)


class _Targets:
    """Models of one rule, each with its share of the requests."""

    def __init__(self, targets: Sequence[RewriteTarget], number: int) -> None:
        if not targets:
            raise ValueError(f"rewrites[{number}]: 'targets' must name a model at least")
        for target in targets:
            if not _fit(target.model):
                raise ValueError(
                    f"rewrites[{number}]: {target.model[:40]!r} cannot be a model's name: it takes "
                    f"1 to {MAX_MODEL} printable characters"
                )
        self._models = [target.model for target in targets]
        weights = [max(0, target.weight) for target in targets]
        self._ends = list(accumulate(weights if any(weights) else [1] * len(targets)))

    def choose(self, random: Random) -> str:
        if len(self._models) == 1:
            return self._models[0]
        return self._models[bisect_right(self._ends, random.randrange(self._ends[-1]))]


def _fit(name: str) -> bool:
    return 0 < len(name) <= MAX_MODEL and name.isprintable() and name == name.strip()
