"""A request to stop reaches any rank: all save at one step and end, and the run that goes on is the undisturbed one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.storage import open_storage
from paceline.errors import JobError
from paceline.run.control import Control, ask
from tests.pool.pool import Pool
from tests.train.attempts import STEPS, attempts, left, said

ASKED = ("run.name=asked",)


def saved(run: Path) -> list[int]:
    return list_steps(open_storage(run / "checkpoints"))


# BL-45, BL-80
@pytest.mark.limit(120)
def test_a_signal_to_one_rank_stops_all_after_one_step_and_costs_nothing(pool: Pool, tmp_path: Path) -> None:
    calls: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("run.name=straight",), {}),
        (ASKED, {"asked": {1: 2}}),  # rank 1 alone
        ((*ASKED, "checkpoint.every=1"), {"asked": {0: 4, 1: 5}}),  # both, a step apart, a save in flight
        ((*ASKED, "run.eval_every=6"), {"asked": {0: 6}}),  # in a step that an evaluation follows
        (ASKED, {"asked": {1: STEPS}}),  # in the last step
    ]
    ended = pool.run(attempts, 2, tmp_path, calls, timeout=100)
    run = tmp_path / "runs" / "asked"
    assert left(run) == left(tmp_path / "runs" / "straight")._replace(verdicts=left(run).verdicts)
    finished = said(run, "run_finished")
    assert [(r["exit"], r["step"]) for r in finished] == [(75, 2), (75, 4), (75, 6), (0, STEPS)]
    assert "stopped by SIGTERM to rank 1 after step 2, state saved" in finished[0]["reason"]
    for rank in (0, 1):
        assert ["exit 75" in text for text in ended[rank]] == [False, True, True, True, False]
    # The one that was in flight, then that of the step itself; and in the last step one alone.
    durable = [r["step"] for r in said(run, "checkpoint") if r["state"] == "durable"]
    assert durable == [2, 3, 4, 6, STEPS]
    assert not [r for r in said(run, "eval") if r["step"] == 6], "it saves before it evaluates"
    assert set(left(run).verdicts) == {"unknown"}, "nothing is there to compare with, and nothing differs"


def asks_while_it_trains(rank: int, world_size: int, folder: Path) -> list[str]:
    """Control files appear in the middle of a run: `save` before step 3, `stop` before step 5."""
    from unittest import mock

    from paceline.run import control
    from paceline.train.keep import Keeper

    votes, run = Keeper.votes, folder / "runs" / "asked"

    def votes_after(keeper: Keeper, step: int) -> tuple[float, ...]:
        if rank == 0 and step + 1 in (3, 5):
            ask(run, {3: control.SAVE, 5: control.STOP}[step + 1])
        return votes(keeper, step)

    with mock.patch.object(Keeper, "votes", votes_after), mock.patch.object(control, "LOOK_SECONDS", 0.0):
        return attempts(rank, world_size, folder, [(ASKED, {"each": True})])


@pytest.mark.limit(90)
def test_control_files_save_and_stop_and_are_removed(pool: Pool, tmp_path: Path) -> None:
    ended = pool.run(asks_while_it_trains, 2, tmp_path, timeout=60)
    run = tmp_path / "runs" / "asked"
    assert saved(run) == [3, 5]
    assert all("stopped by control/stop after step 5" in texts[0] for texts in ended)
    assert list((run / "control").iterdir()) == []


def test_what_was_asked_before_a_start_is_void(tmp_path: Path) -> None:
    ask(tmp_path, "stop")
    control = Control(tmp_path)
    (note,) = control.clear()
    assert "void" in note and not control.asked("stop")
    assert not (tmp_path / "control" / "stop").exists()


def test_a_request_that_cannot_be_removed_is_met_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(tmp_path)
    ask(tmp_path, "stop")
    assert control.asked("stop")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    problem = control.done("stop")
    assert problem is not None and "cannot be removed (Permission denied)" in problem
    monkeypatch.setattr("paceline.run.control.LOOK_SECONDS", 0.0)
    assert not control.asked("stop"), "it would stop every start after its first step"
    os.utime(tmp_path / "control" / "stop", ns=(1, 1))
    assert control.asked("stop"), "a new request is one"
    with pytest.raises(JobError, match="is left from before this start and cannot be removed: Permission denied"):
        Control(tmp_path).clear()


def test_a_folder_of_requests_that_cannot_be_written_is_told_with_another_way(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("in the way")
    with pytest.raises(JobError, match="cannot write .*control/stop: File exists") as refused:
        ask(tmp_path, "stop")
    assert "send SIGTERM to its launcher" in str(refused.value.hint)
    assert Control(tmp_path).clear() == [], "the run itself does without"
