"""A save that is killed anywhere leaves the newest committed checkpoint whole, and the next attempt finds it by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import verify
from paceline.checkpoint.folders import list_steps, newest_valid, read_manifest, tidy
from paceline.checkpoint.storage import open_storage
from paceline.errors import PacelineError
from tests.checkpoint.savers import hooked, ranks, saved, whole_steps

SCRIPT = Path(__file__).with_name("crash_script.py")


def test_killed_at_every_file_boundary_the_newest_committed_one_is_whole(place: Path) -> None:  # R3
    (place / "killed").mkdir(parents=True)
    command = [sys.executable, str(SCRIPT), str(place / "template"), str(place / "killed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    boundaries = [line.split()[1:] for line in done.stdout.splitlines()]
    folders = sorted((place / "killed").iterdir())
    assert len(folders) == len(boundaries) + 1 and len(boundaries) > 25
    assert {operation for operation, _ in boundaries} == {"create", "write", "sync", "rename", "unlink", "mkdir"}
    steps = []
    for folder in folders:
        storage = open_storage(folder)
        committed = list_steps(storage)
        assert committed and whole_steps(storage) == committed
        newest = newest_valid(storage, verify.quick)
        assert newest.step == committed[-1]
        steps.append(newest.step)
        for step in committed:  # never a mixed one
            assert torch.equal(saved(storage, step)["model/a"], torch.full((4,), float(step)))
            assert read_manifest(storage, step).ranks == [{"step": step}] * 2
    # Before the mark's rename the old one, from the operation after it on the new one.
    renamed = boundaries.index(["rename", "COMMIT"])
    assert steps == [10] * (renamed + 1) + [20] * (len(folders) - renamed - 1)
    assert list_steps(open_storage(folders[-1])) == [20]


def test_the_next_attempt_saves_after_any_of_them(place: Path) -> None:  # R3: no cleaning up by hand
    (place / "killed").mkdir(parents=True)
    command = [sys.executable, str(SCRIPT), str(place / "template"), str(place / "killed")]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    for folder in sorted((place / "killed").iterdir())[::6]:
        tidy(open_storage(folder))
        with ranks(folder, keep=1) as run:
            run.save(20)
            run.wait()
        assert whole_steps(run.storage) == [20]


@pytest.mark.parametrize(("operation", "number"), [("create", 1), ("sync", 4), ("rename", 1), ("unlink", 1)])
def test_a_killed_writer_is_said_and_replaced(place: Path, operation: str, number: int) -> None:  # R22
    with ranks(place, 2, keep=1) as run:
        run.save(10)
        run.wait()
    with ranks(place, 2, keep=1, command=hooked("kill", operation, number)) as run:
        run.save(20)
        if operation == "unlink":  # after it was durable
            run.wait()
        else:
            for saver in run.savers:
                with pytest.raises(
                    PacelineError, match=r"checkpoint writer of .* (was killed by signal 9|closed its conn)"
                ):
                    saver.wait()
            assert ("failed", 20) in run.states
        assert 10 in whole_steps(run.storage) or operation == "unlink"
    with ranks(place, 2, keep=1) as run:
        run.save(30)
        run.wait()
    assert whole_steps(run.storage) == [30]
    left = {path.name for path in place.iterdir()} - {"step-00000030", ".writer-0.lock"}
    assert left <= {"quarantine"}
