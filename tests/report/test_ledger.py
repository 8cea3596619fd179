"""The ledger: every rank-second in one part, and the parts are the ones that were put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.report.samples import T0, Clock, lifelike_run, resumed_run, simple_run
from tests.run.samples import started, step

from paceline.report.attempts import load
from paceline.report.ledger import LEDGER_PARTS, blocked_seconds, goodput, ledger
from paceline.run.records import RecordWriter, Summary, Window


def rows_of(path: Path) -> dict[str, float]:
    return ledger(load(path).attempts)


def closure(rows: dict[str, float]) -> float:
    return abs(sum(rows[f"{part}_seconds"] for part in LEDGER_PARTS) - rows["rank_seconds"])


def parts_of(rows: dict[str, float]) -> dict[str, float]:
    return {part: round(rows[f"{part}_seconds"], 6) for part in LEDGER_PARTS if abs(rows[f"{part}_seconds"]) > 1e-6}


def test_a_simple_run_adds_up_to_what_was_put_in(tmp_path: Path) -> None:
    simple_run(tmp_path)
    rows = rows_of(tmp_path)
    assert rows["rank_seconds"] == pytest.approx(2 * 6.0, abs=1e-5)
    assert parts_of(rows) == pytest.approx(
        {
            "startup": 6.0, "compute": 1.4, "reduce_exposed": 0.2, "optimizer": 0.2, "data_wait": 0.1,
            "telemetry": 0.02, "evaluation": 2.0, "checkpoint": 1.0, "other": 0.08 + 1.0,
        },
        abs=1e-5,
    )  # fmt: skip
    assert closure(rows) < 1e-6
    assert goodput(rows) == pytest.approx(1.8 / 12, abs=1e-6)


def test_a_restart_with_other_ranks_adds_up(tmp_path: Path) -> None:
    resumed_run(tmp_path)
    rows = rows_of(tmp_path)
    # attempt 1: 2 ranks x (1 s start-up + 1.2 s); pause 4 s and attempt 2 (2 s + 1 s) with 4 ranks
    assert rows["rank_seconds"] == pytest.approx(2 * 2.2 + 4 * 4.0 + 4 * 3.0, abs=1e-5)
    assert rows["restart_seconds"] == pytest.approx(16.0, abs=1e-5)
    assert rows["redone_seconds"] == pytest.approx(2 * 0.1 * 2, abs=1e-5)
    assert rows["startup_seconds"] == pytest.approx(2 * 1.0 + 4 * 2.0, abs=1e-5)
    assert rows["compute_seconds"] == pytest.approx(10 * 0.07 * 2 + 10 * 0.07 * 4, abs=1e-5)
    assert rows["idle_seconds"] == 0
    assert closure(rows) < 1e-6


def test_a_pause_after_a_verdict_is_idle(tmp_path: Path) -> None:
    simple_run(tmp_path)
    clock = Clock(T0 + 106.0)
    with RecordWriter(tmp_path, 2, clock) as writer:
        writer.write(started(at=10))
    rows = rows_of(tmp_path)
    assert rows["idle_seconds"] == pytest.approx(200.0, abs=1e-5)
    assert closure(rows) < 1e-6


def test_a_lifelike_run_closes_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    lifelike_run(tmp_path, steps=200)
    rows = rows_of(tmp_path)
    assert closure(rows) < 1e-6
    assert all(seconds >= 0 for seconds in rows.values())
    assert rows["compile_seconds"] == pytest.approx(2 * 2 * 3.0, rel=0.02)
    assert rows["other_seconds"] < 0.06 * rows["rank_seconds"]


def test_windows_of_all_ranks_count_each_rank_by_itself(tmp_path: Path) -> None:
    clock = Clock()
    with RecordWriter(tmp_path, 1, clock) as writer:
        writer.write(started())
        for number in range(1, 5):
            clock.now += 0.1
            writer.write(step(number, parts={"data_wait": 0.01, "forward": 0.09}))
        for rank, wait in ((0, 0.01), (1, 0.05)):
            parts = {
                "data_wait": Summary(4, 4 * wait, wait, wait, 1),
                "forward": Summary(4, 4 * (0.1 - wait), 0.1 - wait, 0.1 - wait, 1),
            }
            writer.write(Window(step=4, first_step=1, rank=rank, parts=parts))
    rows = rows_of(tmp_path)
    assert rows["data_wait_seconds"] == pytest.approx(4 * 0.06, abs=1e-6)
    assert rows["compute_seconds"] == pytest.approx(4 * 0.14, abs=1e-6)
    assert closure(rows) < 1e-6


def test_steps_without_parts_are_taken_for_like_the_others(tmp_path: Path) -> None:
    clock = Clock()
    with RecordWriter(tmp_path, 1, clock) as writer:
        writer.write(started())
        for number in range(1, 5):
            clock.now += 0.1
            writer.write(step(number) if number % 2 else step(number, parts={}))
    rows = rows_of(tmp_path)
    assert rows["compute_seconds"] == pytest.approx(2 * 4 * 0.07, abs=1e-5)
    assert closure(rows) < 1e-6


@pytest.mark.parametrize(
    ("saves", "blocked"),
    [
        ([("requested", 0.0, None), ("staged", 0.2, None), ("durable", 5.0, None)], 0.2),
        ([("requested", 0.0, None), ("durable", 5.0, None)], 5.0),
        ([("requested", 0.0, None)], 0.0),
        ([("staged", 0.2, 0.2), ("durable", 5.0, 0.1)], 0.3),
    ],
)
def test_a_save_blocks_until_it_is_staged_unless_it_says_otherwise(saves: list[Any], blocked: float) -> None:
    records = [{"state": state, "seconds": seconds, "blocked_seconds": known} for state, seconds, known in saves]
    assert blocked_seconds(records) == pytest.approx(blocked)


def test_no_records_give_an_empty_ledger() -> None:
    rows = ledger([])
    assert rows["rank_seconds"] == 0
    assert goodput(rows) is None
