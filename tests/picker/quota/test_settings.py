"""Stores' URLs, the section of warmpath.yaml, and how quantities and names are written."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker import config
from picker.config import Quota
from picker.document import ConfigError
from picker.quota.model import MAX_AMOUNT, QuotaError, quantity, shown_quantity, split
from picker.quota.stores import check_settings, open_store
from picker.quota.windows import Calendar


async def test_a_store_is_opened_by_its_url(tmp_path: Path) -> None:
    for url in ("memory:", f"sqlite://{tmp_path}/a.db", "redis://127.0.0.1:1/0?name=pool"):
        store = open_store(url)
        await store.close()
    assert (tmp_path / "a.db").exists()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "quota.db",
        "sqlite:",
        "sqlite://host/x",
    ],
)
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(QuotaError, match="no store"):
        open_store(url)
    with pytest.raises(QuotaError, match=r"quota\.store"):
        check_settings(Quota(store=url))


def test_settings_are_read_and_checked() -> None:
    text = """
quota:
  enabled: true
  store: redis://redis:6379/0
  onFailure: closed
  replicas: 3
  zone: Europe/Berlin
  reservationTtl: 30m
  cachedCost: 0.1
  leases: {enabled: true, period: 500ms, share: 0.02}
"""
    settings = config.parse(text, check=lambda found: check_settings(found.quota)).quota
    assert (settings.replicas, settings.reservation_ttl, settings.cached_cost) == (3, 1800, 0.1)
    assert settings.leases.period == 0.5


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("quota: {zone: Mars}", "quota.zone"),
        ("quota: {store: nowhere}", "quota.store"),
        ("quota: {cachedCost: 2}", "quota.cachedCost"),
        ("quota: {leases: {share: 0.9}}", "quota.leases.share"),
        ("quota: {onFailure: maybe}", "quota.onFailure"),
        ("quota: {timeout: 1h}", "quota.timeout"),
    ],
)
def test_a_wrong_setting_is_named(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=place) as told:
        config.parse(text, check=lambda found: check_settings(found.quota))
    assert str(told.value).count(place) == 1


@given(st.integers(0, MAX_AMOUNT))
def test_quantities_are_read_as_they_are_shown(amount: int) -> None:
    assert quantity(shown_quantity(amount)) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [("10k", 10_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9), ("0.25k", 250), ("7", 7)],
)
def test_quantities_have_suffixes(text: str, amount: int) -> None:
    assert quantity(text) == amount
    assert shown_quantity(1_500_000) == "1.5M"


@pytest.mark.parametrize("text", ["", "k", "-5", "1e3", "1.5", "1..5k", "5kk", "0x10", "9" * 17])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(QuotaError):
        quantity(text)


def test_names_may_hold_slashes_but_nothing_that_does_not_print() -> None:
    assert split("model/org/name-1.5") == ("model", "org/name-1.5")
    assert split("tenant/Ånna Müller") == ("tenant", "Ånna Müller")
    for name in ("tenant/a\tb", "tenant/ a", "tenant/", "tenant", "tenant/" + "x" * 201, "org\n/a"):
        with pytest.raises(QuotaError):
            split(name)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("window", "zone", "now", "start", "end"),
    [
        ("day", "UTC", "2026-02-28T23:59:59", "2026-02-28T00:00", "2026-03-01T00:00"),
        ("month", "UTC", "2026-02-28T23:59:59", "2026-02-01T00:00", "2026-03-01T00:00"),
        ("month", "UTC", "2026-12-31T00:00", "2026-12-01T00:00", "2027-01-01T00:00"),
        # Clocks go forward: 23 hours; and back: 25.
        ("day", "Europe/Berlin", "2026-03-29T12:00", "2026-03-28T23:00", "2026-03-29T22:00"),
        ("day", "Europe/Berlin", "2026-10-25T12:00", "2026-10-24T22:00", "2026-10-25T23:00"),
        ("month", "America/New_York", "2026-03-15T00:00", "2026-03-01T05:00", "2026-04-01T04:00"),
        # Midnight itself is left out, or comes twice.
        ("day", "Africa/Cairo", "2026-04-24T12:00", "2026-04-23T22:00", "2026-04-24T21:00"),
        ("day", "America/Havana", "2026-11-01T12:00", "2026-11-01T04:00", "2026-11-02T05:00"),
    ],
)
def test_windows_begin_at_midnight_of_their_zone(
    window: str, zone: str, now: str, start: str, end: str
) -> None:
    calendar = Calendar(window, zone)
    assert calendar.span(at(now)) == (at(start), at(end))
    assert calendar.span(at(end)) != calendar.span(at(now))


@given(st.floats(0, 4e9), st.sampled_from(["day", "month"]))
def test_windows_follow_each_other_without_gap_or_overlap(now: float, window: str) -> None:
    calendar = Calendar(window, "America/Havana")
    start, end = calendar.span(now)
    assert start <= now < end
    assert calendar.span(end)[0] == end
    assert calendar.span(start - 1)[1] == start
