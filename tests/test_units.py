"""Parsers accept what the formatters print."""

from __future__ import annotations

import pytest

from paceline.units import (
    format_bytes,
    format_count,
    format_money,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("25MiB", 25 * 2**20), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("2d", 172800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "8", "GiB", "8 gigs", "-1GiB"])
def test_a_size_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "90", "m", "5 minutes", "10m!"])
def test_a_duration_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90s"):
        parse_seconds(text)


@pytest.mark.parametrize(("value", "count"), [("15e12", 15 * 10**12), (700, 700), (2**60 + 1, 2**60 + 1), ("24", 24)])
def test_counts(value: str | int, count: int) -> None:
    assert parse_count(value) == count


@pytest.mark.parametrize("value", ["1.5", -1, "many", float("nan"), True])
def test_a_count_with_a_fraction_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_count(value)  # type: ignore[arg-type]


def test_what_is_printed_can_be_read() -> None:
    for size in (1, 1536, 3 * 2**20, 5 * 2**30):
        assert parse_bytes(format_bytes(size)) == size
    for seconds in (0.25, 12.0, 245.0, 7200.0):
        assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds)
    assert format_count(1_235_814_400) == "1.24 B"


@pytest.mark.parametrize(
    ("amount", "text"),
    [(2.988, "2.99 USD"), (812.4, "812 USD"), (9_999.0, "9,999 USD"), (45_678.0, "45.7 K USD"), (8.2e6, "8.20 M USD"),
     (3.1e9, "3.10 B USD"), (-2e6, "-2.00 M USD")],
)  # fmt: skip
def test_money_has_three_digits_and_its_currency(amount: float, text: str) -> None:
    assert format_money(amount) == text
    assert format_money(amount, "EUR").endswith(" EUR")
