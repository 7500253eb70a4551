"""What the metrics pages of model servers say about load.

Names are those of the model server protocol of the Gateway API Inference Extension (proposal
003) with the older ones that are still about. A page has hundreds of lines and is read many times
a second, so the few that matter are searched for in the bytes; the others are never looked at.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

from picker.config import EngineMetrics, Metrics
from scorers.pods import Adapters

log = logging.getLogger(__name__)

MAX_SERIES = 4096  # of one metric; with more of them it counts as not told
MAX_ADAPTERS = 1024
MAX_UNKNOWN = 100  # names of engines that are logged
MAX_KEPT_LABELS = 4096  # bytes of a series' labels that are remembered as read
MAX_SELECTED = 8  # labels that tell one series of a metric from others
MAX_DIGITS = 40  # of a number, with sign, point and exponent
MAX_COUNT = 1e9  # more requests, tokens of a block or blocks than this are no count
MAX_TOTAL = float(1 << 53)  # nor are more tokens, of a server's whole life

# Possessive, so that no page makes them go back and forth.
_LABELS = rb'(?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+'
_SAMPLE = re.compile(rb"(?:[ \t]*+\{(" + _LABELS + rb")\}[ \t]*+|[ \t]++)([^ \t\r]++)", re.DOTALL)
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_NUMBER = re.compile(rb"\+?(?:\d++\.?+\d*+|\.\d++)(?:[eE][+-]?\d++)?")

# How settings name a metric, and a label of it.
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,199})(?:\{([^{}]{0,1000})\})?")
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*("?)([^"\\]*)\2')

# Series that differ in nothing but these tell of the same requests: ranks of one engine work on
# all of them together, and a priority's share is counted in the whole too.
_SHARED = frozenset((b"tp_rank", b"pp_rank", b"moe_ep_rank", b"priority"))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One reading of a pod's metrics page. None where the page does not tell."""

    waiting: float | None = None  # requests in the queue
    running: float | None = None  # requests in the batch
    kv_usage: float | None = None  # 0 to 1
    block_size: int | None = None  # tokens of a KV block
    num_blocks: int | None = None  # KV blocks of the pod
    adapters: Adapters | None = None
    generated: float | None = None  # output tokens since the server began

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache holds."""
        if self.block_size is None or self.num_blocks is None:
            return None
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class _Metric:
    """Where a number is found."""

    name: bytes
    where: tuple[tuple[bytes, bytes], ...] = ()  # only in series with these labels
    label: bytes | None = None  # it is the value of this label, not of the sample


@dataclass(frozen=True, slots=True)
class Engine:
    """The metrics of one kind of model server, for each number the preferred one first."""

    name: str
    path: str
    waiting: tuple[_Metric, ...]
    running: tuple[_Metric, ...]
    kv_usage: tuple[_Metric, ...]
    block_size: tuple[_Metric, ...]
    num_blocks: tuple[_Metric, ...]
    generated: tuple[_Metric, ...] = ()
    used_blocks: tuple[_Metric, ...] = ()  # tells the usage where nothing else does
    adapters: bytes | None = None


def _triton(family: bytes, kind: bytes, value: bytes) -> tuple[_Metric, ...]:
    return (_Metric(b"nv_trt_llm_" + family, ((kind, value),)),)


_TRITON_BLOCKS = (b"kv_cache_block_metrics", b"kv_cache_block_type")

ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        name="vllm",
        path="/metrics",
        waiting=(_Metric(b"vllm:num_requests_waiting"),),
        running=(_Metric(b"vllm:num_requests_running"),),
        kv_usage=(
            _Metric(b"vllm:kv_cache_usage_perc"),
            _Metric(b"vllm:gpu_cache_usage_perc"),
        ),
        block_size=(_Metric(b"vllm:cache_config_info", label=b"block_size"),),
        num_blocks=(_Metric(b"vllm:cache_config_info", label=b"num_gpu_blocks"),),
        generated=(_Metric(b"vllm:generation_tokens_total"),),
        adapters=b"vllm:lora_requests_info",
    ),
    "sglang": Engine(
        name="sglang",
        path="/metrics",
        waiting=(_Metric(b"sglang:num_queue_reqs"),),
        running=(_Metric(b"sglang:num_running_reqs"),),
        kv_usage=(_Metric(b"sglang:token_usage"),),
        block_size=(
            _Metric(b"sglang:cache_config_info", label=b"page_size"),
            _Metric(b"sglang:page_size"),
        ),
        num_blocks=(
            _Metric(b"sglang:cache_config_info", label=b"num_pages"),
            _Metric(b"sglang:num_pages"),
        ),
        generated=(_Metric(b"sglang:generation_tokens_total"),),
    ),
    "trtllm": Engine(
        name="trtllm",
        path="/prometheus/metrics",
        waiting=(_Metric(b"trtllm_num_requests_waiting"),),
        running=(_Metric(b"trtllm_num_requests_running"),),
        kv_usage=(_Metric(b"trtllm_kv_cache_utilization"),),
        block_size=(_Metric(b"trtllm_kv_cache_tokens_per_block"),),
        num_blocks=(_Metric(b"trtllm_kv_cache_max_blocks"),),
    ),
    "triton": Engine(
        name="triton",
        path="/metrics",
        waiting=_triton(b"request_metrics", b"request_type", b"waiting"),
        running=_triton(b"request_metrics", b"request_type", b"scheduled"),
        kv_usage=_triton(*_TRITON_BLOCKS, b"fraction"),
        block_size=_triton(*_TRITON_BLOCKS, b"tokens_per"),
        num_blocks=_triton(*_TRITON_BLOCKS, b"max"),
        used_blocks=_triton(*_TRITON_BLOCKS, b"used"),
    ),
}

# What pods are labelled with where a pool has several kinds of servers.
ENGINE_LABELS = ("inference.networking.k8s.io/engine-type", "llm-d.ai/engine-type")
_ALSO_CALLED = {"trtllm-serve": "trtllm", "triton-tensorrt-llm": "triton"}


def engine_of(
    labels: Mapping[str, str],
    default: str,
    unknown: set[str],
    engines: Mapping[str, Engine] = ENGINES,
    names: Sequence[str] = ENGINE_LABELS,
) -> Engine:
    """The engine that a pod's labels of these names tell, or the default.

    Names that are no engine's are put into `unknown`, and logged once.
    """
    for label in names:
        name = labels.get(label)
        if name is not None:
            engine = engines.get(name) or engines.get(_ALSO_CALLED.get(name, ""))
            if engine is not None:
                return engine
            if name not in unknown and len(unknown) < MAX_UNKNOWN:
                unknown.add(name)
                log.warning(
                    "label %s names %r, which is no known engine: %s is assumed",
                    label,
                    name[:100],
                    default,
                )
    return engines[default]


def engines_of(settings: Metrics) -> Mapping[str, Engine]:
    """All engines by name: those known here, and those that are set.

    Raises:
        ValueError: what is set cannot be read.
    """
    return {**ENGINES, **{name: _custom(name, told) for name, told in settings.engines.items()}}


def _custom(name: str, told: EngineMetrics) -> Engine:
    cache_info = _selected(name, told.cache_info)
    adapters = _selected(name, told.adapters)
    known = ENGINES.get(name)
    return Engine(
        name=name,
        path="/metrics" if known is None else known.path,
        waiting=_selected(name, told.waiting),
        running=_selected(name, told.running),
        kv_usage=_selected(name, told.kv_usage),
        block_size=tuple(replace(metric, label=b"block_size") for metric in cache_info),
        num_blocks=tuple(replace(metric, label=b"num_gpu_blocks") for metric in cache_info),
        adapters=adapters[0].name if adapters else None,
    )


def _selected(engine: str, selector: str) -> tuple[_Metric, ...]:
    """`metric` or `metric{label="value", ...}`, quotes left out or not; empty: no metric."""
    if not selector.strip():
        return ()
    match = _SELECTOR.fullmatch(selector.strip())
    pairs = [] if match is None else [pair for pair in (match[2] or "").split(",") if pair.strip()]
    labels = [_PAIR.fullmatch(pair.strip()) for pair in pairs]
    if match is None or len(labels) > MAX_SELECTED or not all(labels):
        raise ValueError(
            f"metrics.engines.{engine}: {selector[:100]!r} is no metric: write name or "
            'name{label="value"}'
        )
    where = tuple((label[1].encode(), label[3].encode()) for label in labels if label)
    return (_Metric(match[1].encode(), where),)


def parse(page: bytes, engine: Engine) -> LoadReport:
    """What a page in Prometheus' text format tells.

    A server with several engines (data-parallel ranks, or models) has a series for each. Requests
    and blocks are added up, for the pod has them all. Usage is the mean: the server itself sends
    a request to the emptiest engine, so the pod is as full as its engines are together, and one
    full engine does not make it full.

    Samples that are no count (NaN, infinite, negative, no number) are as good as absent.
    """
    found = _Page(page)
    # In the order of vLLM's page: each search goes on where the last one ended.
    running = found.total(engine.running)
    waiting = found.total(engine.waiting)
    kv_usage = found.mean(engine.kv_usage)
    block_size = found.greatest(engine.block_size)
    num_blocks = found.total(engine.num_blocks)
    generated = found.total(engine.generated, MAX_TOTAL)
    if kv_usage is None and num_blocks:
        used = found.total(engine.used_blocks)
        kv_usage = None if used is None else used / num_blocks
    return LoadReport(
        waiting=waiting,
        running=running,
        kv_usage=None if kv_usage is None or kv_usage > 1.001 else min(1.0, kv_usage),
        block_size=int(block_size or 0) or None,
        num_blocks=int(num_blocks or 0) or None,
        adapters=None if engine.adapters is None else found.adapters(engine.adapters),
        generated=generated,
    )


def start_time(page: bytes) -> float | None:
    """When the server's process began, in Unix seconds, where its page tells."""
    samples = _Page(page).samples(b"process_start_time_seconds")
    return samples[0].number if samples else None


