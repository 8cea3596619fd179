"""All that a command started ends with it, whatever session it is in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import JobError, PacelineError
from paceline.rehearsal import trial
from paceline.workers import processes

TREE = """
import subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    # A session of its own, as the writer of checkpoints has.
    subprocess.Popen([sys.executable, __file__, str(depth - 1)], start_new_session=True)
print("up", flush=True)
time.sleep(300)
"""


def test_a_tree_of_sessions_is_killed_whole(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text(TREE)
    root = subprocess.Popen([sys.executable, str(tmp_path / "tree.py"), "2"], start_new_session=True)
    deadline = time.monotonic() + 30
    while len(found := processes.descendants(root.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == 3 and found[0] == root.pid
    assert processes.kill_all(root) == 3 and root.returncode == -9
    assert not any(processes._lives(pid) for pid in found)


def test_descendants_are_those_of_one_process() -> None:
    assert processes.descendants(os.getpid())[0] == os.getpid()
    assert os.getppid() not in processes.descendants(os.getpid())


def test_a_run_that_fails_is_told_with_its_error_and_exit_code(tmp_path: Path) -> None:
    with pytest.raises(JobError) as raised:
        trial.run_to_end(tmp_path / "straight", ["optimizer.lrr=1"])
    text = str(raised.value)
    assert raised.value.exit_code == 78 and "'straight'" in text and "exit code 78" in text and "optimizer.lr" in text
    assert (tmp_path / "straight.log").exists()
    with pytest.raises(JobError):
        trial.run_until_killed(tmp_path / "killed", ["optimizer.lrr=1"], lambda: False)


def test_a_run_that_dies_without_a_word_is_told_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_TIED", "import os, sys; print('last words', file=sys.stderr); os.abort()")
    with pytest.raises(PacelineError, match="last words") as raised:
        trial.run_to_end(tmp_path / "straight", [])
    assert raised.value.exit_code == 1 and raised.value.values["exit"] == -6


def test_a_copy_ends_at_the_step_of_the_kill_and_shares_the_checkpoints_bytes(tmp_path: Path) -> None:
    source = tmp_path / "killed"
    for step in (5, 10):
        (source / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (source / "checkpoints" / f"step-{step:08d}" / "COMMIT").write_text(str(step))
    (source / "records").mkdir()
    (source / "records" / "a.jsonl").write_text("{}\n")
    trial.copy_run(source, tmp_path / "resumed", 5)
    kept = tmp_path / "resumed" / "checkpoints"
    assert [p.name for p in kept.iterdir()] == ["step-00000005"]
    assert (kept / "step-00000005" / "COMMIT").samefile(source / "checkpoints" / "step-00000005" / "COMMIT")
    assert not (tmp_path / "resumed" / "records" / "a.jsonl").samefile(source / "records" / "a.jsonl")
