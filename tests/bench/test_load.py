"""Parsing of what wrk and h2load say."""

from __future__ import annotations

import json

import click
import numpy as np
import pytest

from bench.load import parse_h2load, parse_wrk

WRK = """\
Running 1s test @ http://127.0.0.1:33333/v1/chat/completions
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     6.94ms    4.60ms  37.55ms   79.84%
    Req/Sec     1.15k   123.25     1.30k    70.00%
  1144 requests in 1.02s, 0.99MB read
Requests/sec:   1125.40
Transfer/sec:      0.97MB
"""


def wrk(**figures: float) -> str:
    return WRK + json.dumps({"requests": 0, "seconds": 1.0, "failed": 0, "refused": 0} | figures)


def test_the_last_line_of_wrk_counts() -> None:
    found = parse_wrk(wrk(requests=1144, seconds=1.016529) + "\n")
    assert (found.requests, found.seconds) == (1144, 1.016529)


@pytest.mark.parametrize("trouble", [{"failed": 1}, {"refused": 3}, {"requests": 0}])
def test_a_run_with_failures_is_no_measurement(trouble: dict[str, float]) -> None:
    with pytest.raises(click.ClickException):
        parse_wrk(wrk(**({"requests": 100} | trouble)))


def h2load(*rows: tuple[int, int, int]) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def test_latencies_are_seconds_and_the_start_is_skipped() -> None:
    rows = [(1_000_000 + 5000 * i, 200, 100 + i) for i in range(101)]
    seconds = parse_h2load(h2load(*rows), skip=0.1).seconds
    assert np.allclose(np.sort(seconds), np.arange(110, 201) / 1e6)


def test_percentiles() -> None:
    found = parse_h2load(h2load(*((i, 200, 1000 * i) for i in range(1, 102))), skip=0.0)
    assert found.percentile(50) == pytest.approx(0.051)
    assert found.percentile(99) == pytest.approx(0.100)


@pytest.mark.parametrize("log", ["", h2load((1, 200, 5), (2, 503, 5)), h2load((1, -1, 5))])
def test_failed_requests_are_not_timed(log: str) -> None:
    with pytest.raises(click.ClickException):
        parse_h2load(log)
