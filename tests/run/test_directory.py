"""The run directory: held by one, continued by the same job, refused to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.samples import started, step

from paceline.errors import DiskFull, JobError, RunHeld
from paceline.run.directory import RunDirectory, job_digest, next_free_name
from paceline.run.files import write_atomic
from paceline.run.lease import read_holder
from paceline.run.records import RunFinished, read_records
from paceline.units import Bytes, Seconds

JOB = {"run.steps": 100, "run.log_every": 10, "optimizer.lr": 3e-3, "batch.microbatch": None, "data.source": "stdlib"}
HOLD = """
import sys, time
from pathlib import Path
from paceline.run.directory import RunDirectory
run = RunDirectory.open(Path(sys.argv[1]), "", {"run.steps": 100}, lambda key: True)
print("held", flush=True)
time.sleep(60)
"""


def may_change(key: str) -> bool:
    return key in ("run.steps", "run.log_every")


def opened(path: Path, values: dict[str, Any] = JOB, **options: Any) -> RunDirectory:
    return RunDirectory.open(path, "[run]\nsteps = 100\n", values, may_change, **options)


def finish(run: RunDirectory, code: int = 0) -> None:
    with run.writer() as writer:
        writer.write(started())
        writer.write(RunFinished(step=100, exit=code, reason="all steps done", steps=100, samples=2400))
    run.release()


def test_a_fresh_run_has_its_folders_and_its_job(tmp_path: Path) -> None:
    with opened(tmp_path / "runs" / "tiny") as run:
        assert run.attempt == 1
        assert run.finished is None
        assert run.notes == []
        assert run.job_file.read_text() == "[run]\nsteps = 100\n"
        assert run.checkpoints.is_dir()
        assert json.loads((run.path / "job.json").read_text())["values"] == JOB
        assert run.job_digest == job_digest(JOB)


def test_a_second_opener_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with opened(tmp_path / "tiny"), pytest.raises(RunHeld) as caught:
        opened(tmp_path / "tiny")
    assert caught.value.exit_code == 74
    assert f"pid {os.getpid()} on " in str(caught.value)
    assert "since 20" in str(caught.value)
    assert f"`kill {os.getpid()}`" in str(caught.value)
    opened(tmp_path / "tiny").release()


def test_the_lease_of_a_dead_process_is_taken_over_and_said(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "tiny")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(RunHeld, match=f"pid {process.pid}"):
        RunDirectory.open(tmp_path / "tiny", "", {"run.steps": 100}, may_change)
    process.kill()
    process.wait(timeout=10)
    with RunDirectory.open(tmp_path / "tiny", "", {"run.steps": 100}, may_change) as run:
        assert run.attempt == 2
        assert f"pid {process.pid}" in run.notes[0]
        assert "that process is gone" in run.notes[0]


def test_a_pid_that_was_given_away_again_does_not_hold(tmp_path: Path) -> None:
    run = opened(tmp_path / "tiny")
    holder = read_holder(run.path / "lease.json")
    assert holder is not None
    run.release()
    other = msgspec.structs.replace(holder, process_start="1")
    write_atomic(run.path / "lease.json", msgspec.json.encode(other))
    with opened(tmp_path / "tiny") as again:
        assert "that process is gone" in again.notes[0]


def other_host_holds(run: RunDirectory, silent_seconds: float) -> None:
    path = run.path / "lease.json"
    holder = read_holder(path)
    assert holder is not None
    run.release()
    write_atomic(path, msgspec.json.encode(msgspec.structs.replace(holder, host="elsewhere", pid=1)))
    os.utime(path, (time.time() - silent_seconds,) * 2)


def test_another_host_holds_while_its_heart_beats(tmp_path: Path) -> None:
    other_host_holds(opened(tmp_path / "tiny"), silent_seconds=50)
    with pytest.raises(RunHeld, match="pid 1 on elsewhere"):
        opened(tmp_path / "tiny")


def test_a_stale_lease_of_another_host_is_taken_over_and_said(tmp_path: Path) -> None:
    other_host_holds(opened(tmp_path / "tiny"), silent_seconds=70)
    with opened(tmp_path / "tiny") as run:
        assert "elsewhere" in run.notes[0]
        assert "no heartbeat for 1m 10s (limit 1m 00s)" in run.notes[0]
        run.check_held()


def test_the_heart_beats_and_a_loser_notices(tmp_path: Path) -> None:
    run = opened(tmp_path / "tiny", expires_seconds=0.2)
    path = run.path / "lease.json"
    os.utime(path, (1.0, 1.0))
    deadline = time.monotonic() + 5
    while path.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.stat().st_mtime > 2
    holder = read_holder(path)
    assert holder is not None
    thief = msgspec.structs.replace(holder, token="another", host="elsewhere")
    write_atomic(path, msgspec.json.encode(thief))
    with pytest.raises(RunHeld, match="elsewhere"):
        run.check_held()
    run.release()
    assert read_holder(path) == thief


def test_a_different_job_is_refused_with_the_difference(tmp_path: Path) -> None:
    opened(tmp_path / "tiny").release()
    with pytest.raises(JobError) as caught:
        opened(tmp_path / "tiny", {**JOB, "optimizer.lr": 1e-3, "data.source": "other.txt", "run.steps": 200})
    text = str(caught.value)
    assert caught.value.exit_code == 78
    assert 'data.source: "stdlib" -> "other.txt"' in text
    assert "optimizer.lr: 0.003 -> 0.001" in text
    assert "run.steps" not in text.replace("run.name", "")
    assert "checkpoint.resume=never" in text
    assert 'checkpoint.allow_change=["data.source", "optimizer.lr"]' in text
    with opened(tmp_path / "tiny") as run:
        assert run.changes == []


def test_what_may_change_is_recorded_and_stored(tmp_path: Path) -> None:
    opened(tmp_path / "tiny").release()
    with opened(tmp_path / "tiny", {**JOB, "run.log_every": 5}) as run:
        assert [(change.key, change.old, change.new) for change in run.changes] == [("run.log_every", 10, 5)]
    with opened(tmp_path / "tiny", {**JOB, "run.log_every": 5}) as run:
        assert run.changes == []


def test_units_and_tuples_compare_as_what_they_mean(tmp_path: Path) -> None:
    values = {"a.size": Bytes(8), "a.wait": Seconds(2), "a.betas": (0.9, 0.95), "a.path": Path("x")}
    RunDirectory.open(tmp_path / "tiny", "", values, may_change).release()
    same = {"a.path": "x", "a.betas": [0.9, 0.95], "a.wait": 2.0, "a.size": 8}
    with RunDirectory.open(tmp_path / "tiny", "", same, may_change) as run:
        assert run.changes == []


def test_a_finished_run_says_so_and_is_not_held(tmp_path: Path) -> None:
    finish(opened(tmp_path / "tiny"))
    run = opened(tmp_path / "tiny")
    assert run.finished is not None
    assert run.finished["steps"] == 100
    assert not (run.path / "lease.json").exists()
    longer = opened(tmp_path / "tiny", {**JOB, "run.steps": 200})
    assert longer.finished is None
    assert longer.attempt == 2
    longer.release()


def test_a_run_that_failed_or_goes_on_is_not_finished(tmp_path: Path) -> None:
    finish(opened(tmp_path / "tiny"), code=76)
    run = opened(tmp_path / "tiny")
    assert run.finished is None
    assert run.attempt == 2
    assert run.next_attempt() == 3
    holder = read_holder(run.path / "lease.json")
    assert holder is not None
    assert holder.attempt == 3
    run.release()


def test_a_worker_attaches_to_the_run_of_its_parent(tmp_path: Path) -> None:
    with opened(tmp_path / "tiny") as run:
        worker = RunDirectory.attach(run.path, run.attempt)
        assert (worker.run_id, worker.job_digest, worker.attempt) == (run.run_id, run.job_digest, 1)
        with worker.writer("rank1") as writer:
            writer.write(step(1))
        worker.release()
        assert read_holder(run.path / "lease.json") is not None
    assert len(list(read_records(run.path))) == 1
    with pytest.raises(JobError, match="there is no run in"):
        RunDirectory.attach(tmp_path / "nothing", 1)


def test_the_run_keeps_its_id(tmp_path: Path) -> None:
    with opened(tmp_path / "tiny") as first:
        pass
    with opened(tmp_path / "tiny") as second:
        assert second.run_id == first.run_id


def test_next_free_name(tmp_path: Path) -> None:
    assert next_free_name(tmp_path, "tiny") == "tiny"
    (tmp_path / "tiny").mkdir()
    assert next_free_name(tmp_path, "tiny") == "tiny-2"
    (tmp_path / "tiny-2").mkdir()
    assert next_free_name(tmp_path, "tiny") == "tiny-3"


def test_a_file_where_the_run_should_be(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("")
    with pytest.raises(JobError) as caught:
        opened(tmp_path / "tiny")
    assert str(tmp_path / "tiny") in str(caught.value)
    assert "Not a directory" in str(caught.value) or "File exists" in str(caught.value)


def test_no_space_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull) as caught:
        opened(tmp_path / "tiny")
    assert str(tmp_path / "tiny") in str(caught.value)
    assert "No space left" in str(caught.value)


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "values",
    [
        {"telemetry.wandb_api_key": "abc"},
        {"checkpoint.dir": "s3://me:hunter2@bucket/x"},
        {"data.sources": ["https://u:hunter2@host/a"]},
        {"launch.slurm": {"password": "hunter2"}},
    ],
)
def test_secrets_never_stand_in_a_resolved_job(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(JobError) as caught:
        RunDirectory.open(tmp_path / "tiny", "", values, may_change)
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "tiny").exists()


def test_words_that_only_look_like_secrets_are_fine(tmp_path: Path) -> None:
    values = {"run.tokens": "15e12", "data.tokenizer": "bytes", "checkpoint.dir": "s3://bucket/a:b@c"}
    RunDirectory.open(tmp_path / "tiny", "", values, may_change).release()
