"""Known faults of saving, in a whole command that starts again after failures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher
from tests.pool.pool import ROOT

from paceline.run.records import read_records

WORDS = [
    "train", *SMALL, "parallel.compile=false", "parallel.precision=fp32", "run.steps=4", "checkpoint.every=2",
    "recovery.stall_timeout=5s", "--procs", "2",
]  # fmt: skip

HOOKS = """
import os, signal, sys, time
words = sys.orig_argv
if "paceline.checkpoint.writer" in words:
    from paceline.checkpoint import storage

    def hook(operation, path):
        if operation == "rename" and path.endswith("step-00000004/COMMIT"):
            time.sleep(SECONDS)

    storage.on_operation = hook
elif "paceline.workers.boot" in words and os.environ["RANK"] == "1":
    from paceline.checkpoint.storage_local import LocalStorage

    LocalStorage.exists = lambda storage, name: False
    if os.environ["PACELINE_ATTEMPT"] == "1":
        from paceline.workers import heartbeat

        beat = heartbeat.beat

        def dies(step, phase, allow_seconds=0.0):
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            beat(step, phase, allow_seconds)

        heartbeat.beat = dies
"""
"""In the writer the last mark takes SECONDS. For rank 1 nothing exists that it asks for, and its first life is short."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "site").mkdir()
    return tmp_path


def hooked(folder: Path, seconds: float) -> dict[str, str]:
    (folder / "site" / "sitecustomize.py").write_text(HOOKS.replace("SECONDS", str(seconds)))
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder / "site", ROOT, ROOT / "src")))}


# BL-44 BL-45
@pytest.mark.limit(100)
def test_a_save_slower_than_a_collective_may_wait_goes_on_and_no_rank_asks_the_file_system_itself(
    launch: Launcher, text: Path
) -> None:
    done = launch(WORDS, timeout=90, env=hooked(text, 6.0))
    assert done.returncode == 0, done.stderr
    run = text / "runs" / "default"
    assert [r["step"] for r in read_records(run, kinds=("run_started",))] == [0, 2], (
        "resumed by both ranks after a kill"
    )
    assert "signal 9" in next(read_records(run, kinds=("fault",)))["message"]
    assert "Stalled" not in done.stderr and (run / "checkpoints/step-00000004/COMMIT").exists()
    (durable,) = [r for r in read_records(run, kinds=("checkpoint",)) if r["step"] == 4 and r["state"] == "durable"]
    (finished,) = read_records(run, kinds=("run_finished",))
    assert durable["seconds"] > 6.0 and finished["time"] >= durable["time"], "no rank is done before the mark is there"


# BL-44
@pytest.mark.limit(100)
def test_a_save_slower_than_the_storage_may_be_ends_the_run_and_names_rank_path_and_phase(
    launch: Launcher, text: Path
) -> None:
    done = launch([*WORDS, "checkpoint.storage_timeout=2s"], timeout=90, env=hooked(text, 8.0))
    assert done.returncode not in (0, 76), done.stderr
    last = done.stderr[done.stderr.rindex("paceline: ") :]
    place = re.escape(str(text / "runs/default/checkpoints"))
    assert re.search(rf"waited 2\.\d+ s for the checkpoint write of rank 0 on \S+: step 4, .*, in {place}", last), last
    assert "all_reduce" not in last and "checkpoint.storage_timeout" in last
    assert list(read_records(text / "runs/default", kinds=("run_finished",)))[-1]["attempt"] == 2, "no further attempt"
    assert launch.left_over(15.0) == {}, "the writer ends with its save"
