"""Faults strike the rank, the step and the moment that they are ordered for, and write that down before they do."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from paceline.drill.acts import ACTS, DATA, SAVE, STEP
from paceline.drill.faults import BY_KIND, CONTROLS, FAULTS
from paceline.drill.order import Order, from_environment, read_truth
from paceline.workers.environment import BEFORE
from tests.pool.launch import Completed, Launcher
from tests.pool.pool import ROOT

ARMED = {BEFORE: "paceline.drill.inject"}


def order(folder: Path, kind: str, **fields: object) -> Order:
    values = {"kind": kind, "rank": 1, "step": 4, "truth": str(folder / "truth.jsonl"), **fields}
    return Order(**values)  # type: ignore[arg-type]


def beats(launch: Launcher, given: Order, steps: int = 8, every: int = 3) -> Completed:
    words = ["--procs", "2", "--module", "tests.drill.beats", str(steps), str(every)]
    return launch(words, module="tests.workers.supervisor", env={**ARMED, **given.environment()}, timeout=30)


def test_an_exception_strikes_its_rank_and_step_and_once_in_a_run(launch: Launcher, tmp_path: Path) -> None:
    given = order(tmp_path, "exception")
    first = beats(launch, given)
    assert first.returncode == 1 and "a fault of this drill: step 4 on rank 1" in first.stderr
    (entry,) = read_truth(Path(given.truth))
    assert (entry["kind"], entry["rank"], entry["step"]) == ("exception", 1, 4)
    assert 0.0 <= time.time() - entry["time"] < 30.0
    # What is on record is not done again: the attempt that follows must come through.
    assert beats(launch, given).returncode == 0
    assert len(read_truth(Path(given.truth))) == 1


def test_a_crash_loop_strikes_every_attempt(launch: Launcher, tmp_path: Path) -> None:
    given = order(tmp_path, "crash-loop")
    assert [beats(launch, given).returncode for _ in range(2)] == [1, 1]
    assert [entry["step"] for entry in read_truth(Path(given.truth))] == [4, 4]


def test_a_kill_comes_in_the_save_that_follows_its_step(launch: Launcher, tmp_path: Path) -> None:
    given = order(tmp_path, "kill-in-save", rank=0)
    ended = beats(launch, given, steps=200_000, every=6)  # ends long after the kill
    assert ended.returncode == 1 and "SIGKILL" in ended.stderr
    (entry,) = read_truth(Path(given.truth))
    assert entry["rank"] == 0 and entry["after_seconds"] == 0.0


def test_without_an_order_nothing_happens(launch: Launcher) -> None:
    words = ["--procs", "2", "--module", "tests.drill.beats", "5", "2"]
    assert launch(words, module="tests.workers.supervisor", env=ARMED, timeout=30).returncode == 0
    assert from_environment({}) is None


def test_the_moments_are_those_that_the_training_loop_names() -> None:
    """A phase that is worded anew would let every fault of it pass without a word."""
    said = "".join((ROOT / f"src/paceline/train/{name}.py").read_text() for name in ("loop", "keep"))
    for phase in (DATA, STEP, SAVE):
        assert re.search(rf'beat\([^)]*"{phase}"', said), phase
    assert {act.moment for act in ACTS.values()} == {DATA, STEP, SAVE}


def test_the_catalogue_is_whole() -> None:
    assert {f.kind for f in FAULTS if f.strikes == "worker"} == set(ACTS) - {"pace"}
    assert {control.kind for control in CONTROLS} <= set(BY_KIND)
    assert len({control.without for control in CONTROLS}) == len(CONTROLS)


@pytest.mark.parametrize("kind", [kind for kind, act in ACTS.items() if act.again and kind != "pace"])
def test_what_comes_again_is_what_a_run_cannot_outlive_or_need_not(kind: str) -> None:
    """A fault that came again in the attempt after it would make a drill of a crash loop."""
    assert BY_KIND[kind].ends in ("no progress", "bad step") or BY_KIND[kind].alive
