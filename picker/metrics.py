"""What the picker counts while requests pass.

Names, labels and buckets are those of the reference endpoint picker where it has them
(`inference_*`); the rest is ours (`warmpath_*`). Counting is an addition on a plain object that
was found by one look-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING

from picker.exposition import Histogram, Labels, Spec, write
from picker.pool import Endpoint
from picker.prefix.match import By
from picker.refusal import Refusal

if TYPE_CHECKING:
    from picker.director import Outcome, Pick

MAX_MODELS = 100  # distinct names, each with about 190 series; the others count as "other"
MAX_NAME = 256  # characters of a model's name in a label
OTHER = "other"

_LATENCY = (
    ".005 .025 .05 .1 .2 .4 .6 .8 1 1.25 1.5 2 3 4 5 6 8 10 15 20 30 45 60 120 180 240 300 360 480 "
    "600 900 1200 1800 2700 3600"
)
_TPOT = (
    ".0005 .00205 .005 .01 .02 .04 .06 .08 .1 .125 .15 .2 .3 .4 .5 .6 .8 1 1.5 2 3 4.5 6 12 18 24 "
    "30 36 48 60 90 120 180 270 360"
)
_NORMALIZED = ".001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10"
_INPUT = (
    "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 32768 65536 131072 262144 524288 1048576"
)
_OUTPUT = "1 8 16 32 64 128 256 512 1024 2048 4096 8192"
_PICKING = ".0001 .0002 .0005 .001 .002 .005 .01 .02 .05 .1"
_RATIO = "0 .1 .2 .3 .4 .5 .6 .7 .8 .9 1"

_MODEL = ("model_name", "target_model_name")
_PREFIX = "inference_objective_"

MODEL_METRICS = {  # by attribute of _Model
    "requests": Spec(
        "counter",
        _PREFIX + "request_total",
        (*_MODEL, "priority"),
        "Requests that an endpoint was picked for.",
    ),
    "running": Spec(
        "gauge", _PREFIX + "running_requests", _MODEL[:1], "Picked requests that have not ended."
    ),
    "seconds": Spec(
        "histogram",
        _PREFIX + "request_duration_seconds",
        _MODEL,
        "From the pick to the end of a completed response.",
        _LATENCY,
    ),
    "first_token": Spec(
        "histogram",
        _PREFIX + "request_ttft_seconds",
        _MODEL,
        "From the pick to the first bytes of a response's body.",
        _LATENCY,
    ),
    "per_token": Spec(
        "histogram",
        _PREFIX + "request_tpot_seconds",
        _MODEL,
        "Mean time between output tokens after the first.",
        _TPOT,
    ),
    "normalized": Spec(
        "histogram",
        _PREFIX + "normalized_time_per_output_token_seconds",
        _MODEL,
        "Duration of a completed request over its output tokens.",
        _NORMALIZED,
    ),
    "input_tokens": Spec(
        "histogram",
        _PREFIX + "input_tokens",
        _MODEL,
        "Prompt tokens: as the pod told, else as estimated.",
        _INPUT,
    ),
    "output_tokens": Spec(
        "histogram", _PREFIX + "output_tokens", _MODEL, "Tokens generated, as told.", _OUTPUT
    ),
    "cached_tokens": Spec(
        "histogram",
        _PREFIX + "prompt_cached_tokens",
        _MODEL,
        "Prompt tokens that the pod's cache held, as told.",
        _INPUT,
    ),
}
POD_METRICS = {  # by attribute of _Pod
    "picks": Spec("counter", "warmpath_picks_total", ("endpoint",), "Requests sent to a pod."),
    "prompt_tokens": Spec(
        "counter",
        "warmpath_told_prompt_tokens_total",
        ("endpoint",),
        "Prompt tokens of the requests whose pod told how many were cached.",
    ),
    "predicted_tokens": Spec(
        "counter",
        "warmpath_predicted_cached_tokens_total",
        ("endpoint",),
        "Of those, the ones that the prefix index expected in the pod's cache.",
    ),
    "cached_tokens": Spec(
        "counter",
        "warmpath_told_cached_tokens_total",
        ("endpoint",),
        "Of those, the ones that the pod found in its cache.",
    ),
}
PICKING = Spec(
    "histogram",
    "inference_extension_scheduler_e2e_duration_seconds",
    (),
    "Time to pick an endpoint.",
    _PICKING,
)
HIT_RATIO = Spec(
    "histogram",
    "inference_extension_prefix_indexer_hit_ratio",
    (),
    "Share of a prompt that the picked pod's cache is expected to hold.",
    _RATIO,
)
MATCHES = Spec(
    "counter",
    "warmpath_prefix_matches_total",
    ("by",),
    "Picks by what their prompts were compared with.",
)
PREDICTIONS = Spec(
    "counter",
    "warmpath_prefix_predictions_total",
    ("by", "result"),
    "Predictions of cached tokens, as the pod's answer proved them: too few, exact, too many.",
)
MOVED = Spec(
    "counter", "warmpath_moved_picks_total", (), "Requests served by another pod than the picked."
)
ENDED = Spec(
    "counter", "warmpath_ended_requests_total", ("endpoint", "outcome"), "How requests ended."
)
ERRORS = Spec(
    "counter",
    _PREFIX + "request_error_total",
    (*_MODEL, "error_code"),
    "Refused requests, and those that a pod answered with a 5xx.",
)
REFUSALS = Spec(
    "counter",
    "warmpath_refusals_total",
    ("reason", "status"),
    "Requests that the picker answered itself.",
)
POD_ERROR = "ModelServerError"
COMPARED = (By.EVENTS, By.APPROXIMATE)


class Result(StrEnum):
    """How many cached tokens were predicted, compared with those that the pod found."""

    LESS = "less"
    EXACT = "exact"
    MORE = "more"


_Names = str | None | tuple[str, str | None]
"""The model that is asked for, and the one that this was rewritten to if it was."""


class _Model:
    """What is counted for one model that is asked for, and the one that it is sent as."""

    __slots__ = (*MODEL_METRICS, "errors")

    requests: int
    running: int
    seconds: Histogram
    first_token: Histogram
    per_token: Histogram
    normalized: Histogram
    input_tokens: Histogram
    output_tokens: Histogram
    cached_tokens: Histogram

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        for attribute, spec in MODEL_METRICS.items():
            setattr(self, attribute, Histogram(spec.bounds) if spec.kind == "histogram" else 0)


class _Pod:
    """What is counted for one endpoint."""

    __slots__ = (*POD_METRICS, "ended")

    picks: int
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int

    def __init__(self) -> None:
        self.ended: dict[Outcome, int] = {}
        for attribute in POD_METRICS:
            setattr(self, attribute, 0)


class PickerMetrics:
    """Everything that is counted while requests pass.

    A listener of the pool: with an endpoint go its numbers.
    """

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._models: dict[tuple[str, str], _Model] = {}  # by labels
        self._by_names: dict[_Names, _Model] = {}  # as requests write them; the same objects
        self._pods: dict[Endpoint, _Pod] = {}
        self._refusals: dict[tuple[str, HTTPStatus], int] = {}
        self._picking = Histogram(PICKING.bounds)
        self._hit_ratio = Histogram(HIT_RATIO.bounds)
        self._moved = 0
        self.matches = dict.fromkeys(By, 0)
        self.predictions = {(by, result): 0 for by in COMPARED for result in Result}

    # What the director tells

    def picked(self, pick: Pick, seconds: float) -> None:
        """An endpoint was picked, which took this long."""
        model = self._model(pick)
        model.requests += 1
        model.running += 1
        self._pod(pick.endpoint).picks += 1
        self._picking.observe(seconds)
        self.matches[pick.matched_by] += 1
        if pick.prompt_tokens:
            self._hit_ratio.observe(1 - pick.uncached_tokens / pick.prompt_tokens)

    def ended(self, pick: Pick) -> None:
        """A picked request is over; only completed ones are measured."""
        model, pod = self._model(pick), self._pod(pick.endpoint)
        model.running -= 1
        outcome = pick.outcome
        assert outcome is not None
        pod.ended[outcome] = pod.ended.get(outcome, 0) + 1
        if outcome == "completed":
            self._measure(pick, model, pod)
        elif outcome == "failed":
            model.errors[POD_ERROR] = model.errors.get(POD_ERROR, 0) + 1

    def _measure(self, pick: Pick, model: _Model, pod: _Pod) -> None:
        seconds, first, usage = pick.seconds, pick.first_token_seconds, pick.usage
        assert seconds is not None
        model.seconds.observe(seconds)
        if first is not None:
            model.first_token.observe(first)
        if usage is None:
            model.input_tokens.observe(pick.prompt_tokens)
            return
        model.input_tokens.observe(usage.prompt_tokens)
        model.output_tokens.observe(usage.completion_tokens)
        cached = usage.cached_tokens
        if cached is not None:
            model.cached_tokens.observe(cached)
            pod.prompt_tokens += usage.prompt_tokens
            pod.predicted_tokens += pick.predicted_tokens
            pod.cached_tokens += cached
            if pick.matched_by is not By.NONE:
                result = _result(pick.predicted_tokens, cached)
                self.predictions[pick.matched_by, result] += 1
        if usage.completion_tokens:
            model.normalized.observe(seconds / usage.completion_tokens)
            if first is not None and usage.completion_tokens > 1:
                model.per_token.observe(max(0.0, seconds - first) / (usage.completion_tokens - 1))

    def refused(self, refusal: Refusal) -> None:
        """A request was answered by the picker itself."""
        key = refusal.reason, refusal.status
        self._refusals[key] = self._refusals.get(key, 0) + 1

    def moved(self) -> None:
        """A request is served by another endpoint than the picked one."""
        self._moved += 1

    def _model(self, pick: Pick) -> _Model:
        names = pick.model if pick.rewrite is None else (pick.rewrite.asked, pick.model)
        model = self._by_names.get(names)
        return self._add_model(names, pick) if model is None else model

    def _add_model(self, names: _Names, pick: Pick) -> _Model:
        """The numbers of some names' labels; names are kept while there are few."""
        labels = _label(pick.asked_model), _label(pick.model)
        if labels not in self._models and len(self._models) >= self._max_models:
            labels = OTHER, OTHER
        model = self._models.get(labels)
        if model is None:
            model = self._models[labels] = _Model()
        if labels[0] != OTHER and len(self._by_names) < self._max_models:
            self._by_names[names] = model
        return model

    def _pod(self, endpoint: Endpoint) -> _Pod:
        pod = self._pods.get(endpoint)
        if pod is None:
            pod = _Pod()
            if endpoint.alive:
                self._pods[endpoint] = pod
        return pod

    # The pool's listener

    def added(self, endpoint: Endpoint) -> None:
        self._pods[endpoint] = _Pod()

    def removed(self, endpoint: Endpoint) -> None:
        self._pods.pop(endpoint, None)

    def page(self) -> Iterator[str]:
        """All of it as Prometheus' text, in small pieces."""
        models = list(self._models.items())
        for attribute, spec in MODEL_METRICS.items():
            if attribute == "running":
                yield from write(spec, self._running().items())
            else:
                rows = (
                    ((*labels, "0")[: len(spec.labels)], getattr(model, attribute))
                    for labels, model in models
                )
                yield from write(spec, rows)
        pods = [(endpoint.address, pod) for endpoint, pod in self._pods.items()]
        for attribute, spec in POD_METRICS.items():
            counts = (((address,), getattr(pod, attribute)) for address, pod in pods)
            yield from write(spec, counts)
        ended = [
            ((address, str(outcome)), count)
            for address, pod in pods
            for outcome, count in pod.ended.items()
        ]
        yield from write(ENDED, ended)
        yield from write(ERRORS, self._errors(models))
        refusals = [
            ((reason, str(int(status))), count)
            for (reason, status), count in self._refusals.items()
        ]
        yield from write(REFUSALS, refusals)
        yield from write(PICKING, [((), self._picking)])
        yield from write(HIT_RATIO, [((), self._hit_ratio)])
        yield from write(MOVED, [((), self._moved)])
        yield from write(MATCHES, (((by,), count) for by, count in self.matches.items()))
        yield from write(PREDICTIONS, self.predictions.items())

    def _running(self) -> dict[Labels, int]:
        """Of each model that is asked for, whatever its requests are sent as."""
        running: dict[Labels, int] = {}
        for (asked, _), model in self._models.items():
            running[asked,] = running.get((asked,), 0) + model.running
        return running

    def _errors(self, models: list[tuple[tuple[str, str], _Model]]) -> list[tuple[Labels, int]]:
        """Those of pods by model; refusals under no model's name, such as `ServiceUnavailable`."""
        refused: dict[str, int] = {}
        for (_, status), count in self._refusals.items():
            code = status.phrase.title().replace(" ", "")
            refused[code] = refused.get(code, 0) + count
        rows: list[tuple[Labels, int]] = [(("", "", code), n) for code, n in refused.items()]
        for labels, model in models:
            rows += [((*labels, code), count) for code, count in model.errors.items()]
        return rows


def _result(predicted: int, cached: int) -> Result:
    if predicted == cached:
        return Result.EXACT
    return Result.LESS if predicted < cached else Result.MORE


def _label(model: str | None) -> str:
    """A model's name as a label: no longer than bearable, and text that can be encoded."""
    return (model or "")[:MAX_NAME].encode(errors="replace").decode()
