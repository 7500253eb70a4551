"""Figures of bench.picker, from known costs."""

from __future__ import annotations

import numpy as np
import pytest

from bench import hotspots
from bench.backends import busy_pages, idle_pages, metrics_page
from bench.load import Latency
from bench.picker import SIZES, Cost, growth_figures, latency_figures, request_figures
from picker.engines import ENGINES, LoadReport, parse

PLAIN = Cost(requests=1000, seconds=1.0, envoy=0.1, picker=0.0, scraping=0.0)
LEAN = Cost(requests=1000, seconds=1.0, envoy=0.2, picker=0.15, scraping=0.05)


def costs(large: Cost = LEAN) -> dict[tuple[str, str], list[Cost]]:
    found = {("plain", size): [PLAIN] for size in SIZES} | {("lean", s): [LEAN] for s in SIZES}
    return found | {("lean", "1 MB"): [large]}


def test_costs_of_a_request() -> None:
    figures = request_figures(costs(), ["plain", "lean"])["8 KB"]["lean"]
    medians = {name: spread["median"] for name, spread in figures.items()}
    assert medians == pytest.approx(
        {
            "envoy_us": 200.0,
            "picker_us": 100.0,
            "picker_us_with_scraping": 150.0,
            "picker_to_envoy": 0.5,
            "times_plain": 3.0,
            "requests_per_picker_core": 10_000,
            "requests_per_second": 1000,
        }
    )


def test_round_robin_alone_has_no_picker() -> None:
    figures = request_figures(costs(), ["plain", "lean"])["8 KB"]["plain"]
    assert figures.keys() == {"envoy_us", "requests_per_second"}
    assert figures["envoy_us"]["median"] == 100.0


def test_growth_is_of_cpu_per_byte() -> None:
    linear = Cost(requests=1000, seconds=1.0, envoy=9.0, picker=0.1 * 128, scraping=0.0)
    assert growth_figures(costs(linear))["lean"]["median"] == pytest.approx(1.0)


def test_added_latency_is_a_difference_within_a_round() -> None:
    milliseconds = np.arange(1, 102) / 1e3
    found = latency_figures(
        {
            "plain": [Latency(milliseconds), Latency(milliseconds + 1)],
            "lean": [Latency(milliseconds + 0.002), Latency(milliseconds + 1.002)],
        }
    )
    assert found["lean"]["added_p50_ms"] == {"min": 2.0, "median": 2.0, "max": 2.0}
    assert found["lean"]["added_p99_ms"]["max"] == 2.0


def read(page: str) -> LoadReport:
    return parse(page.encode(), ENGINES["vllm"])


def test_pages_of_pods_tell_their_load() -> None:
    page = metrics_page(running=3, waiting=2, kv_usage=0.25)
    report = read(page)
    assert (report.running, report.waiting, report.kv_usage) == (3, 2, 0.25)
    assert all(read(page).running > 0 for page in busy_pages(20))
    assert {read(page).running for page in idle_pages(2)} == {0}


RUN = "run (/venv/lib/python3.11/asyncio/runners.py:118)"
KEYS = "keys (/venv/lib/python3.11/site-packages/picker/prefix/blocks.py:31)"
STACKS = f"""\
{RUN};pick (/code/picker/director.py:105) 20
{RUN};pick (/code/picker/director.py:109);{KEYS} 70
{RUN} 9
rare (/code/x.py:1) 1
"""


def test_time_by_function() -> None:
    rows = hotspots.by_function(STACKS, least=0.05)
    assert [tuple(row.values()) for row in rows] == [
        ("picker/prefix/blocks.py keys", 70.0, 70.0),
        ("/code/picker/director.py pick", 20.0, 90.0),
        ("asyncio/runners.py run", 9.0, 99.0),
    ]
