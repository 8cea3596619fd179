"""The guide's table of scaling efficiencies: met row by row, with the fewest faults that do."""

from __future__ import annotations

import pytest

from paceline.plan.practice import ROWS, WITHIN, Habits, all_habits, efficiency, explain, table
from tests.docs.markdown import tables
from tests.pool.pool import ROOT


def test_every_row_of_the_guides_table_is_met_within_its_tolerance() -> None:
    for row in ROWS:
        habits = explain(row)
        assert habits is not None
        assert efficiency(row, habits) == pytest.approx(row.efficiency, abs=WITHIN)
        assert efficiency(row, habits) * row.nodes * row.alone == pytest.approx(row.tokens_per_second, rel=0.06)


def test_the_row_over_100_gbit_needs_every_fault_at_once() -> None:
    row = ROWS[1]
    everything = Habits(every_microbatch=True, fp32=True, one_card=True, exposed=True)
    assert explain(row) == everything
    for habits in all_habits():
        assert (abs(efficiency(row, habits) - row.efficiency) <= WITHIN) == (habits == everything)


def test_a_right_set_up_loses_next_to_nothing_and_mending_gains_what_is_missing() -> None:
    for entry, row in zip(table(), ROWS, strict=True):
        assert entry["right_efficiency"] > 0.99
        assert entry["gain"] == pytest.approx(
            entry["right_efficiency"] * row.nodes * row.alone / row.tokens_per_second - 1
        )
    assert table()[1]["gain"] == pytest.approx(0.18, abs=0.01)


def test_the_sum_of_the_worst_row_by_hand() -> None:
    # 4 bytes x 6.74e9 / 8 devices, each micro-batch, over an eighth of a card of 12.5 GB/s of which 85% is reached.
    by_hand = 4 * 4 * 6.74e9 / 8 / (12.5e9 * 0.85 / 8)
    row = ROWS[1]
    alone = 4 * 8 * 4096 * 8 / row.alone
    assert efficiency(row, explain(row) or Habits()) == pytest.approx(alone / (alone + by_hand), rel=0.005)


def test_the_table_of_the_guide_page_is_the_computed_one() -> None:
    shown = tables((ROOT / "docs/guide/plan.md").read_text())[0][1:]
    for cells, entry in zip(shown, table(), strict=True):
        assert cells == [
            f"{8 * entry['nodes']} {entry['device']}", entry["fabric"], f"{entry['tokens_per_second']:,.0f}",
            f"{entry['efficiency']:.2f}", f"{entry['right_efficiency']:.2f}", entry["habits"], f"{entry['gain']:.0%}",
        ]  # fmt: skip
