"""What is read of metrics pages: real ones, made-up ones against prometheus-client's parser, and
hostile ones."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from picker import config
from picker.engines import (
    ENGINES,
    MAX_SERIES,
    Engine,
    LoadReport,
    engine_of,
    engines_of,
    parse,
    start_time,
)
from scorers.pods import Adapters
from worker.config import EngineConfig
from worker.metrics import Metrics

DATA = Path(__file__).parents[1] / "data"
VLLM = ENGINES["vllm"]


def worker_page() -> bytes:
    metrics = Metrics("tiny", EngineConfig(num_blocks=96, block_size=32), "float32")
    metrics.step(running=3, waiting=5, usage=0.25, num_tokens=64)
    return metrics.render()


PAGES = {
    "vllm, busy": (DATA / "vllm_metrics.txt").read_bytes(),
    "vllm, idle, with HELP lines": (DATA / "vllm_metrics_idle.txt").read_bytes(),
    "our worker": worker_page(),
}


def told(page: bytes, name: str, **labels: str) -> list[float]:
    """The values of a metric with these labels, as prometheus-client reads them."""
    return [
        sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def label_of(page: bytes, name: str, label: str) -> str:
    (value,) = (
        sample.labels[label]
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == name
    )
    return value


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_real_pages_are_read_as_prometheus_client_reads_them(page: bytes) -> None:
    report = parse(page, VLLM)
    assert [report.waiting] == told(page, "vllm:num_requests_waiting")
    assert [report.running] == told(page, "vllm:num_requests_running")
    assert [report.generated] == told(page, "vllm:generation_tokens_total")
    assert [report.kv_usage] == told(page, "vllm:kv_cache_usage_perc")
    assert str(report.block_size) == label_of(page, "vllm:cache_config_info", "block_size")
    assert str(report.num_blocks) == label_of(page, "vllm:cache_config_info", "num_gpu_blocks")
    assert report.adapters is None


def test_the_busy_vllm_page() -> None:
    report = parse(PAGES["vllm, busy"], VLLM)
    assert report == LoadReport(8.0, 16.0, 0.8421052631578947, 32, 96, generated=1719.0)
    assert report.kv_tokens == 3072


def test_sglang() -> None:
    page = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="1",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="5",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.28
sglang:page_size{model_name="m"} 64
sglang:num_pages{model_name="m"} 1000
"""
    assert parse(page, ENGINES["sglang"]) == LoadReport(3.0, 4.0, 0.28, 64, 1000)
    info = b'sglang:cache_config_info{page_size="1",num_pages="777"} 1.0\n'
    report = parse(page + info, ENGINES["sglang"])
    assert (report.block_size, report.num_blocks) == (1, 777)


def test_tensorrt_llm() -> None:
    page = b"""\
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 2
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 7
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.5
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 4096
"""
    assert ENGINES["trtllm"].path == "/prometheus/metrics"
    assert parse(page, ENGINES["trtllm"]) == LoadReport(2.0, 7.0, 0.5, 32, 4096)


TRITON = """\
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 100
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="m",version="1"} 75
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 100
"""


def test_triton() -> None:
    fraction = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.3\n'
    report = parse((TRITON + fraction).encode(), ENGINES["triton"])
    assert report == LoadReport(1.0, 2.0, 0.3, 64, 100)


def test_older_triton_tells_used_blocks_only() -> None:
    assert parse(TRITON.encode(), ENGINES["triton"]).kv_usage == 0.25


@pytest.mark.parametrize(
    ("page", "usage"),
    [
        (b'vllm:gpu_cache_usage_perc{model_name="m"} 0.4\n', 0.4),
        (b'vllm:kv_cache_usage_perc{model_name="m"} 0.6\n', 0.6),
        (b"vllm:gpu_cache_usage_perc 0.4\nvllm:kv_cache_usage_perc 0.6\n", 0.6),
        (b"vllm:gpu_cache_usage_perc 0.4\nvllm:kv_cache_usage_perc NaN\n", 0.4),
    ],
)
def test_either_name_of_vllms_cache_usage_is_read_and_the_new_one_preferred(
    page: bytes, usage: float
) -> None:
    assert parse(page, VLLM).kv_usage == usage


def test_data_parallel_engines_of_one_pod() -> None:
    page = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 4
