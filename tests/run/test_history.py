"""How often a run failed and how fast it went on, from records of a known story."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.checkpoint.config import CheckpointSection
from paceline.checkpoint.interval import RECOVERY_SECONDS, SaveCost, failure_rate
from paceline.run.history import History, history
from paceline.run.records import Certificate, Fault, Record, RecordWriter, Restart, RunFinished, Window


def story(folder: Path, attempt: int, *records: tuple[float, Record]) -> None:
    for time, record in records:
        with RecordWriter(folder, attempt, lambda time=time: time) as writer:  # type: ignore[misc]
            writer.write(record)


def step(number: int) -> Record:
    return Window(step=number, first_step=1, rank=0, parts={})


def resumed() -> Record:
    return Certificate(
        step=11, resumed_step=10, same_layout=True, expected_loss=1.0, loss=1.0, expected_grad_norm=1.0, grad_norm=1.0,
        tolerance=0.0, verdict="exact",
    )  # fmt: skip


def fault(kind: str) -> Record:
    return Fault(step=10, rank=1, host="h", kind_of_fault=kind, evidence="", message="")


def end(code: int) -> Record:
    return RunFinished(step=20, exit=code, reason="", steps=20, samples=0)


def again(attempt: int) -> Record:
    return Restart(step=10, reason="", next_attempt=attempt, seconds=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two failures outlived in 3 and 10 s, an end by the job's own fault, and a day later one more attempt."""
    story(tmp_path, 1, (1000.0, step(1)), (1100.0, step(10)), (1101.0, fault("WorkerFailed")), (1102.0, again(2)))
    story(tmp_path, 2, (1104.0, step(10)), (1107.0, resumed()), (1200.0, fault("link")), (1201.0, again(3)))
    story(tmp_path, 3, (1205.0, fault("WorkerFailed")), (1206.0, again(4)))
    story(tmp_path, 4, (1210.0, resumed()), (1300.0, step(20)), (1301.0, fault("JobError")), (1302.0, end(78)))
    story(tmp_path, 5, (90000.0, step(20)), (90009.0, fault("suspected")), (90010.0, step(30)))
    return tmp_path


def test_failures_time_and_recovery_are_counted(run: Path) -> None:
    found = history(run)
    assert found.failures == 3
    assert found.run_seconds == pytest.approx(102.0 + 97.0 + 1.0 + 92.0 + 10.0)
    assert found.recovery_seconds == pytest.approx((3.0 + 10.0) / 2)


def test_a_fresh_run_has_no_history(tmp_path: Path) -> None:
    assert history(tmp_path) == History()


def test_the_schedule_saves_more_often_in_a_run_that_fails_often(run: Path, tmp_path: Path) -> None:
    from paceline.train.keeping import make_schedule

    def interval(folder: Path) -> Any:
        directory, world = SimpleNamespace(path=folder), SimpleNamespace(rank=0, world_size=2)
        schedule = make_schedule(CheckpointSection(), cast(Any, directory), cast(Any, world))
        schedule.measured(SaveCost(0.1, 0.0, 0.1))
        return schedule.interval

    fresh, often = interval(tmp_path / "fresh"), interval(run)
    assert fresh.failures_per_second == failure_rate(2) and fresh.recovery_seconds == RECOVERY_SECONDS
    assert often.failures_per_second == pytest.approx(2 / history(run).run_seconds)
    assert often.recovery_seconds == pytest.approx(6.5) and often.seconds < 10 < fresh.seconds
