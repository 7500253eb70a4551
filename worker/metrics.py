"""vLLM's metrics: counted at almost no cost, written out when somebody asks.

Names, types, labels and buckets are those of vLLM 0.32's /metrics page; names that it dropped
stay for older dashboards and pickers. What this worker has no notion of (FLOP estimates) is left
out; look-ups in caches that it has not (multi-modal, external) are a true zero.

The engine counts on plain attributes and the page is written here: prometheus_client's objects
cost too much for every token, and a page of them ten times as much as this one, which a picker
may want every 50 ms.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import REGISTRY, generate_latest

from worker.config import EngineConfig
from worker.events import Publisher
from worker.sequence import FinishReason, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_HANDLERS = 64  # the rest count as "none", so that no mistake lets the page grow for ever
PROCESS_REFRESH = 1.0  # seconds; reading /proc costs as much as the rest of the page

Kind = Literal["counter", "gauge", "histogram"]
Bounds = tuple[float, ...]


def _bounds(text: str) -> Bounds:
    return tuple(map(float, text.split()))


HTTP = _bounds("0.1 0.5 1")
TTFT = _bounds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
PER_TOKEN = _bounds(".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
LATENCY = _bounds(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP_TOKENS = _bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
TOKENS = tuple(m * 10.0**e for e in range(9) for m in (1, 2, 5))  # cut at max_model_len

GAUGES = {
    "num_requests_running": "Requests being executed.",
    "num_requests_waiting": "Requests in the queue.",
    "kv_cache_usage_perc": "Share of the KV blocks that running requests hold, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Look-ups in other engines' caches: none here.",
    "external_prefix_cache_hits": "Hits in other engines' caches: none here.",
    "mm_cache_queries": "Look-ups in a multi-modal cache: none here.",
    "mm_cache_hits": "Hits in a multi-modal cache: none here.",
    "num_preemptions": "Times a running request had to give its KV blocks back.",
    "prompt_tokens": "Prompt tokens of admitted requests, cached or not.",
    "prompt_tokens_cached": "Prompt tokens of admitted requests whose KV was cached.",
    "generation_tokens": "Tokens generated.",
}
BY_LABEL: dict[str, tuple[Kind, str, str]] = {  # the label and all its values
    "num_requests_waiting_by_reason": ("gauge", "reason", "capacity deferred"),
    "engine_sleep_state": ("gauge", "sleep_state", "awake weights_offloaded discard_all"),
    "prompt_tokens_by_source": (
        "counter",
        "source",
        "local_compute local_cache_hit external_kv_transfer",
    ),
    "prompt_tokens_cached_by_source": (
        "counter",
        "source",
        "device host p2p disk external_unspecified",
    ),
    "request_success": ("counter", "finished_reason", "stop length abort error repetition"),
    "admission_rejections": ("counter", "reason", "max_num_queued_reqs max_num_queued_tokens"),
}
HISTOGRAMS = {
    "request_prompt_tokens": (TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (TOKENS, "Tokens generated for a request."),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens computed in one step."),
    "request_max_num_generation_tokens": (TOKENS, "Tokens of a request's longest answer."),
    "request_params_n": (_bounds("1 2 5 10 20"), "Parameter n; each answer counts as a request."),
    "request_params_max_tokens": (TOKENS, "Parameter max_tokens of a request."),
    "time_to_first_token_seconds": (TTFT, "From arrival to the first token."),
    "inter_token_latency_seconds": (PER_TOKEN, "From one token of a request to the next."),
    "request_time_per_output_token_seconds": (PER_TOKEN, "Mean time between a request's tokens."),
    "e2e_request_latency_seconds": (LATENCY, "From arrival to the end."),
    "request_queue_time_seconds": (LATENCY, "From arrival to the first admission."),
    "request_inference_time_seconds": (LATENCY, "From admission to the last token."),
    "request_prefill_time_seconds": (LATENCY, "From admission to the first token."),
    "request_decode_time_seconds": (LATENCY, "From the first token to the last."),
    "request_num_preemptions": (_bounds("1 2 3 4 5 10 20"), "Times a request was preempted."),
    "request_prefill_kv_computed_tokens": (TOKENS, "Prompt tokens of a request not found cached."),
}
ALIASES = {  # the same numbers under an older or a second name
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}


class Value:
    """One number: a counter's, which only grows, or a gauge's."""

    __slots__ = ("created", "value")

    def __init__(self, value: float = 0) -> None:
        self.value = value
        self.created = time.time()

    def lines(self, name: str, labels: str) -> list[str]:
        return [f"{name}{{{labels}}} {float(self.value)!r}"]


class Histogram:
    """Observations counted between ascending bounds, a bound itself with what is below it."""

    __slots__ = ("bounds", "counts", "created", "sum")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.created = time.time()

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, values: list[float]) -> None:
        """The same for each value; sorted, so that each bound is looked up only once."""
        ordered = sorted(values)
        below = 0
        for i, bound in enumerate(self.bounds):
            if below == len(ordered):
                break
            upto = bisect_right(ordered, bound, below)
            self.counts[i] += upto - below
            below = upto
        self.counts[-1] += len(ordered) - below
        self.sum += sum(values)

    def lines(self, name: str, labels: str) -> list[str]:
        counts = list(accumulate(self.counts))
        lines = [
            f'{name}_bucket{{{labels},le="{bound!r}"}} {float(count)!r}'
            for bound, count in zip(self.bounds, counts, strict=False)
        ]
        total = float(counts[-1])
        lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {total!r}')
        lines.append(f"{name}_count{{{labels}}} {total!r}")
        lines.append(f"{name}_sum{{{labels}}} {float(self.sum)!r}")
        return lines


Series = Value | Histogram


class Family(NamedTuple):
    """The series of one name, by their labels as written on the page."""

    kind: Kind
    name: str
    help: str
    series: Mapping[str, Series]

    def lines(self) -> list[str]:
        name = f"{self.name}_total" if self.kind == "counter" else self.name
        lines = [f"# HELP {name} {self.help}", f"# TYPE {name} {self.kind}"]
        series = list(self.series.items())  # the HTTP server may be adding one
        for labels, one in series:
            lines += one.lines(name, labels)
        if series and self.kind != "gauge":
            name = f"{self.name}_created"
            lines += [f"# HELP {name} {self.help}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{labels}}} {one.created!r}" for labels, one in series]
        return lines


class Metrics:
    """Everything that one engine and its HTTP server count.

    The engine's thread counts, any thread renders, nothing locks: a page may show a step half
    counted. Each of the n answers to a request counts as a request.
    """

    def __init__(self, model_name: str, engine_config: EngineConfig, dtype: str) -> None:
        self._caching = engine_config.enable_prefix_caching
        self._publisher: Publisher | None = None
        self._process_page, self._process_page_at = b"", float("-inf")
        self._families: dict[str, Family] = {}
        self._values: dict[str, Value] = {}  # by name, or by name/label value
        self._histograms: dict[str, Histogram] = {}
        self._http_requests: dict[str, Value] = {}
        self._http_seconds: dict[str, Histogram] = {}
        self._handlers = {"none"}
        self._add_engine(_labels(model_name=model_name), engine_config.max_model_len)
        self._add_cache_config(engine_config, dtype)
        self._add("counter", "http_requests", "HTTP requests answered.", self._http_requests)
        help = "From an HTTP request to the end of its answer."
        self._add("histogram", "http_request_duration_seconds", help, self._http_seconds)
        self._values["engine_sleep_state/awake"].value = 1

    def step(self, running: int, waiting: int, usage: float, num_tokens: int) -> None:
        """The state after a step of `num_tokens` tokens; 0: nothing ran, only the state changed.

        `usage` is the share of KV blocks that running sequences hold, 0 to 1.
        """
        self._values["num_requests_running"].value = running
        self._values["num_requests_waiting"].value = waiting
        self._values["num_requests_waiting_by_reason/capacity"].value = waiting
        self._values["kv_cache_usage_perc"].value = usage
        if num_tokens:
            self._histograms["iteration_tokens_total"].observe(num_tokens)

    def tokens(self, count: int, gaps: list[float]) -> None:
        """A step gave `count` tokens; `gaps`: seconds since the last of each sequence."""
        self._values["generation_tokens"].value += count
        self._histograms["inter_token_latency_seconds"].observe_many(gaps)

    def admitted(self, queue_seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence runs for the first time.

        Its prompt is counted now, and its wait; vLLM counts the one when prefill ends, the other
        when the request does.
        """
        self._histograms["request_queue_time_seconds"].observe(queue_seconds)
        values = self._values
        values["prompt_tokens"].value += prompt_tokens
        values["prompt_tokens_by_source/local_compute"].value += prompt_tokens - cached_tokens
        values["prompt_tokens_by_source/local_cache_hit"].value += cached_tokens
        values["prompt_tokens_cached"].value += cached_tokens
        values["prompt_tokens_cached_by_source/device"].value += cached_tokens
        if self._caching:
            values["prefix_cache_queries"].value += prompt_tokens
            values["prefix_cache_hits"].value += cached_tokens

    def first_token(self, ttft: float) -> None:
        """A sequence got its first token, `ttft` seconds after its arrival."""
        self._histograms["time_to_first_token_seconds"].observe(ttft)

    def preempted(self) -> None:
        """A running sequence gave its blocks back and waits again."""
        self._values["num_preemptions"].value += 1

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence ended, at `now` on the clock of `sequence.arrival`.

        All are counted by reason. Only those that came to their own end are measured, as in vLLM:
        the length of an aborted one says when its client left.
        """
        self._values[f"request_success/{reason}"].value += 1
        if reason not in ("stop", "length") or not sequence.first_token_at:
            return
        prompt, produced = sequence.num_prompt_tokens, sequence.num_output_tokens
        start, first, last = sequence.admitted_at, sequence.first_token_at, sequence.last_token_at
        measured = {
            "request_prompt_tokens": prompt,
            "request_prefill_kv_computed_tokens": prompt - sequence.num_cached_tokens,
            "request_generation_tokens": produced,
            "request_max_num_generation_tokens": produced,
            "request_params_n": 1,
            "request_params_max_tokens": sequence.params.max_tokens,
            "request_num_preemptions": sequence.num_preemptions,
            "e2e_request_latency_seconds": now - sequence.arrival,
            "request_inference_time_seconds": last - start,
            "request_prefill_time_seconds": first - start,
            "request_decode_time_seconds": last - first,
            "request_time_per_output_token_seconds": (last - first) / max(produced - 1, 1),
        }
        for name, value in measured.items():
            self._histograms[name].observe(value)

    def rejected(self, reason: Literal["max_num_queued_reqs", "max_num_queued_tokens"]) -> None:
        """A request was turned away because too much waits already."""
        self._values[f"admission_rejections/{reason}"].value += 1

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A request was answered; `handler` is the pattern of its route, or "none"."""
        if handler not in self._handlers and len(self._handlers) >= MAX_HANDLERS:
            handler = "none"
        self._handlers.add(handler)
        method = method if method in HTTP_METHODS else "other"
        labels = _labels(handler=handler, method=method)
        if labels not in self._http_seconds:
            self._http_seconds[labels] = Histogram(HTTP)
        self._http_seconds[labels].observe(seconds)
        labels += f',status="{status // 100}xx"'
        if labels not in self._http_requests:
            self._http_requests[labels] = Value()
        self._http_requests[labels].value += 1

    def attach_publisher(self, publisher: Publisher) -> None:
        """Export what the KV event publisher counts."""
        self._publisher = publisher
        self._published, self._dropped, self._too_slow = Value(), Value(), Value()
        help = "KV event batches sent."
        self._add("counter", "warmpath:kv_events_published", help, {"": self._published})
        help = "KV event batches never sent (queue), and times a subscriber was too slow."
        series = {'reason="queue"': self._dropped, 'reason="slow_subscriber"': self._too_slow}
        self._add("counter", "warmpath:kv_events_dropped", help, series)

    def render(self) -> bytes:
        """The page, in the format that CONTENT_TYPE names."""
        if self._publisher is not None:
            self._published.value = self._publisher.published
            self._dropped.value = self._publisher.dropped_batches
            self._too_slow.value = self._publisher.dropped_sends
        now = time.monotonic()
        if now - self._process_page_at >= PROCESS_REFRESH:
            self._process_page, self._process_page_at = generate_latest(REGISTRY), now
        lines = [line for family in self._families.values() for line in family.lines()]
        return self._process_page + ("\n".join(lines) + "\n").encode(errors="replace")

    def _add(self, kind: Kind, name: str, help: str, series: Mapping[str, Series]) -> None:
        self._families[name] = Family(kind, name, help, series)

    def _add_engine(self, model: str, max_model_len: int) -> None:
        engine = f'engine="0",{model}'
        for name, help in (GAUGES | COUNTERS).items():
            self._values[name] = Value()
            kind: Kind = "gauge" if name in GAUGES else "counter"
            self._add(kind, f"vllm:{name}", help, {engine: self._values[name]})
        for name, (kind, label, values) in BY_LABEL.items():
            others = model if name == "admission_rejections" else engine  # it is the front end's
            series = {}
            for value in values.split():
                series[f'{others},{label}="{value}"'] = self._values[f"{name}/{value}"] = Value()
            self._add(kind, f"vllm:{name}", f"By {label}.", series)
        for name, (bounds, help) in HISTOGRAMS.items():
            if bounds is TOKENS:
                bounds = tuple(bound for bound in TOKENS if bound <= max_model_len)
            self._histograms[name] = Histogram(bounds)
            self._add("histogram", f"vllm:{name}", help, {engine: self._histograms[name]})
        for alias, name in ALIASES.items():
            family = self._families[f"vllm:{name}"]
            self._families[f"vllm:{alias}"] = family._replace(name=f"vllm:{alias}")

    def _add_cache_config(self, config: EngineConfig, dtype: str) -> None:
        size = config.num_blocks * config.block_size
        labels = _labels(
            engine=0,
            block_size=config.block_size,
            cache_dtype=dtype,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_cache_max_concurrency=size / config.max_model_len,
            kv_cache_size_tokens=size,
            num_gpu_blocks=config.num_blocks,
        )
        self._add(
            "gauge", "vllm:cache_config_info", "How the KV cache is set up.", {labels: Value(1)}
        )


def _labels(**labels: object) -> str:
    """Labels as they stand between braces on the page."""
    return ",".join(f'{name}="{str(value).translate(ESCAPES)}"' for name, value in labels.items())