vllm:num_requests_waiting{model_name="m",engine="0"} 0
vllm:num_requests_waiting{model_name="m",engine="1"} 9
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1.0
vllm:cache_config_info{num_gpu_blocks="10",block_size="16",engine="0"} 1.0
vllm:cache_config_info{num_gpu_blocks="10",block_size="16",engine="1"} 1.0
"""
    assert parse(page, VLLM) == LoadReport(9.0, 7.0, pytest.approx(0.6), 16, 20)


def test_one_engine_that_tells_nothing_leaves_the_others() -> None:
    page = b'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_running{engine="1"} 4\n'
    assert parse(page, VLLM).running == 4.0


def lora(running: str, waiting: str, told_at: str, limit: str = "4") -> str:
    return (
        f'vllm:lora_requests_info{{max_lora="{limit}",running_lora_adapters="{running}",'
        f'waiting_lora_adapters="{waiting}"}} {told_at}\n'
    )


def test_the_newest_lora_series_is_the_one_that_is_true() -> None:
    page = (
        lora("old", "", "1.257894566e+09")
        + lora("sql, chat", "poem", "1.257894569e+09")
        + lora("older", "", "1.257894560e+09")
    )
    assert parse(page.encode(), VLLM).adapters == Adapters(
        frozenset({"sql", "chat"}), frozenset({"poem"}), 4
    )


def test_no_adapter_is_a_true_answer() -> None:
    page = lora("sql", "", "1.257894566e+09") + lora("", "", "1.257894570e+09", "2")
    assert parse(page.encode(), VLLM).adapters == Adapters(limit=2)


@pytest.mark.parametrize("limit", ["", "None", "-1", "1e30", "NaN"])
def test_a_broken_limit_of_adapters_is_harmless(limit: str) -> None:
    adapters = parse(lora("sql", "", "1.7e9", limit).encode(), VLLM).adapters
    assert adapters is not None
    assert adapters.running == {"sql"}


def test_values_that_are_no_count_are_as_good_as_absent() -> None:
    for value in ("NaN", "+Inf", "-Inf", "-1", "1e999", "1e300", "", "x", "1_0", "0x10", "7" * 50):
        page = f'vllm:num_requests_waiting{{engine="0"}} {value}\nvllm:num_requests_running 2\n'
        assert parse(page.encode(), VLLM) == LoadReport(running=2.0), value


@pytest.mark.parametrize("value", ["1.5", "50", "NaN", "-0.1"])
def test_a_usage_that_is_no_share_is_not_told(value: str) -> None:
    assert parse(f"vllm:kv_cache_usage_perc {value}\n".encode(), VLLM).kv_usage is None


def test_a_usage_a_trifle_above_one_is_one() -> None:
    assert parse(b"vllm:kv_cache_usage_perc 1.0000001\n", VLLM).kv_usage == 1.0


@pytest.mark.parametrize("size", ["None", "0", "-16", "0.5", "", "1e12"])
def test_a_block_size_that_is_none_is_not_told(size: str) -> None:
    page = f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="96"}} 1.0\n'
    report = parse(page.encode(), VLLM)
    assert (report.block_size, report.num_blocks, report.kv_tokens) == (None, 96, None)


@pytest.mark.parametrize(
    "line",
    [
        "# HELP vllm:num_requests_waiting 99",
        "# vllm:num_requests_waiting 99",
        "vllm:num_requests_waiting_by_reason 99",
        'vllm:num_requests_waiting_by_reason{reason="a"} 99',
        "vllm:num_requests_waiting2 99",
        "xvllm:num_requests_waiting 99",
        r'other{text="\nvllm:num_requests_waiting 99"} 1',
        'other{text="vllm:num_requests_waiting 99"} 1',
        r'other{text="\"} 1\nvllm:num_requests_waiting 99"} 1',
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting{",
        'vllm:num_requests_waiting{a="} 99',
        'vllm:num_requests_waiting{a="b" 99',
    ],
)
def test_a_name_that_is_not_the_metrics_own_line_does_not_fool_it(line: str) -> None:
    around = "vllm:num_requests_running 2\n"
    for page in (line, f"{line}\n", f"{around}{line}\n", f"{line}\n{around}"):
        assert parse(page.encode(), VLLM).waiting is None, page


def test_the_true_line_is_found_behind_and_before_lookalikes() -> None:
    lookalike = 'vllm:num_requests_waiting_by_reason{reason="x",engine="0"} 99\n'
    true = 'vllm:num_requests_waiting{engine="0"} 1\n'
    for page in (lookalike + true, true + lookalike, lookalike + true + lookalike):
        assert parse(page.encode(), VLLM).waiting == 1.0, page


@pytest.mark.parametrize(
    "label",
    [
        r'a="x,block_size=\"7\""',
        'a="x,block_size=",b="7"',
        r'a="\\",xblock_size="7"',
        'block_size_old="7"',
    ],
)
def test_a_label_inside_a_labels_value_does_not_fool_it(label: str) -> None:
    page = f'vllm:cache_config_info{{{label},num_gpu_blocks="9",block_size="16",z="}}"}} 1.0\n'
    assert parse(page.encode(), VLLM) == LoadReport(block_size=16, num_blocks=9)


@pytest.mark.parametrize(
    "page",
    [
        b"vllm:num_requests_running 2",
        b"vllm:num_requests_running 2\r\n",
        b"vllm:num_requests_running\t 2 1700000000000\n",
        b'vllm:num_requests_running {a = "b" , c="d",} 2\n',
        b"vllm:num_requests_running{} 2\n",
        b"vllm:num_requests_running +2.0e0\n",
        b"vllm:num_requests_waiting 1\nvllm:num_requests_running 2\n",
        b"vllm:kv_cache_usage_perc 0.5\n\n\nvllm:num_requests_running 2\n",
    ],
)
def test_spellings_that_the_format_allows(page: bytes) -> None:
    assert parse(page, VLLM).running == 2.0


def test_more_series_than_any_server_has_count_as_not_told() -> None:
    lines = [f'vllm:num_requests_waiting{{engine="{i}"}} 1\n' for i in range(MAX_SERIES + 1)]
    assert parse("".join(lines[:-1]).encode(), VLLM).waiting == MAX_SERIES
    assert parse("".join(lines).encode(), VLLM).waiting is None


@pytest.mark.parametrize(
    "page",
    [
        b"vllm:num_requests_waiting{" * 40_000,
        b"\nvllm:num_requests_waiting_" * 40_000,
        b'vllm:num_requests_waiting{a="' + b"\\" * 1_000_001,
        b"vllm:num_requests_waiting{" + b'a="b",' * 200_000,
        b"vllm:num_requests_waiting{" + b'"' * 1_000_000 + b"x",
        b"vllm:num_requests_waiting " + b"9" * 1_000_000,
        b"vllm:lora_requests_info" + b'{running_lora_adapters="' + b"a," * 500_000 + b'"} 1',
        bytes(range(256)) * 4000,
        b"",
    ],
    ids=range(9),
)
def test_huge_and_broken_pages_are_read_in_one_go(page: bytes) -> None:
    """A search that went back and forth would not end within the suite's patience."""
    report = parse(page, VLLM)
    assert report.waiting is None
    assert report.adapters is None or len(report.adapters.running) <= 1024


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_without_an_error(noise: bytes) -> None:
    for engine in ENGINES.values():
        parse(noise, engine)
        for metric in engine.waiting + engine.block_size:
            parse(b"\n" + metric.name + noise, engine)
            parse(metric.name + b'{a="' + noise + b'"} 1', engine)


