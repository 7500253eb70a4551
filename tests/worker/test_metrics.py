"""The /metrics page against vLLM's own, and its numbers against what happened."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from worker.config import EngineConfig
from worker.events import Publisher
from worker.metrics import (
    CONTENT_TYPE,
    LATENCY,
    MAX_HANDLERS,
    PER_TOKEN,
    STEP_TOKENS,
    TTFT,
    Histogram,
    Metrics,
)
from worker.sequence import FinishReason, SamplingParams, Sequence

VLLM_PAGE = (Path(__file__).parents[1] / "data" / "vllm_metrics.txt").read_text()
CONFIG = EngineConfig(num_blocks=96, block_size=32, max_model_len=1024)

# What vLLM's page has and this one has not, and why.
NOT_OURS = {
    "vllm:estimated_flops_per_gpu": "nothing here counts them, and 0 would be false",
    "vllm:estimated_read_bytes_per_gpu": "the same",
    "vllm:estimated_write_bytes_per_gpu": "the same",
    "http_request_size_bytes": "the HTTP server does not count bytes",
    "http_response_size_bytes": "the same",
    "http_request_duration_highr_seconds": "the histogram by handler has the same observations",
}
# Labels of vllm:cache_config_info here; vLLM writes its whole CacheConfig.
CACHE_CONFIG = {
    "block_size": "32",
    "cache_dtype": "float32",
    "enable_prefix_caching": "True",
    "engine": "0",
    "kv_cache_max_concurrency": "3.0",
    "kv_cache_size_tokens": "3072",
    "num_gpu_blocks": "96",
}
# Queried by the Grafana dashboards in vLLM's repository, now or in earlier versions.
DASHBOARDS = {
    "http_requests_total",
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
}


def make(model: str = "tiny", config: EngineConfig = CONFIG) -> Metrics:
    return Metrics(model, config, "float32")


def parse(page: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def page_of(metrics: Metrics) -> dict[str, Metric]:
    return parse(metrics.render().decode())


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one sample of that name which has these labels."""
    found = [
        sample.value
        for family in page_of(metrics).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def histogram(metrics: Metrics, name: str) -> tuple[float, float]:
    """Its count and sum."""
    return value(metrics, f"vllm:{name}_count"), value(metrics, f"vllm:{name}_sum")


def values_of(family: Metric, free: Iterable[str]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Each series, as its name and labels; the values of `free` labels are left out."""
    return {
        (
            sample.name,
            frozenset((k, "" if k in free else v) for k, v in sample.labels.items()),
        )
        for sample in family.samples
    }


def finished_sequence(reason: FinishReason = "length", **fields: Any) -> Sequence:
    """100 prompt tokens of which 32 were cached, 5 tokens generated."""
    sequence = Sequence(1, [7] * 100, SamplingParams(max_tokens=5), arrival=1000.0)
    sequence.token_ids += [8] * 5
    sequence.num_cached_tokens = 32
    sequence.num_preemptions = 2
    sequence.admitted_at = 1001.0
    sequence.first_token_at = 1003.0
    sequence.last_token_at = 1009.0
    for name, content in fields.items():
        setattr(sequence, name, content)
    return sequence


# Against vLLM's page

VLLM = parse(VLLM_PAGE)
IDLE_PAGE = make().render().decode()
IDLE = parse(IDLE_PAGE)


@pytest.mark.parametrize("name", [name for name in VLLM if name.startswith("vllm:")])
def test_every_vllm_series_is_there(name: str) -> None:
    theirs, ours = VLLM[name], IDLE
    if name.removesuffix("_created") in NOT_OURS:
        assert name not in ours
        return
    assert ours[name].type == theirs.type
    if name == "vllm:cache_config_info":
        assert ours[name].samples[0].labels == CACHE_CONFIG
        assert CACHE_CONFIG.keys() <= theirs.samples[0].labels.keys()
        assert ours[name].samples[0].value == 1
        return
    free = {"model_name"}
    assert values_of(ours[name], free) == values_of(theirs, free)


@pytest.mark.parametrize("name", ["http_requests", "http_request_duration_seconds"])
def test_http_series_are_vllms(name: str) -> None:
    metrics = make()
    for sample in VLLM["http_requests"].samples:
        labels = sample.labels
        metrics.http(labels["handler"], labels["method"], int(labels["status"][0]) * 100, 0.01)
    for suffix in ("", "_created"):
        theirs, ours = VLLM[name + suffix], page_of(metrics)[name + suffix]
        assert ours.type == theirs.type
        assert values_of(ours, ()) == values_of(theirs, ())


def test_raw_lines_are_vllms() -> None:
    """The parser forgives what others do not: a counter without _total, say."""

    def names(page: str) -> set[str]:
        lines = page.replace("{", " ").splitlines()
        return {" ".join(line.split()[2:]) for line in lines if line.startswith("# TYPE vllm:")} | {
            line.split()[0] for line in lines if line.startswith("vllm:")
        }

    missing = names(VLLM_PAGE) - names(IDLE_PAGE)
    assert all("vllm:estimated_" in name for name in missing)
    assert len(missing) == 3 * 4  # names and types of _total and _created


def test_exceptions_are_real() -> None:
    assert NOT_OURS.keys() <= VLLM.keys()
    assert not NOT_OURS.keys() & IDLE.keys()


def test_idle_page_has_every_series_at_zero() -> None:
    not_zero = {
        (sample.name, sample.value)
        for name, family in IDLE.items()
        for sample in family.samples
        if name.startswith("vllm:") and not name.endswith("_created") and sample.value
    }
    assert not_zero == {("vllm:cache_config_info", 1), ("vllm:engine_sleep_state", 1)}
    assert value(make(), "vllm:engine_sleep_state", sleep_state="awake") == 1


def test_http_series_come_with_the_first_request() -> None:
    assert IDLE["http_requests"].samples == []
    assert "http_requests_created" not in IDLE


def test_dashboards_find_what_they_query() -> None:
    metrics = make()
    metrics.http("/v1/models", "GET", 200, 0.001)
    names = {sample.name for family in page_of(metrics).values() for sample in family.samples}
    assert names >= DASHBOARDS
    assert {"python_info", "vllm:gpu_prefix_cache_hits_total"} <= names


def test_content_type_is_the_text_format() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_token_buckets_end_at_the_model_length() -> None:
    metrics = make(config=EngineConfig(num_blocks=10_000, max_model_len=20_000))
    buckets = page_of(metrics)["vllm:request_prompt_tokens"].samples
    assert [sample.labels["le"] for sample in buckets if "le" in sample.labels][-3:] == [
        "10000.0",
        "20000.0",
        "+Inf",
    ]


# Numbers


def test_gauges_follow_the_last_step() -> None:
    metrics = make()
    metrics.step(running=3, waiting=2, usage=0.5, num_tokens=100)
    metrics.step(running=16, waiting=8, usage=0.75, num_tokens=20)
    metrics.step(running=4, waiting=7, usage=0.25, num_tokens=0)
    assert value(metrics, "vllm:num_requests_running") == 4
    assert value(metrics, "vllm:num_requests_waiting") == 7
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 7
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:gpu_cache_usage_perc") == 0.25
    assert histogram(metrics, "iteration_tokens_total") == (2, 120)


def test_tokens() -> None:
    metrics = make()
    metrics.tokens(3, [0.25, 0.5])
    metrics.tokens(0, [])
    metrics.tokens(1, [2.0])
    assert value(metrics, "vllm:generation_tokens_total") == 4
    assert histogram(metrics, "inter_token_latency_seconds") == (3, 2.75)
    assert histogram(metrics, "time_per_output_token_seconds") == (3, 2.75)
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.3") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.5") == 2


def test_admissions() -> None:
    metrics = make()
    metrics.admitted(0.25, 100, 32)
    metrics.admitted(0.5, 10, 0)
    assert histogram(metrics, "request_queue_time_seconds") == (2, 0.75)
    assert value(metrics, "vllm:prompt_tokens_total") == 110
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 32
    by_source = "vllm:prompt_tokens_by_source_total"
    assert value(metrics, by_source, source="local_compute") == 78
    assert value(metrics, by_source, source="local_cache_hit") == 32
    assert value(metrics, by_source, source="external_kv_transfer") == 0
    by_tier = "vllm:prompt_tokens_cached_by_source_total"
    assert value(metrics, by_tier, source="device") == 32
    assert value(metrics, by_tier, source="host") == 0
    for prefix in ("", "gpu_"):
        assert value(metrics, f"vllm:{prefix}prefix_cache_queries_total") == 110
        assert value(metrics, f"vllm:{prefix}prefix_cache_hits_total") == 32


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    config = EngineConfig(
        num_blocks=96, block_size=32, max_model_len=1024, enable_prefix_caching=False
    )
    metrics = make(config=config)
    metrics.admitted(0.25, 100, 0)
    assert value(metrics, "vllm:prompt_tokens_total") == 100
    assert value(metrics, "vllm:prefix_cache_queries_total") == 0
    labels = page_of(metrics)["vllm:cache_config_info"].samples[0].labels
    assert labels["enable_prefix_caching"] == "False"


def test_first_tokens_and_preemptions() -> None:
    metrics = make()
    metrics.first_token(0.25)
    metrics.first_token(3.0)
    metrics.preempted()
    metrics.preempted()
    assert histogram(metrics, "time_to_first_token_seconds") == (2, 3.25)
    assert value(metrics, "vllm:num_preemptions_total") == 2


def test_finished_request_is_measured() -> None:
    metrics = make()
    metrics.finished(finished_sequence(), "length", now=1010.0)
    expected = {
        "request_prompt_tokens": 100,
        "request_generation_tokens": 5,
        "request_max_num_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 68,
        "request_params_n": 1,
        "request_params_max_tokens": 5,
        "request_num_preemptions": 2,
        "e2e_request_latency_seconds": 10.0,
        "request_inference_time_seconds": 8.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 6.0,
        "request_time_per_output_token_seconds": 1.5,
    }
    assert {name: histogram(metrics, name) for name in expected} == {
        name: (1, total) for name, total in expected.items()
    }
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 0
    assert histogram(metrics, "request_queue_time_seconds") == (0, 0)  # that was at admission


def test_single_token_has_no_time_between_tokens() -> None:
    metrics = make()
    sequence = finished_sequence(token_ids=[7] * 101, last_token_at=1003.0)
    metrics.finished(sequence, "stop", now=1003.0)
    assert histogram(metrics, "request_time_per_output_token_seconds") == (1, 0)
    assert histogram(metrics, "request_decode_time_seconds") == (1, 0)
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1


@pytest.mark.parametrize(
    ("reason", "sequence"),
    [
        ("abort", finished_sequence()),
        ("error", finished_sequence()),
        ("abort", Sequence(1, [7] * 9, SamplingParams(max_tokens=5), arrival=1000.0)),
        ("stop", Sequence(1, [7] * 9, SamplingParams(max_tokens=5), arrival=1000.0)),
        ("error", Sequence(1, [], SamplingParams(max_tokens=5))),
    ],
)
def test_request_cut_short_is_counted_not_measured(
    reason: FinishReason, sequence: Sequence
) -> None:
    metrics = make()
    metrics.finished(sequence, reason, now=1010.0)
    assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 1
    observed = {
        sample.name
        for name, family in page_of(metrics).items()
        if name.startswith("vllm:") and family.type == "histogram"
        for sample in family.samples
        if sample.value
    }
    assert observed == set()


def test_rejections() -> None:
    metrics = make()
    metrics.rejected("max_num_queued_reqs")
    metrics.rejected("max_num_queued_reqs")
    name = "vllm:admission_rejections_total"
    assert value(metrics, name, reason="max_num_queued_reqs") == 2
    assert value(metrics, name, reason="max_num_queued_tokens") == 0


def test_http() -> None:
    metrics = make()
    metrics.http("/v1/completions", "POST", 200, 0.25)
    metrics.http("/v1/completions", "POST", 204, 0.75)
    metrics.http("/v1/completions", "POST", 503, 2.0)
    completions = {"handler": "/v1/completions", "method": "POST"}
    assert value(metrics, "http_requests_total", status="2xx", **completions) == 2
    assert value(metrics, "http_requests_total", status="5xx", **completions) == 1
    name = "http_request_duration_seconds"
    assert value(metrics, f"{name}_count", **completions) == 3
    assert value(metrics, f"{name}_sum", **completions) == 3.0
    assert value(metrics, f"{name}_bucket", le="0.5", **completions) == 1


def test_hostile_paths_and_methods_cannot_grow_the_page() -> None:
    metrics = make()
    for i in range(1000):
        metrics.http(f"/{i}", f"M{i}", 404, 0.01)
    labels = [sample.labels for sample in page_of(metrics)["http_requests"].samples]
    assert len(labels) == MAX_HANDLERS
    assert {label["method"] for label in labels} == {"other"}
    assert value(metrics, "http_requests_total", handler="none") == 1000 - (MAX_HANDLERS - 1)


def test_publisher_counters() -> None:
    metrics = make()
    assert not any(name.startswith("warmpath:") for name in page_of(metrics))
    publisher = SimpleNamespace(published=0, dropped_batches=0, dropped_sends=0)
    metrics.attach_publisher(cast(Publisher, publisher))
    publisher.published, publisher.dropped_batches, publisher.dropped_sends = 7, 3, 2
    assert value(metrics, "warmpath:kv_events_published_total") == 7
    dropped = "warmpath:kv_events_dropped_total"
    assert value(metrics, dropped, reason="queue") == 3
    assert value(metrics, dropped, reason="slow_subscriber") == 2


# The page


@given(st.text(max_size=20))
@example('"} 1\nvllm:num_requests_running 7\n')
@example(r"back\slash\n")
@example("\udcff")  # a byte that is not UTF-8, from the command line
def test_any_model_name_is_escaped(model: str) -> None:
    readable = model.encode(errors="replace").decode()
    page = make(model).render().decode()
    of_gauge = [line for line in page.split("\n") if "vllm:num_requests_running" in line]
    of_histogram = page[page.index("# HELP vllm:request_params_n ") :]
    for part in ("\n".join(of_gauge), of_histogram[: of_histogram.index("_created")]):
        for family in parse(part + "\n").values():
            for sample in family.samples:
                assert sample.labels["model_name"] == readable
    assert page.count("\n") == IDLE_PAGE.count("\n")


def test_process_metrics_are_read_again_only_when_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    pages = iter([b"# first\n", b"# second\n"])
    monkeypatch.setattr("worker.metrics.time", clock)
    monkeypatch.setattr("worker.metrics.generate_latest", lambda _: next(pages))
    metrics = make()
    assert metrics.render().startswith(b"# first\n")
    now[0] += 0.9
    assert metrics.render().startswith(b"# first\n")
    now[0] += 0.2
    assert metrics.render().startswith(b"# second\n")


# Histograms

BOUNDS = st.sampled_from([TTFT, PER_TOKEN, LATENCY, STEP_TOKENS, (1.0,), ()])
FLOATS = st.floats(0, 1e6) | st.sampled_from([*TTFT, *PER_TOKEN, *LATENCY, *STEP_TOKENS])


@given(BOUNDS, st.lists(FLOATS | st.lists(FLOATS, max_size=40), max_size=20))
def test_histogram_against_a_naive_one(
    bounds: tuple[float, ...], observations: list[float | list[float]]
) -> None:
    ours = Histogram(bounds)
    everything: list[float] = []
    for one in observations:
        if isinstance(one, list):
            ours.observe_many(one)
            everything += one
        else:
            ours.observe(one)
            everything.append(one)
    written = parse("# TYPE h histogram\n" + "\n".join(ours.lines("h", 'a="b"')) + "\n")["h"]
    assert [(s.labels["le"], s.value) for s in written.samples if s.name == "h_bucket"] == [
        *((repr(bound), sum(x <= bound for x in everything)) for bound in bounds),
        ("+Inf", len(everything)),
    ]
    by_name = {s.name: s.value for s in written.samples}
    assert by_name["h_count"] == len(everything)
    assert by_name["h_sum"] == pytest.approx(sum(everything))
