"""Verdicts, heartbeats, stacks and sections: what a worker leaves for its supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from paceline.config import Setting, build
from paceline.errors import JobError
from paceline.workers import environment, heartbeat, verdict
from paceline.workers.config import LaunchSection, RecoverySection
from paceline.workers.oom import oom_kills
from paceline.workers.signals import signal_reason


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return tmp_path


def fail() -> int:
    raise ValueError("bad sample 17")


def test_a_verdict_keeps_error_step_place_and_traceback(folder: Path) -> None:
    heartbeat.beat(4, "forward")
    try:
        fail()
    except ValueError as error:
        verdict.write_verdict(1, error)
    found = verdict.read_verdicts(folder)[1]
    assert (found.exit, found.step, found.phase, found.cause) == (1, 4, "forward", "own")
    assert found.error == {"kind": "ValueError", "message": "bad sample 17"}
    assert found.where is not None and found.where.startswith(__file__)
    assert found.traceback is not None and found.traceback.count("in fail") == 1


def test_the_first_verdict_stands(folder: Path) -> None:
    verdict.write_verdict(78, JobError("wrong", key="a.b"))
    verdict.write_verdict(0)
    found = verdict.read_verdicts(folder)[1]
    error = verdict.error_of(found)
    assert found.exit == 78 and found.traceback is None
    assert isinstance(error, JobError) and error.key == "a.b"


def test_half_written_and_foreign_files_are_no_verdicts(folder: Path) -> None:
    (folder / "rank-0.verdict.json").write_text('{"rank": 0, "ho')
    (folder / "rank-2.verdict.json").write_text('{"other": 1}')
    assert verdict.read_verdicts(folder) == {}


def test_without_a_supervisor_nothing_is_written_and_the_error_passes(tmp_path: Path) -> None:
    verdict.write_verdict(1, ValueError("x"))
    with pytest.raises(ValueError, match="bad sample 17"):
        verdict.reported(fail)
    assert verdict.reported(lambda: 3) == 3


def test_a_beat_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.beat"
    assert heartbeat.read(path) is None
    heartbeat.open_file(path)
    try:
        assert heartbeat.read(path) is None
        heartbeat.beat(7, "x" * 100, allow_seconds=2.5)
        heartbeat.beat(8, "évaluer")
        beat = heartbeat.read(path)
        assert beat is not None and (beat.step, beat.phase, beat.allow_seconds, beat.beats) == (8, "évaluer", 0.0, 2)
        assert heartbeat.last() == (8, "évaluer")
    finally:
        heartbeat._pages.clear()
        heartbeat.beat(-1, "starting")


def test_beats_are_never_read_half_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.beat"
    heartbeat.open_file(path)
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            heartbeat.beat(step, f"phase {step}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [heartbeat.read(path) for _ in range(200)]
    finally:
        stop.set()
        writer.join()
        heartbeat._pages.clear()
        heartbeat.beat(-1, "starting")
    whole = [beat for beat in seen if beat is not None]
    assert len(whole) > 20
    assert all(beat.phase == f"phase {beat.step}" for beat in whole)


def test_the_sections_take_auto_and_units() -> None:
    settings = {"launch.port": Setting("auto", "t"), "recovery.stall_timeout": Setting("60s", "t")}
    built = build({"launch": LaunchSection, "recovery": RecoverySection}, settings)
    recovery = built["recovery"]
    assert isinstance(recovery, RecoverySection)
    assert (recovery.stall_seconds, recovery.collective_seconds) == (60.0, 90.0)
    assert RecoverySection().stall_seconds == 600.0
    assert msgspec.structs.asdict(LaunchSection())["port"] is None
    wrong = {"procs_per_node": 0, "port": 70000, "affinity": "core"}
    for key, value in {f"launch.{name}": value for name, value in wrong.items()}.items():
        with pytest.raises(JobError, match=key.partition(".")[2] if value == 0 else key):
            build({"launch": LaunchSection}, {key: Setting(value, "t")})
    with pytest.raises(JobError, match="no unit"):
        build({"recovery": RecoverySection}, {"recovery.stall_timeout": Setting(60, "t")})
    for key, text in {"max_restarts": -1, "grace": "0s", "on_stall": "wait", "backoff": "soon"}.items():
        with pytest.raises(JobError, match=key if text != "0s" else "leaves no time to save"):
            build({"recovery": RecoverySection}, {f"recovery.{key}": Setting(text, "t")})


def test_signals_are_told_by_number_name_and_meaning() -> None:
    assert signal_reason(9) == "signal 9 (SIGKILL): killed from outside, likely out of memory"
    assert "shared memory" in signal_reason(signal.SIGBUS)
    assert signal_reason(63).startswith("signal 63")


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/job\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    assert oom_kills(tmp_path, membership) is None
    (tmp_path / "memory" / "job" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path, membership) == 2
    membership.write_text("0::/new\n")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "memory.events").write_text("low 0\noom_kill 3\n")
    assert oom_kills(tmp_path, membership) == 3


def test_the_launcher_s_side_imports_no_torch() -> None:
    modules = [
        "start",
        "watch",
        "config",
        "affinity",
        "verdict",
        "heartbeat",
        "stacks",
        "boot",
        "environment",
        "barrier",
    ]
    script = f"import sys; {'; '.join(f'import paceline.workers.{m}' for m in modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "False"