LABEL_NAMES = st.sampled_from(["model_name", "engine", "a", "reason"])
LABELS = st.dictionaries(LABEL_NAMES, st.text(max_size=8), max_size=3)
NAMES = st.sampled_from(
    [
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_waiting_by_reason",
        "vllm:num",
        "other",
    ]
)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@given(
    st.dictionaries(
        NAMES,
        st.lists(st.tuples(LABELS, st.floats(0, 1)), min_size=1, max_size=4),
    ),
    st.booleans(),
)
@settings(deadline=None)
def test_made_up_pages_are_read_as_prometheus_client_reads_them(
    families: dict[str, list[tuple[dict[str, str], float]]], comments: bool
) -> None:
    """Labels of any text, in any order; families in any order."""
    lines: list[str] = []
    for name, series in families.items():
        if comments:
            lines += [f"# HELP {name} Text with {name} 7", f"# TYPE {name} gauge"]
        for labels, value in series:
            inside = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}")
    page = "\n".join(lines) + "\n"
    report = parse(page.encode(), VLLM)
    # Oracle: the greatest of each set of labels.
    greatest: dict[str, dict[frozenset[tuple[str, str]], float]] = defaultdict(dict)
    for name, series in families.items():
        for labels, value in series:
            key = frozenset(labels.items())
            greatest[name][key] = max(value, greatest[name].get(key, 0.0))
    for name in families:
        values = sorted(v for _, v in families[name])
        assert sorted(told(page.encode(), name)) == values  # the page says what it should
    for name, got in (
        ("vllm:num_requests_waiting", report.waiting),
        ("vllm:num_requests_running", report.running),
    ):
        expected = sum(greatest[name].values()) if name in greatest else None
        assert got == (None if expected is None else pytest.approx(expected))
    usage = list(greatest["vllm:kv_cache_usage_perc"].values())
    expected_usage = pytest.approx(sum(usage) / len(usage)) if usage else None
    assert report.kv_usage == expected_usage


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({}, "vllm"),
        ({"inference.networking.k8s.io/engine-type": "sglang"}, "sglang"),
        ({"llm-d.ai/engine-type": "trtllm-serve"}, "trtllm"),
        ({"inference.networking.k8s.io/engine-type": "triton-tensorrt-llm"}, "triton"),
        ({"inference.networking.k8s.io/engine-type": "abacus"}, "vllm"),
        ({"role": "sglang"}, "vllm"),
    ],
)
def test_a_pods_label_says_its_engine(labels: dict[str, str], name: str) -> None:
    assert engine_of(labels, "vllm", set()) is ENGINES[name]


