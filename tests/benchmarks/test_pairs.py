"""The benchmarks' arithmetic, against cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.pairs import Budget, bootstrap_median, first_goes_first, relative_difference, speed_ratios


def test_a_ratio_is_above_one_where_the_first_side_needs_less_time() -> None:
    assert speed_ratios([(1.0, 2.0), (4.0, 2.0)]) == [2.0, 0.5]


def test_sides_take_turns_in_going_first() -> None:
    assert [first_goes_first(pair) for pair in range(4)] == [True, False, True, False]


def test_equal_values_leave_no_interval() -> None:
    interval = bootstrap_median([0.98] * 12)
    assert (interval.median, interval.low, interval.high) == (0.98, 0.98, 0.98)


def test_the_interval_holds_the_true_median_in_about_95_of_100_samples() -> None:
    """200 samples of 25 from a skewed distribution with median ln 2; 90..99.5% tells a bound from a quartile."""
    generator = np.random.default_rng(1)
    hits = 0
    for sample in generator.exponential(1.0, (200, 25)):
        interval = bootstrap_median(sample.tolist(), resamples=1000)
        hits += interval.low <= np.log(2) <= interval.high
    assert 0.90 <= hits / 200 <= 0.995


def test_the_interval_equals_the_one_counted_over_all_resamples() -> None:
    """Three values have 27 resamples; a median of 1 has probability 7/27, of 3 as well: both ends are reached."""
    interval = bootstrap_median([1.0, 2.0, 3.0])
    assert (interval.median, interval.low, interval.high) == (2.0, 1.0, 3.0)


def test_a_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        bootstrap_median([])


@pytest.mark.parametrize(
    ("ratios", "seconds", "enough"),
    [
        ([1.0] * 11, 1000.0, False),
        ([1.0] * 12, 0.0, True),
        ([0.9, 1.1] * 6, 0.0, False),
        ([0.9, 1.1] * 6, 75.0, True),
        ([0.9, 1.1] * 30, 0.0, True),
    ],
    ids=["too few pairs, however long", "narrow", "wide", "wide but out of time", "wide but out of pairs"],
)
def test_pairs_are_added_until_the_interval_is_narrow(ratios: list[float], seconds: float, enough: bool) -> None:
    assert Budget().enough(ratios, seconds) is enough


def test_losses_differ_relative_to_the_larger() -> None:
    assert relative_difference(2.0, 1.0) == relative_difference(-1.0, -2.0) == 0.5
    assert relative_difference(0.0, 0.0) == 0.0
