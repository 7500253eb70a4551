"""Quantities of Kubernetes and durations of Go."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.reference.quantity import MOST, duration, quantity

SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "m": Fraction(1, 1000),
}
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("4Gi", 4 << 30),
        ("10k", 10_000),
        ("1G", 10**9),
        ("1.5Gi", 3 << 29),
        ("500m", 1),  # rounded up
        ("0", 0),
        ("0.0", 0),
        ("-0", 0),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        (".5k", 500),
        ("5.", 5),
        ("+7", 7),
        (5000, 5000),
        (1.5, 2),
        (1e3, 1000),
        (str(MOST), MOST),
    ],
)
def test_quantities(written: object, value: int) -> None:
    assert quantity(written) == value


@pytest.mark.parametrize(
    "written",
    [
        *("", ".", "k", "4 Gi", "4gi", "4GiB", "1e", "1e3k", "--1", "1_000", "٣", "1e9999"),
        *("x" * 100, True, None, [], {}, float("nan"), float("inf"), "9" * 30),
    ],
)
def test_no_quantities(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a quantity|must be between"):
        quantity(written)


@pytest.mark.parametrize("written", ["-1", -1, "-4Gi", 1 << 63, "10E", "1e30"])
def test_quantities_out_of_range(written: object) -> None:
    with pytest.raises(ValueError, match=r"must be between 0|is not a quantity"):
        quantity(written)


@given(st.decimals(0, 10**6, allow_nan=False, places=4), st.sampled_from([*SUFFIXES]))
def test_a_quantity_is_its_number_times_its_suffix_rounded_up(number, suffix):
    assert quantity(f"{number:f}{suffix}") == ceil(Fraction(number) * SUFFIXES[suffix])


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([*UNITS])), min_size=1))
def test_a_duration_is_the_sum_of_its_spans(spans):
    text = "".join(f"{number}{unit}" for number, unit in spans)
    if len(text) <= 200:
        assert duration(text) == pytest.approx(sum(n * UNITS[unit] for n, unit in spans))


@pytest.mark.parametrize(
    ("written", "value"),
    [("200ms", 0.2), ("30s", 30), ("1m30s", 90), ("1.5h", 5400), ("0", 0), ("0s", 0), ("+1s", 1)],
)
def test_durations(written: str, value: float) -> None:
    assert duration(written) == pytest.approx(value)


@pytest.mark.parametrize("written", ["", "1", "s", "-1s", "1d", "1 s", "1s ", 30, None, True, []])
def test_no_durations(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a duration"):
        duration(written)


@given(st.text(alphabet="0123456789.eE+-kMGTPEimnu sh", max_size=40))
def test_any_text_is_a_number_or_an_error(text):
    for read in (quantity, duration):
        try:
            assert read(text) >= 0
        except ValueError as problem:
            assert "\n" not in str(problem)