def test_an_unknown_engine_is_named(caplog: pytest.LogCaptureFixture) -> None:
    engine_of({"llm-d.ai/engine-type": "abacus"}, "vllm", set())
    assert "'abacus'" in caplog.text


def test_when_the_process_began() -> None:
    page = (DATA / "vllm_metrics_idle.txt").read_bytes()
    assert start_time(page) == 1.79595036611e09
    assert start_time(b"vllm:num_requests_running 0\n") is None
    assert start_time(b"process_start_time_seconds soon\n") is None


def test_a_server_may_have_generated_more_tokens_than_it_can_have_blocks() -> None:
    name = b"vllm:generation_tokens_total"
    page = name + b'{engine="0"} 5e9\n' + name + b'{engine="1"} 6e9'
    assert parse(page, VLLM).generated == 11e9
    assert parse(b"vllm:generation_tokens_total 1e30", VLLM).generated is None


class TestSetEngines:
    PAGE = (
        b'mine_requests{state="queued",model="a"} 3\n'
        b'mine_requests{state="running",model="a"} 2\n'
        b"mine_kv 0.25\n"
        b'mine_info{block_size="16",num_gpu_blocks="100"} 1\n'
    )

    def engine(self, **told: str) -> Engine:
        settings = config.Metrics(engines={"mine": config.EngineMetrics(**told)})
        return engine_of({"kind": "mine"}, "vllm", set(), engines_of(settings), ("kind",))

    def test_metrics_are_found_by_name_and_labels_with_quotes_or_without(self):
        engine = self.engine(
            waiting='mine_requests{state="queued", model=a}',
            running="mine_requests{state=running}",
            kv_usage=" mine_kv ",
            cache_info="mine_info",
        )
        report = parse(self.PAGE, engine)
        assert (report.waiting, report.running, report.kv_usage) == (3, 2, 0.25)
        assert report.kv_tokens == 1600

    def test_what_is_not_named_is_not_told(self):
        report = parse(self.PAGE, self.engine(running="mine_requests{state=running}"))
        assert (report.waiting, report.running, report.kv_usage) == (None, 2, None)

    def test_ours_can_be_replaced(self):
        settings = config.Metrics(engines={"vllm": config.EngineMetrics(waiting="mine_kv")})
        assert parse(self.PAGE, engine_of({}, "vllm", set(), engines_of(settings))).waiting == 0.25

    @pytest.mark.parametrize("told", ["a b", "a{", "a{b}", "{a=b}", "1a", "a{b='c'}x", "a" * 500])
    def test_what_is_no_metric_is_refused(self, told):
        with pytest.raises(ValueError, match=r"metrics\.engines\.mine: .* is no metric"):
            self.engine(waiting=told)
