"""Rank correlation and regret on figures that can be checked by hand."""

from __future__ import annotations

import pytest

from paceline.plan.ranking import group_records, rank_correlation, regret


def test_rank_correlation_is_of_ranks_alone() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 4000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_regret_is_what_the_choice_costs() -> None:
    predicted, measured = [1.0, 2.0, 3.0], [12.0, 10.0, 11.0]
    assert regret(predicted, measured, 1) == pytest.approx(0.2)
    assert regret(predicted, measured, 2) == 0.0


def test_groups_of_one_run_say_nothing() -> None:
    rows = {name: {"id": name, "predicted": p, "measured": m} for name, p, m in (("a", 1, 1), ("b", 2, 3), ("c", 1, 1))}
    found = group_records([("g", "a"), ("g", "b"), ("alone", "c"), ("g", "not predicted")], rows)
    assert [record["runs"] for record in found["each"]] == [["a", "b"]] and found["groups"] == 0
