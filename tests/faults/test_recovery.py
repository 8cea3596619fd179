"""A real run outlives what is killed inside it: R2, R21 and R22, a drawn handful here and a hundred in `make soak`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.cli.job import SMALL, TEXT
from tests.faults import storm
from tests.faults.storm import Storm
from tests.pool.launch import TOKEN, Launcher
from tests.pool.proc import carrying
from tests.train.attempts import left

from paceline.run.records import read_records

WORDS = [
    "train", *SMALL, "parallel.compile=false", "parallel.precision=fp32", "model.dropout=0.1", "run.record_samples=true",
    "run.log_every=1", "checkpoint.every=5", "data.workers=1", "recovery.backoff=100ms", "--procs", "2",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text to train on, and a temporary folder of the commands' own."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


def assert_nothing_left(launch: Launcher, folder: Path, before: set[str]) -> None:
    assert launch.left_over(10.0) == {}
    assert {name for name in storm.shared_memory() - before if not name.startswith("sem.")} == set()
    assert list((folder / "tmp").iterdir()) == []


def storming(
    launch: Launcher, text: Path, count: int, steps: int, seed: int, timeout: float, targets: tuple[str, ...]
) -> None:
    """A run with `count` kills beside one without: the same weights, curve and samples, and nothing left behind."""
    print(f"seed {seed}")
    before = storm.shared_memory()
    straight = launch([*WORDS, f"run.steps={steps}", "run.name=straight"], timeout=timeout)
    assert straight.returncode == 0, straight.stderr
    running = launch.start([*WORDS, f"run.steps={steps}", "run.name=stormy", "--json"])
    run_dir = text / "runs" / "stormy"
    kills = Storm(running, launch.token, run_dir, seed, targets).rage(count, timeout)
    done = running.wait(timeout)
    assert done.returncode == 0, f"{kills}\n{done.stderr[-6000:]}"
    one, other = left(text / "runs" / "straight"), left(run_dir)
    assert other.tensors == one.tensors, "the final weights are those of the run without kills, bit for bit"
    assert (other.curve, other.samples) == (one.curve, one.samples)
    assert storm.redone_beyond_a_save(run_dir) == []
    deaths = [kill for kill in kills if kill.target in ("rank", "loader")]
    faults = list(read_records(run_dir, kinds=("fault",)))
    # One that dies while its attempt is being ended is no fault of its own.
    assert len(deaths) >= len(faults) >= min(1, len(deaths))
    assert json.loads(done.stdout)["attempts"] == len(faults) + 1
    assert_nothing_left(launch, text, before)
    print(f"{len(kills)} kills, {sum(kill.in_save for kill in kills)} inside a save, {len(faults)} faults: {kills}")


# R2 R22
@pytest.mark.limit(150)
def test_a_drawn_handful_of_kills_leaves_the_same_weights_and_nothing_else(launch: Launcher, text: Path) -> None:
    targets = ("rank", "rank", "writer", "loader")
    storming(launch, text, 4, 200, int(os.environ.get("PACELINE_SEED", time.time_ns() % 10**6)), 100.0, targets)


# R2 R22
@pytest.mark.soak
@pytest.mark.limit(2400)
def test_a_hundred_kills_leave_the_same_weights_and_nothing_else(launch: Launcher, text: Path) -> None:
    kills = int(os.environ.get("PACELINE_KILLS", 100))
    seed = int(os.environ.get("PACELINE_SEED", time.time_ns() % 10**6))
    storming(launch, text, kills, 60 * kills, seed, 2200.0, ("rank",))


# R22
def test_a_killed_launcher_in_a_real_run_leaves_nothing(launch: Launcher, text: Path) -> None:
    before = storm.shared_memory()
    running = launch.start([*WORDS, "run.steps=100000"])
    running.until("step 12/", timeout=60)
    running.signal(signal.SIGKILL)
    running.wait(5)
    assert_nothing_left(launch, text, before)


# R22
def test_a_killed_writer_costs_its_save_and_nothing_else(launch: Launcher, text: Path) -> None:
    before = storm.shared_memory()
    running = launch.start([*WORDS, "run.steps=120", "--json"])
    run_dir = text / "runs" / "default"
    (kill,) = Storm(running, launch.token, run_dir, 0, ("writer",), share_in_saves=1.0).rage(1, 60.0)
    done = running.wait(60)
    assert done.returncode == 0 and json.loads(done.stdout)["attempts"] == 1, done.stderr
    records = list(read_records(run_dir, kinds=("checkpoint", "fault")))
    failed = [r for r in records if r.get("state") == "failed"]
    assert kill.in_save and len(failed) == 1 and "was killed by signal 9, while" in failed[0]["reason"]
    assert f"the checkpoint of step {failed[0]['step']} was NOT saved, training goes on" in done.stderr
    later = [r["step"] for r in records if r.get("state") == "durable" and r["step"] > failed[0]["step"]]
    assert later[-1] == 120 and not any(r["kind"] == "fault" for r in records)
    assert_nothing_left(launch, text, before)


def test_a_signal_to_every_process_of_a_run_that_ends_is_no_reason_to_wait(launch: Launcher, text: Path) -> None:
    running = launch.start([*WORDS, "run.steps=6"])
    running.until("step 6/6", timeout=60)
    for pid in carrying(TOKEN, launch.token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    done = running.wait(30)
    assert done.returncode in (0, 75) and "were killed" not in done.stderr, done.stderr
    assert (text / "runs/default/checkpoints/step-00000006/COMMIT").exists()
