"""Median, spread and drift of samples: against their definitions and against draws."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from paceline.bench.rows import Row, drift_of, make_row, median_error, newest, row_of, spread_of
from paceline.bench.sweep import Point


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4 - 2) / 2 / 3)
    assert spread_of([7.0]) == 0.0


def test_drift_is_the_deviation_of_the_rounds_and_few_disturbed_ones_do_not_count() -> None:
    draw = random.Random(1)
    rounds = [[draw.gauss(1.0, 0.1)] for _ in range(400)]
    assert drift_of(rounds) == pytest.approx(0.1, rel=0.15)
    disturbed = [[9.0] if index % 10 == 0 else one for index, one in enumerate(rounds)]
    assert drift_of(disturbed) == pytest.approx(0.1, rel=0.35)
    assert drift_of(rounds[:4]) == pytest.approx(statistics.stdev(r[0] for r in rounds[:4]), rel=0.1)
    assert drift_of([[1.0]]) == drift_of([[1.0], [1.0]]) == 0.0


def test_the_error_of_a_median_is_that_of_medians_drawn_again() -> None:
    draw = random.Random(2)
    medians = [statistics.median(draw.gauss(1.0, 0.2) for _ in range(25)) for _ in range(2000)]
    assert statistics.stdev(medians) == pytest.approx(median_error(0.2, 25), rel=0.06)


def test_a_row_has_the_median_of_all_samples_and_is_replaced_by_a_later_one() -> None:
    point = Point("all_reduce", 4000, 1000)
    first = make_row(point, "in_node", 2, 1, "fp32", [[1e-3, 3e-3], [2e-3]], 0)
    assert first.time_us == pytest.approx(2000) and (first.rounds, first.trials) == (2, 3)
    assert first.algorithm_bandwidth == pytest.approx(4000 / 2e-3 / 1e9) and first.in_place
    later = make_row(point, "in_node", 2, 1, "fp32", [[5e-3]], 0)
    other = make_row(Point("all_reduce", 8000, 2000), "in_node", 2, 1, "fp32", [[5e-3]], 0)
    assert newest([first, other, later]) == [later, other]
    record = {name: getattr(first, name) for name in Row.__struct_fields__}
    assert row_of(record) == first and not math.isnan(first.spread)
