"""What records say of a fault: times, names, and work that was lost, from records whose figures are easy to add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.drill.evidence import gather
from paceline.drill.faults import BY_KIND
from paceline.drill.judge import ending
from paceline.rehearsal.trial import Ended
from paceline.run.records import Checkpoint, Fault, Record, RecordWriter, Straggler
from tests.run.samples import started, step

TRUTH = [{"kind": "kill", "rank": 1, "step": 9, "attempt": 1, "time": 100.0}]


def write(run: Path, attempt: int, lines: list[tuple[float, Record]], name: str = "rank0") -> None:
    clock = iter([time for time, _ in lines])
    with RecordWriter(run, attempt, lambda: next(clock), name) as writer:
        for _, record in lines:
            writer.write(record)


def save(at: int, state: Any = "durable") -> Checkpoint:
    return Checkpoint(step=at, state=state, path=f"step-{at}")


def killed(run: Path, resumed_from: int) -> None:
    """Steps 1 to 8, one a second, the checkpoint of step 6 durable; killed at 100 s, seen at 101, at work again at 104."""
    first: list[tuple[float, Record]] = [(91.0, started())]
    first += [(91.0 + n, step(n)) for n in range(1, 9)]
    write(run, 1, [*first, (99.5, save(6))])
    fault = Fault(step=8, rank=1, host="box", kind_of_fault="killed", evidence="", message="")
    write(run, 1, [(101.0, fault)], "supervisor")
    again = [(103.0 + n, step(resumed_from + n)) for n in range(1, 4)]
    write(run, 2, [(102.0, started(resumed_from)), *again])


def test_times_count_from_the_truth_and_redone_steps_from_the_records(tmp_path: Path) -> None:
    killed(tmp_path, resumed_from=6)
    seen = gather(tmp_path, BY_KIND["kill"], TRUTH)
    assert seen.attempts == 2 and seen.detect_seconds == pytest.approx(1.0)
    assert seen.recover_seconds == pytest.approx(4.0)
    assert (seen.named, seen.named_rank) == ("killed", 1)
    assert seen.steps_redone == 2 and seen.within


def test_more_lost_than_since_the_last_durable_checkpoint_is_seen(tmp_path: Path) -> None:
    killed(tmp_path, resumed_from=0)
    seen = gather(tmp_path, BY_KIND["kill"], TRUTH)
    assert seen.steps_redone == 8 and not seen.within


def test_a_straggler_is_named_by_its_cause(tmp_path: Path) -> None:
    slow = Straggler(step=12, rank=1, host="box", cause="data", ratio=2.0, evidence="")
    write(tmp_path, 1, [(90.0, started()), (99.0, slow), (103.0, slow)])
    seen = gather(tmp_path, BY_KIND["slow-data"], TRUTH)
    # One that is on record before the fault is a false alarm, not a detection.
    assert (seen.named, seen.named_rank, seen.detect_seconds) == ("data", 1, pytest.approx(3.0))


def test_of_a_full_disk_the_failed_save_and_the_next_whole_one_count(tmp_path: Path) -> None:
    lines = [(90.0, started()), (101.5, save(12, "failed")), (104.0, save(18))]
    write(tmp_path, 1, lines)
    seen = gather(tmp_path, BY_KIND["full-disk"], TRUTH)
    assert (seen.detect_seconds, seen.recover_seconds) == (pytest.approx(1.5), pytest.approx(4.0))
    assert seen.failed_saves == 1


def test_nothing_on_record_is_nothing_seen(tmp_path: Path) -> None:
    seen = gather(tmp_path, BY_KIND["stop"], [])
    assert seen.detect_seconds is None and seen.named is None and seen.attempts == 0


@pytest.mark.parametrize(
    ("kind", "codes", "right"),
    [
        ("kill", [0], True),
        ("kill", [1], False),
        ("kill", [None], False),
        ("preemption", [75, 0], True),
        ("preemption", [0], False),
        ("preemption", [75], False),
        ("preemption", [130, 0], False),
        ("crash-loop", [93], True),
        ("crash-loop", [1], False),
        ("nan", [1], True),
        ("nan", [0], False),
    ],
)
def test_each_fault_has_the_end_that_is_promised_for_it(
    tmp_path: Path, kind: str, codes: list[int | None], right: bool
) -> None:
    log = tmp_path / "run.log"
    log.write_text("Traceback\n  RuntimeError: a fault of\n  this drill: step 9\n")
    error = {"error": {"key": "optimizer.max_bad_steps"}}
    ends = [Ended("run", code, error if code == 1 else None, log, 0.0, 9.0) for code in codes]
    write(tmp_path / "run", 1, [(90.0, started()), (91.0, step(1))])
    seen = gather(tmp_path / "run", BY_KIND[kind], TRUTH)
    assert (ending(BY_KIND[kind], ends, seen, tmp_path / "run", 24) == []) is right


def test_a_crash_loop_that_hides_its_first_traceback_is_not_survived(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("paceline: three attempts without a new step\n")
    seen = gather(tmp_path, BY_KIND["crash-loop"], TRUTH)
    told = ending(BY_KIND["crash-loop"], [Ended("run", 93, None, log, 0.0, 9.0)], seen, tmp_path, 24)
    assert told == ["the first traceback is not shown"]