class _Page:
    """A metrics page, searched rather than read."""

    def __init__(self, page: bytes) -> None:
        self._page = page
        self._at = 0  # where the last search ended, at the beginning of a line
        self._families: dict[bytes, list[_Sample]] = {}

    def total(self, metrics: tuple[_Metric, ...], most: float = MAX_COUNT) -> float | None:
        numbers = self._numbers(metrics, most)
        return sum(numbers) if numbers else None

    def mean(self, metrics: tuple[_Metric, ...]) -> float | None:
        numbers = self._numbers(metrics)
        return sum(numbers) / len(numbers) if numbers else None

    def greatest(self, metrics: tuple[_Metric, ...]) -> float | None:
        return max(self._numbers(metrics), default=None)

    def adapters(self, name: bytes) -> Adapters | None:
        """The newest series of a metric whose value is the time at which its labels were true."""
        newest, series = -1.0, b""
        for sample in self.samples(name):
            if sample.number is not None and sample.number >= newest:
                newest, series = sample.number, sample.series
        if newest < 0:
            return None
        labels = _labels(series).values
        return Adapters(
            running=_names(labels.get(b"running_lora_adapters", b"")),
            waiting=_names(labels.get(b"waiting_lora_adapters", b"")),
            limit=int(min(_number(labels.get(b"max_lora", b"")) or 0, MAX_COUNT)),
        )

    def _numbers(self, metrics: tuple[_Metric, ...], most: float = MAX_COUNT) -> list[float]:
        """A number for each engine of the pod, from the first metric that has any."""
        for metric in metrics:
            where, label = metric.where, metric.label
            by_engine: dict[frozenset[tuple[bytes, bytes]], float] = {}
            for sample in self.samples(metric.name):
                labels, number = _labels(sample.series), sample.number
                if any(labels.values.get(name) != value for name, value in where):
                    continue
                if label is not None:
                    number = _number(labels.values.get(label, b""))
                if number is not None and number <= most:
                    engine = labels.engine
                    by_engine[engine] = max(number, by_engine.get(engine, number))
            if by_engine:
                return list(by_engine.values())
        return []

    def samples(self, name: bytes) -> list[_Sample]:
        """The series of a metric. They follow one another: the format demands it."""
        known = self._families.get(name)
        if known is not None:
            return known
        page, family = self._page, list[_Sample]()
        self._families[name] = family
        at = self._first(name)
        while at >= 0 and page.startswith(name, at):
            end = page.find(b"\n", at)
            end = len(page) if end < 0 else end
            found = _SAMPLE.match(page, at + len(name), end)
            if found is None:
                break
            family.append(_Sample(found[1] or b"", _number(found[2])))
            at = self._at = end + 1
            if len(family) > MAX_SERIES:
                family.clear()
                break
        return family

    def _first(self, name: bytes) -> int:
        """Where a metric's first series is, or -1: at the beginning of a line, not in a comment,
        nor in a label, nor in a longer name."""
        page = self._page
        if page.startswith(name) and page[len(name) : len(name) + 1] in _AFTER_NAME:
            return 0
        line, start = b"\n" + name, max(0, self._at - 1)
        for begin, end in ((start, len(page)), (0, start + len(line))):
            at = page.find(line, begin, end)
            while at >= 0:
                if page[at + len(line) : at + len(line) + 1] in _AFTER_NAME:
                    return at + 1
                at = page.find(line, at + len(line), end)
        return -1


_AFTER_NAME = (b"{", b" ", b"\t")


class _Sample(NamedTuple):
    series: bytes  # its labels, as they stand on the page
    number: float | None


class _Labels:
    """The labels of a series."""

    __slots__ = ("engine", "values")

    def __init__(self, series: bytes) -> None:
        self.values: dict[bytes, bytes] = dict(_LABEL.findall(series))
        own = (label for label in self.values.items() if label[0] not in _SHARED)
        self.engine = frozenset(own)  # the engine of the pod that it is of


_kept_labels = lru_cache(maxsize=2048)(_Labels)  # they are the same at the next scrape


def _labels(series: bytes) -> _Labels:
    return _kept_labels(series) if len(series) <= MAX_KEPT_LABELS else _Labels(series)


def _number(text: bytes) -> float | None:
    """A number of 0 or more, or None for anything else."""
    if len(text) > MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if isfinite(number) else None


def _names(text: bytes) -> frozenset[str]:
    names = (name.strip() for name in text.split(b",", MAX_ADAPTERS)[:MAX_ADAPTERS])
    return frozenset(name.decode(errors="replace") for name in names if name)
