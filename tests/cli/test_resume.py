"""Resume as a user meets it: exit codes, what is said, and runs whose processes were all killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.storage import open_storage
from paceline.run.records import latest_steps, read_records
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import TOKEN, Launcher, Running
from tests.pool.proc import carrying

QUICK = [*SMALL, "parallel.compile=false", "parallel.precision=fp32", "model.dropout=0.1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def checkpoints(folder: Path) -> Path:
    return folder / "runs" / "default" / "checkpoints"


def curve(run: Path) -> dict[int, float]:
    records = list(read_records(run, kinds=("run_started", "step")))
    return {r["step"]: r["loss"] for r in latest_steps(records)}


@pytest.mark.limit(150)
def test_damage_is_passed_over_until_nothing_is_left(launch: Launcher, text: Path) -> None:  # R4
    words = ["train", *QUICK, "--procs", "1", "checkpoint.every=2"]
    assert launch([*words, "run.steps=4"]).returncode == 0
    _flip(checkpoints(text) / "step-00000004" / "rank-00000.safetensors")
    done = launch([*words, "run.steps=6"])
    assert done.returncode == 0, done.stderr
    assert "warning: the checkpoint of step 4 is damaged and was set aside" in done.stderr
    assert "resuming after step 2 from" in done.stderr
    for step in list_steps(open_storage(checkpoints(text))):
        _flip(checkpoints(text) / f"step-{step:08d}" / "rank-00000.safetensors")
    done = launch([*words, "run.steps=8"])
    assert done.returncode == 77 and "none of them is valid" in done.stderr and "Traceback" not in done.stderr
    assert "checkpoint.resume=never" in done.stderr
    assert max(curve(text / "runs" / "default")) == 6
    set_aside = [r["step"] for r in read_records(text / "runs" / "default") if r.get("state") == "quarantined"]
    assert set_aside == [4, 6, 4, 2]  # those of the attempt that ended for it, too


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def torchrun(launch: Launcher, *words: str) -> Running:
    return launch.start(
        [
            "--nproc-per-node",
            "2",
            "--no-python",
            "sh",
            "-c",
            f"exec {sys.executable} -m paceline train {' '.join(words)}",
        ],
        module="torch.distributed.run",
    )


@pytest.mark.limit(150)
def test_ranks_of_torchrun_killed_all_at_once_go_on(launch: Launcher, text: Path) -> None:
    words = [*QUICK, "checkpoint.every=4", "run.log_every=1", "parallel.dp_shard=2", "optimizer.schedule=constant"]
    running = torchrun(launch, *words, "run.steps=100000")
    deadline = time.monotonic() + 60
    while not list_steps(open_storage(checkpoints(text))):
        assert time.monotonic() < deadline and running.process.poll() is None, running.stderr[-3000:]
        time.sleep(0.05)
    _kill_all(launch)
    running.process.wait()
    before = curve(text / "runs" / "default")
    saved = list_steps(open_storage(checkpoints(text)))[-1]
    end = saved + 6
    done = torchrun(launch, *words, f"run.steps={end}").wait(timeout=90)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {saved} from" in done.stderr
    after = curve(text / "runs" / "default")
    assert list(after) == list(range(1, end + 1))
    assert {s: x for s, x in before.items() if s <= end} == {s: after[s] for s in before if s <= end}
    (certificate,) = read_records(text / "runs" / "default", kinds=("certificate",))
    assert certificate["verdict"] in ("exact", "unknown") and certificate["same_layout"]


def _kill_all(launch: Launcher) -> None:
    """Every process of the run with SIGKILL, and so the checkpoint writer too."""
    for pid in carrying(TOKEN, launch.token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ranks_told_of_two_directories_end_at_once(launch: Launcher, text: Path) -> None:  # BL-37
    done = torchrun(launch, *QUICK, "run.steps=4", "run.name=run-$RANK").wait(timeout=60)
    assert done.returncode != 0 and done.seconds < 40
    assert str(text / "runs" / "run-0") in done.stderr and str(text / "runs" / "run-1") in done.stderr
    assert not (text / "runs").exists()
