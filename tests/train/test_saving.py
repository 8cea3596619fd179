"""Saves while a run trains: when they are made, which stay, and what a disk without room does to it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paceline.checkpoint import schedule
from paceline.checkpoint.folders import list_steps, read_manifest
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.verify import verify
from paceline.errors import DiskFull
from paceline.train import loop
from paceline.train.evaluate import Evaluation
from tests.checkpoint.savers import hooked
from tests.checkpoint.test_storage import mounted
from tests.pool.pool import Pool, RankFailed
from tests.train.attempts import STEPS, attempt, attempts, left, said

RUN = Path("runs", "default")


def states(folder: Path, *wanted: str) -> list[tuple[str, int]]:
    return [(r["state"], r["step"]) for r in said(folder / RUN, "checkpoint") if r["state"] in wanted]


def steps(place: Path) -> list[int]:
    return list_steps(open_storage(place))


def test_a_save_that_is_due_while_one_is_written_waits_or_is_skipped(pool: Pool, tmp_path: Path) -> None:  # BL-42
    calls: list[Any] = [
        (("run.name=straight",), {}),
        (("checkpoint.every=1", "checkpoint.keep=20"), {"writer": hooked("slow", 0.1)}),
    ]
    pool.run(attempts, 2, tmp_path, calls, timeout=50)
    counts = Counter(state for state, _ in states(tmp_path, "requested", "skipped", "staged", "durable", "failed"))
    # One a step: 7 that come due, and the last step's.
    assert counts["requested"] + counts["skipped"] == STEPS
    assert counts["requested"] == counts["staged"] == counts["durable"] and not counts["failed"]
    assert counts["skipped"] > 0
    saved = [step for _, step in states(tmp_path, "durable")]
    assert saved == sorted(saved) == steps(tmp_path / RUN / "checkpoints") and saved[-1] == STEPS
    assert left(tmp_path / RUN).curve == left(tmp_path / "runs" / "straight").curve
    blocked = [r for r in said(tmp_path / RUN, "checkpoint") if r["state"] in ("staged", "durable")]
    assert all(r["blocked_seconds"] >= 0 and r["seconds"] > 0 for r in blocked)


def attempt_soon(rank: int, world_size: int, folder: Path, words: Sequence[str]) -> str:
    """The first save of `auto` comes after a hundredth of a second instead of a minute."""
    with mock.patch.object(schedule, "FIRST_SECONDS", 0.01):
        return attempt(rank, world_size, folder, words, each=True)


@pytest.mark.parametrize("every", ["0.01s", "auto", "end"])
def test_saves_by_the_clock_by_their_cost_or_at_the_end_alone(pool: Pool, tmp_path: Path, every: str) -> None:
    text = pool.run(attempt_soon, 2, tmp_path, (f"checkpoint.every={every}", "checkpoint.keep=20"), timeout=40)[0]
    saved = steps(tmp_path / RUN / "checkpoints")
    assert saved[-1] == STEPS and (len(saved) == 1) == (every == "end")
    assert ("checkpoint.every = auto: " in text) == (every == "auto")
    storage = open_storage(tmp_path / RUN / "checkpoints")
    for step in saved[:-1]:
        found = read_manifest(storage, step)
        assert found.samples == 12 * step and found.next_step is None  # each was waited for, before its next step


# ---- which are kept

LOSSES = {2: 3.0, 4: 1.0, 5: 1.5, 6: 2.0, 8: 1.2}


def attempt_with_losses(rank: int, world_size: int, folder: Path, stop: int | None) -> str:
    """An attempt whose evaluations find `LOSSES`."""
    done = [step for step in LOSSES if stop is None or step <= stop]
    left_over = iter([LOSSES[step] for step in (done if stop is not None else [6, 8])])
    words = ("checkpoint.keep=1", "checkpoint.keep_best=1", "run.eval_every=2")
    with mock.patch.object(loop, "evaluate", side_effect=lambda *_, **__: Evaluation(next(left_over), 1.0)):
        return attempt(rank, world_size, folder, words, stop, each=True)


def test_the_best_by_evaluation_is_kept_across_a_resume(pool: Pool, tmp_path: Path) -> None:
    pool.run(attempt_with_losses, 2, tmp_path, 5, timeout=40)
    place = tmp_path / RUN / "checkpoints"
    # A new best is saved at once: 2, then 4; the end of the attempt is the newest.
    assert states(tmp_path, "durable") == [("durable", 2), ("durable", 4), ("durable", 5)]
    assert steps(place) == [4, 5] and states(tmp_path, "removed") == [("removed", 2)]
    pool.run(attempt_with_losses, 2, tmp_path, None, timeout=40)
    # 6 is no new best, and neither is 8; 5 is what this attempt began from.
    assert steps(place) == [4, 5, 8]
    storage = open_storage(place)
    assert read_manifest(storage, 4).state["eval_loss"] == 1.0 and read_manifest(storage, 8).state["best_eval"] == 1.0
    assert all(verify(storage, step) == [] for step in steps(place))


def test_old_ones_go_by_the_rule(pool: Pool, tmp_path: Path) -> None:
    pool.run(attempts, 1, tmp_path, [(("checkpoint.every=2", "checkpoint.keep=2"), {"each": True})], timeout=40)
    assert steps(tmp_path / RUN / "checkpoints") == [6, 8]
    assert states(tmp_path, "removed") == [("removed", 2), ("removed", 4)]


# ---- no room


@pytest.fixture
def checkpoint_bytes(pool: Pool, tmp_path: Path) -> int:
    """The size of a checkpoint; what it is that of is the straight run."""
    pool.run(attempt, 2, tmp_path, ("run.name=straight",), timeout=40)
    storage = open_storage(tmp_path / "runs" / "straight" / "checkpoints")
    return read_manifest(storage, STEPS).size_bytes


@contextlib.contextmanager
def small(folder: Path, size: int) -> Iterator[Path]:
    with mounted(folder, f"size={size}"):
        yield folder


def test_a_disk_that_fills_up_costs_no_step_and_no_checkpoint(  # BL-43 R9
    pool: Pool, tmp_path: Path, checkpoint_bytes: int
) -> None:
    with small(tmp_path / "small", 2 * checkpoint_bytes) as place:
        words = ("checkpoint.every=2", f"checkpoint.dir={place}")
        with pytest.raises(RankFailed) as failed:
            pool.run(attempts, 2, tmp_path, [(words, {"each": True})], timeout=40)
        error = failed.value.exception
        # The last one could not be written either, and that is what ends the run.
        assert isinstance(error, DiskFull) and error.exit_code == 79 and len(failed.value.tracebacks) == 2
        assert str(place) in error.message and error.values["needed_bytes"] and "free_bytes" in error.values
        text = (tmp_path / "said-by-0").read_text()
        assert "warning: the checkpoint of step 4 was NOT saved, training goes on: no space" in text
        assert "less than two, so that the second save will fail unless room is made" in text
        assert states(tmp_path, "durable", "failed") == [("durable", 2), ("failed", 4), ("failed", 6), ("failed", 8)]
        assert [r["step"] for r in said(tmp_path / RUN, "step")] == list(range(1, STEPS + 1))
        assert steps(place) == [2] and verify(open_storage(place), 2) == []
        assert {p.name for p in place.iterdir()} <= {"step-00000002", ".writer-0.lock"}
        # Not one more fits: told before the first step.
        with pytest.raises(RankFailed) as failed:
            pool.run(attempts, 2, tmp_path, [((*words, "checkpoint.keep=1"), {})], timeout=40)
        error = failed.value.exception
        assert isinstance(error, DiskFull) and "are free" in error.message and "needed" in error.values
        assert len(said(tmp_path / RUN, "step")) == STEPS and steps(place) == [2]


def test_a_disk_without_room_ends_a_run_before_its_first_step(
    pool: Pool, tmp_path: Path, checkpoint_bytes: int
) -> None:
    with small(tmp_path / "small", checkpoint_bytes // 2) as place:
        with pytest.raises(RankFailed) as failed:
            pool.run(attempt, 2, tmp_path, (f"checkpoint.dir={place}",), timeout=40)
        error = failed.value.exception
        assert isinstance(error, DiskFull) and error.exit_code == 79 and len(failed.value.tracebacks) == 2
        assert str(place) in error.message and error.values["needed"] > error.values["free"]
        assert said(tmp_path / RUN, "step") == []


def test_a_save_that_fails_once_is_made_up_for(pool: Pool, tmp_path: Path) -> None:
    # Every second save finds no space: those of steps 4 and 8; the last one is made once more.
    calls = [(("checkpoint.every=2",), {"each": True, "writer": hooked("fail-odd")})]
    with pytest.raises(RankFailed) as failed:
        pool.run(attempts, 2, tmp_path, calls, timeout=40)
    assert isinstance(failed.value.exception, DiskFull)
    assert states(tmp_path, "durable", "failed") == [("durable", 2), ("failed", 4), ("durable", 6), ("failed", 8)]
    pool.run(attempts, 2, tmp_path, [(("checkpoint.every=2",), {}), (("run.name=straight",), {})], timeout=40)
    again, straight = left(tmp_path / RUN), left(tmp_path / "runs" / "straight")
    assert again.curve == straight.curve and again.tensors == straight.tensors
    assert steps(tmp_path / RUN / "checkpoints") == [2, 6, 8]
