"""When a save is due."""

from __future__ import annotations

from paceline.checkpoint.interval import FIRST_SECONDS, SaveCost
from paceline.checkpoint.schedule import Schedule
from paceline.job.load import load_job


def walk(schedule: Schedule, steps: int, step_seconds: float = 1.0, busy_steps: int = 0) -> list[int]:
    """Steps after which a save was made, where each save is in flight for so many steps."""
    saves, free_at = [], 0
    for step in range(1, steps + 1):
        now = step * step_seconds
        if schedule.due(step, now, busy=step < free_at):
            saves.append(step)
            schedule.saved(now)
            free_at = step + busy_steps
    return saves


def test_steps_are_counted_from_the_start_of_the_run() -> None:
    assert walk(Schedule(5, now=0.0), 17) == [5, 10, 15]
    resumed = Schedule(5, now=0.0)
    assert [step for step in range(13, 21) if resumed.due(step, 0.0) and resumed.saved(0.0) is None] == [15, 20]


def test_seconds_count_from_the_last_save() -> None:
    assert walk(Schedule(10.0, now=0.0), 9, step_seconds=4.0) == [3, 6, 9]


def test_a_save_at_the_end_only_is_never_due() -> None:
    schedule = Schedule.of(load_job(None, ["checkpoint.every=end"]).checkpoint, now=0.0, ranks=2)
    assert walk(schedule, 100_000) == [] and schedule.requested == 0


def test_of_a_job() -> None:
    for word, saves in (("7", [7, 14]), ("7s", [7, 14]), ("auto", [60, 120])):
        section = load_job(None, [f"checkpoint.every={word}"]).checkpoint
        assert walk(Schedule.of(section, now=0.0, ranks=2), 125)[:2] == saves


def test_bl_42_saves_that_come_due_during_one_become_one_and_are_counted() -> None:
    schedule = Schedule(1, now=0.0)
    saves = walk(schedule, 20, busy_steps=4)
    assert saves == [1, 5, 9, 13, 17]
    # Steps 18 to 20 have one save waiting among them.
    assert schedule.requested == 20 and schedule.skipped == 20 - len(saves) - 1
    assert not schedule.due(21, 21.0, busy=True) and schedule.skipped == 15
    timed = Schedule(2.0, now=0.0)
    assert walk(timed, 12, busy_steps=5) == [2, 7, 12]


def test_a_save_that_somebody_asks_for_counts() -> None:
    schedule = Schedule(10.0, now=0.0)
    assert not schedule.due(1, 9.0)
    schedule.saved(9.0)
    assert not schedule.due(2, 18.0) and schedule.due(3, 19.0)


def test_auto_saves_early_once_and_then_by_what_it_cost() -> None:
    schedule = Schedule("auto", now=0.0, ranks=1024)
    assert not schedule.due(1, FIRST_SECONDS - 1) and schedule.due(2, FIRST_SECONDS)
    schedule.saved(FIRST_SECONDS)
    told = schedule.measured(SaveCost(20.0, 0.0, 25.0))  # with the start of the writer
    assert told is not None and "20.0 s" in told and schedule.interval is not None
    first = schedule.interval.seconds
    assert not schedule.due(3, FIRST_SECONDS + first - 1) and schedule.due(4, FIRST_SECONDS + first)
    schedule.saved(2000.0)
    assert schedule.measured(SaveCost(0.5, 0.0, 5.0)) is not None
    assert schedule.interval.cost.stall_seconds == 0.5 and schedule.interval.seconds < first / 4
    for stall in (0.52, 0.48, 90.0, 0.5):  # one outlier moves nothing
        assert schedule.measured(SaveCost(stall, 0.0, 5.0)) is None
    assert schedule.interval.cost.stall_seconds == 0.5


def test_an_interval_of_ones_own_stays_and_its_loss_is_told_once() -> None:
    schedule = Schedule(100, now=0.0, ranks=1024)
    told = []
    for save in range(1, 5):
        assert schedule.due(save * 100, save * 50.0)
        schedule.saved(save * 50.0)
        told.append(schedule.measured(SaveCost(10.0, 0.0, 12.0)))
    assert told[0] is None and told[2:] == [None, None]
    assert told[1] is not None and "every 50.0 s loses" in told[1] and "auto" in told[1]
    cheap = Schedule(100, now=0.0, ranks=2)
    for save in range(1, 5):
        cheap.saved(save * 300.0)
        assert cheap.measured(SaveCost(0.05, 0.0, 1.0)) is None


def test_a_save_that_waits_at_the_end_is_the_last_one() -> None:
    schedule = Schedule(1, now=0.0)
    assert schedule.due(1, 1.0) and schedule.saved(1.0) is None
    assert not schedule.due(2, 2.0, busy=True)
    schedule.ended()
    assert schedule.skipped == 1 and not schedule.due(3, 3.0, busy=True)
