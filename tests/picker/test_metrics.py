"""The metrics page: Prometheus reads it, its numbers are right, and its labels are bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from picker.config import Rewrite, RewriteTarget
from picker.director import Outcome, Pick
from picker.engines import LoadReport
from picker.exposition import Histogram, Spec, write
from picker.gauges import PoolGauges
from picker.metrics import PickerMetrics
from picker.refusal import Refusal
from picker.usage import Usage
from tests.picker.core import Core, completion

PODS = ["10.0.0.1:8000", "10.0.0.2:8000"]
LLAMA = {"model_name": "llama", "target_model_name": "llama"}
JSON = {"content-type": "application/json"}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(page: str) -> Samples:
    """Every sample of a page; one written twice is an error to Prometheus too."""
    samples: Samples = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def get(samples: Samples, metric: str, /, **labels: str) -> float | None:
    return samples.get((metric, tuple(sorted(labels.items()))))


def test_a_completed_request_is_measured() -> None:
    core = Core(PODS[:1])
    core.director.pick(completion([1] * 640)).end(Outcome.COMPLETED)
    pick = core.director.pick(completion([1] * 640))
    samples = read(core.page())
    assert get(samples, "inference_objective_running_requests", model_name="llama") == 1
    pick.response_started(200)
    pick.first_token(0.3)
    pick.end(Outcome.COMPLETED, Usage(640, 600, 11), after=1.3)
    samples = read(core.page())
    objective = "inference_objective_"
    assert get(samples, objective + "request_total", priority="0", **LLAMA) == 2
    assert get(samples, objective + "running_requests", model_name="llama") == 0
    assert get(samples, objective + "request_ttft_seconds_sum", **LLAMA) == 0.3
    assert get(samples, objective + "request_duration_seconds_count", **LLAMA) == 2
    assert get(samples, objective + "input_tokens_sum", **LLAMA) == 1280
    assert get(samples, objective + "output_tokens_sum", **LLAMA) == 11
    assert get(samples, objective + "prompt_cached_tokens_sum", **LLAMA) == 600
    per_token = get(samples, objective + "request_tpot_seconds_sum", **LLAMA)
    assert per_token == pytest.approx(0.1)
    normalized = get(samples, objective + "normalized_time_per_output_token_seconds_sum", **LLAMA)
    assert normalized == pytest.approx(1.3 / 11)
    pod = {"endpoint": PODS[0]}
    assert get(samples, "warmpath_picks_total", **pod) == 2
    assert get(samples, "warmpath_told_prompt_tokens_total", **pod) == 640
    assert get(samples, "warmpath_told_cached_tokens_total", **pod) == 600
    predicted = get(samples, "warmpath_predicted_cached_tokens_total", **pod)
    assert predicted is not None
    assert 0 < predicted <= 640
    hits = "inference_extension_prefix_indexer_hit_ratio"
    assert get(samples, hits + "_count") == 2
    assert get(samples, hits + "_sum") == pytest.approx(predicted / 640)
    assert get(samples, hits + "_bucket", le="0.0") == 1
    assert get(samples, "inference_extension_scheduler_e2e_duration_seconds_count") == 2


def test_cached_tokens_that_a_pod_does_not_tell_are_no_zero() -> None:
    core = Core(PODS[:1])
    core.director.pick(completion("Hello")).end(Outcome.COMPLETED, Usage(9, None, 4))
    samples = read(core.page())
    assert get(samples, "inference_objective_prompt_cached_tokens_count", **LLAMA) == 0
    assert get(samples, "inference_objective_output_tokens_count", **LLAMA) == 1
    assert get(samples, "warmpath_told_prompt_tokens_total", endpoint=PODS[0]) == 0


def test_failed_and_aborted_requests_are_only_counted() -> None:
    core = Core(PODS[:1])
    core.director.pick(completion("a")).end(Outcome.FAILED)
    core.director.pick(completion("a")).end(Outcome.ABORTED)
    samples = read(core.page())
    for outcome, count in (("failed", 1), ("aborted", 1), ("completed", None)):
        labels = {"endpoint": PODS[0], "outcome": outcome}
        assert get(samples, "warmpath_ended_requests_total", **labels) == count
    errors = "inference_objective_request_error_total"
    assert get(samples, errors, error_code="ModelServerError", **LLAMA) == 1
    assert get(samples, "inference_objective_request_duration_seconds_count", **LLAMA) == 0


def test_refusals_are_errors_too() -> None:
    metrics = PickerMetrics()
    metrics.refused(Refusal(503, "no_endpoints", "none"))
    metrics.refused(Refusal(503, "empty_subset", "none"))
    metrics.refused(Refusal(413, "too_large", "big"))
    samples = read("".join(metrics.page()))
    nobody = {"model_name": "", "target_model_name": ""}
    errors = "inference_objective_request_error_total"
    assert get(samples, errors, error_code="ServiceUnavailable", **nobody) == 2
    assert get(samples, "warmpath_refusals_total", reason="too_large", status="413") == 1


def test_a_rewritten_request_counts_for_both_names() -> None:
    core = Core(PODS[:1])
    body = b'{"model":"asked","prompt":"Hello"}'
    for target in ("first", "second", "asked"):
        targets = [RewriteTarget(model=target)]
        core.director.rewrites.update([Rewrite(models=["asked"], targets=targets)])
        for _ in range(2):
            pick = core.director.route("POST", "/v1/completions", JSON, body)
            assert isinstance(pick, Pick)
        pick.response_started(500)
        pick.end(Outcome.FAILED)
    samples = read(core.page())
    objective = "inference_objective_"
    for target in ("first", "second", "asked"):
        labels = {"model_name": "asked", "target_model_name": target}
        assert get(samples, objective + "request_total", priority="0", **labels) == 2
        error = {"error_code": "ModelServerError", **labels}
        assert get(samples, objective + "request_error_total", **error) == 1
    assert get(samples, objective + "running_requests", model_name="asked") == 3


def test_model_names_are_bounded_and_cannot_break_the_page() -> None:
    core = Core(PODS[:1], max_models=20)
    names = ['a"b\\c\nd', "é" * 256, *(f"m{number}" for number in range(100))]
    for name in names:
        core.director.pick(completion("a", model=name)).end(Outcome.COMPLETED)
    samples = read(core.page())
    totals = {
        dict(labels)["model_name"]: value
        for (name, labels), value in samples.items()
        if name == "inference_objective_request_total"
    }
    assert len(totals) == 21
    assert totals["other"] == len(names) - 20
    assert totals['a"b\\c\nd'] == totals["é" * 256] == totals["m17"] == 1
    assert "m18" not in totals
    core.director.pick(completion("a", model="m0"))
    assert 'running_requests{model_name="m0"} 1\n' in core.page()


def test_a_request_without_a_model_has_an_empty_label() -> None:
    core = Core(PODS[:1])
    request = completion("a")
    request.model = None
    core.director.pick(request)
    core.director.pick(completion("a", model=""))
    assert 'running_requests{model_name=""} 2\n' in core.page()


def test_a_pods_numbers_go_with_it() -> None:
    core = Core(PODS)
    picks = [core.director.pick(completion(f"{number}")) for number in range(4)]
    core.update(PODS[:1])
    for pick in picks:
        pick.end(Outcome.COMPLETED, Usage(1, 0, 1))
    assert PODS[0] in core.page()
    assert PODS[1] not in core.page()
    core.update(PODS)
    samples = read(core.page())
    assert get(samples, "warmpath_picks_total", endpoint=PODS[1]) == 0


def test_gauges_show_the_pool_as_it_is_now() -> None:
    core = Core(PODS)
    gauges = PoolGauges(core.pool, core.load, core.prefix)
    report = LoadReport(waiting=3, running=4, kv_usage=0.5)
    core.load.report(core.endpoint(PODS[0]), report, core.now)
    core.load.report(core.endpoint(PODS[1]), LoadReport(waiting=1), core.now)
    core.load.failed(core.endpoint(PODS[1]), "it is tired")
    core.now += 1.5
    core.director.pick(completion([1] * 640, subset=PODS[:1]))
    samples = read("".join(gauges.page()))
    pool, first, second = {"name": "test"}, {"endpoint": PODS[0]}, {"endpoint": PODS[1]}
    assert get(samples, "inference_pool_ready_pods", **pool) == 2
    assert get(samples, "inference_pool_average_queue_size", **pool) == 2.5
    assert get(samples, "inference_pool_average_running_requests", **pool) == 4
    assert get(samples, "inference_pool_average_kv_cache_utilization", **pool) == 0.5
    queue = "inference_pool_per_pod_queue_size"
    assert get(samples, queue, model_server_pod=PODS[0], **pool) == 4
    assert get(samples, "warmpath_pod_kv_usage_ratio", **first) == 0.5
    assert get(samples, "warmpath_pod_kv_usage_ratio", **second) is None
    assert get(samples, "warmpath_pod_inflight_requests", **first) == 1
    assert get(samples, "warmpath_pod_inflight_tokens", **first) == 640
    assert get(samples, "warmpath_pod_load_age_seconds", **first) == 1.5
    assert get(samples, "warmpath_pod_scrape_failing", **first) == 0
    assert get(samples, "warmpath_pod_scrape_failing", **second) == 1
    size = get(samples, "inference_extension_prefix_indexer_size")
    assert size == core.prefix.blocks > 0
    for address in PODS:
        core.load.asked(core.endpoint(address))
    core.now += 100
    samples = read("".join(gauges.page()))
    assert get(samples, "inference_pool_ready_pods", **pool) == 0
    assert get(samples, "warmpath_pod_fresh", **first) == 0
    assert get(samples, "inference_pool_average_queue_size", **pool) is None


def test_an_empty_pool_has_a_page() -> None:
    core = Core([])
    gauges = PoolGauges(core.pool, core.load, core.prefix)
    samples = read("".join(gauges.page()) + core.page())
    assert get(samples, "inference_pool_ready_pods", name="test") == 0


@given(st.lists(st.floats(-5, 20, allow_subnormal=False), max_size=50))
def test_a_histogram_counts_what_is_not_above_its_bounds(values: list[float]) -> None:
    histogram = Histogram("0 1 2.5 10")
    for value in values:
        histogram.observe(value)
    page = "".join(
        write(Spec("histogram", "h", ("a",), "Help.", "0 1 2.5 10"), [(("b",), histogram)])
    )
    samples = read(page)
    for bound in ("0.0", "1.0", "2.5", "10.0", "+Inf"):
        below = sum(value <= float(bound.replace("+Inf", "inf")) for value in values)
        assert get(samples, "h_bucket", a="b", le=bound) == below
    assert get(samples, "h_count", a="b") == len(values)
    total = get(samples, "h_sum", a="b")
    assert total is not None
    assert math.isclose(total, sum(values), abs_tol=1e-9)


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_label_is_read_back(text: str) -> None:
    page = "".join(write(Spec("gauge", "g", ("a",), "Help."), [((text,), 1.5)]))
    assert page.count("\n") == 3
    assert get(read(page), "g", a=text) == 1.5
