"""The launcher over several attempts, with workers that only pretend to train: no torch, a fraction of a second each."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.run.directory import LEASE_FILE
from paceline.run.lease import Holder, read_holder
from paceline.run.records import read_records
from tests.cli.job import SMALL
from tests.pool.launch import Completed, Launcher, Running

pytestmark = pytest.mark.limit(60)


def begin(launch: Launcher, plan: dict[int, str], *words: str) -> Running:
    text = json.dumps({str(attempt): what for attempt, what in plan.items()})
    job = [*SMALL, "run.steps=20", "launch.procs_per_node=2", "recovery.backoff=50ms", *words]
    if {"recovery.max_restarts=0", "recovery.max_restarts=1"} & {*words}:
        job.remove("recovery.backoff=50ms")
    return launch.start([text, *job], module="tests.train.pretended")


def train(launch: Launcher, plan: dict[int, str], *words: str) -> Completed:
    return begin(launch, plan, *words).wait(30)


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return list(read_records(folder / "runs" / "default", kinds=kinds))


def left_in(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "tmp").iterdir())


@pytest.fixture
def launch(launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Commands that have a temporary folder of their own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return launch


# BL-75
def test_a_failure_that_passes_costs_one_restart_and_is_on_record(launch: Launcher, tmp_path: Path) -> None:
    done = train(launch, {1: "raise@7"})
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["attempts"], summary["steps"], summary["exit"]) == (2, 20, 0)
    assert [r["step"] for r in records(tmp_path, "run_started")] == [0, 5]
    (fault,), (restart,) = records(tmp_path, "fault"), records(tmp_path, "restart")
    assert (fault["rank"], fault["kind_of_fault"], fault["step"], fault["attempt"]) == (1, "WorkerFailed", 7, 1)
    assert "bad sample" in fault["evidence"] and "bad sample" in restart["reason"]
    assert restart["attempt"] == 1 and restart["next_attempt"] == 2 and 0 <= restart["seconds"] < 20
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert re.search(r"rank 1 of 2 raised ValueError at step 7: bad sample .*; starting attempt 2$", done.stderr, re.M)
    assert left_in(tmp_path) == []


# BL-75
def test_a_worker_that_dies_before_its_first_step_is_tried_twice(launch: Launcher, tmp_path: Path) -> None:
    done = train(launch, dict.fromkeys(range(1, 9), "raise"), "recovery.max_restarts=5")
    assert done.returncode == 93 and done.seconds < 20
    assert [r["next_attempt"] for r in records(tmp_path, "restart")] == [2]
    assert (
        "twice the same failure, and no step after the restart; the first failure was: rank 1 of 2 raised"
        in done.stderr
    )
    # Once when it came, and once more at the end, where it is looked for.
    tracebacks = re.findall(r"^Traceback.*?ValueError: bad sample (\d+)$", done.stderr, re.M | re.S)
    assert len(tracebacks) == 2 and len(set(tracebacks)) == 1
    assert [(r["exit"], r["attempt"]) for r in records(tmp_path, "run_finished")] == [(93, 2)]
    assert left_in(tmp_path) == []


# BL-75 R21
def test_the_same_failure_at_the_same_step_ends_at_the_third_with_the_first_traceback(
    launch: Launcher, tmp_path: Path
) -> None:
    done = train(launch, dict.fromkeys(range(1, 9), "raise@7"), "recovery.max_restarts=5")
    assert done.returncode == 93
    assert [r["step"] for r in records(tmp_path, "run_started")] == [0, 5, 5]
    assert "three times the same failure at the same step (7)" in done.stderr
    tracebacks = re.findall(r"^Traceback.*?ValueError: bad sample (\d+)$", done.stderr, re.M | re.S)
    assert len(tracebacks) == 2 and tracebacks[0] == tracebacks[1]
    assert done.stderr.count("the same failure again: ") == 1 and "starting attempt 3 in 50.0 ms" in done.stderr
    # Whoever has mended the code goes on.
    again = train(launch, {}, "recovery.max_restarts=5")
    assert again.returncode == 0, again.stderr
    assert [r["step"] for r in records(tmp_path, "run_started")] == [0, 5, 5, 5]


# R21
def test_different_failures_without_a_new_step_end_the_run_too(launch: Launcher, tmp_path: Path) -> None:
    done = train(
        launch, {1: "raise@7", 2: "other@6", 3: "SIGKILL@6", 4: "exit@5", 5: "raise@7"}, "recovery.max_restarts=5"
    )
    assert done.returncode == 93
    assert (
        "3 attempts without a new step after step 7; the first failure was: rank 1 of 2 raised ValueError"
        in done.stderr
    )
    assert len(records(tmp_path, "restart")) == 3 and len(records(tmp_path, "fault")) == 4
    assert left_in(tmp_path) == []


def test_each_new_step_renews_the_budget(launch: Launcher, tmp_path: Path) -> None:
    plan = {n: f"{what}@{5 * n + 1}" for n, what in enumerate(("SIGKILL", "raise", "exit"), 1)}
    done = train(launch, {**plan, 4: "SIGSEGV@18", 5: "raise@19"}, "recovery.max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attempts"] == 6
    assert [r["rank"] for r in records(tmp_path, "fault")] == [1] * 5


@pytest.mark.parametrize(
    ("what", "words", "code", "text"),
    [
        ("refuse@7", (), 78, "sample 17 is longer than 128"),
        ("policy@7", (), 1, "5 steps in a row were not finite"),
        ("raise@7", ("recovery.max_restarts=0",), 1, "rank 1 of 2 raised ValueError"),
        ("exit", ("recovery.max_restarts=0",), 1, "ended with exit code 5"),
    ],
)
def test_what_would_be_found_again_is_not_tried_again(
    launch: Launcher, tmp_path: Path, what: str, words: tuple[str, ...], code: int, text: str
) -> None:
    done = train(launch, {1: what}, *words)
    assert done.returncode == code and text in done.stderr, done.stderr
    assert records(tmp_path, "restart") == [] and len(records(tmp_path, "fault")) == 1
    assert [r["exit"] for r in records(tmp_path, "run_finished")] == [code]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_during_the_wait_ends_the_command_at_once(launch: Launcher, tmp_path: Path, number: int) -> None:
    running = begin(launch, {1: "raise@3", 2: "other@3"}, "recovery.backoff=30s", "recovery.max_restarts=5")
    running.until("starting attempt 3 in 30.0 s")
    running.signal_all(number)
    done = running.wait(5)
    assert done.returncode in (75, 130) and "Traceback" not in done.stderr[done.stderr.index("starting attempt 3") :]
    assert [r["exit"] for r in records(tmp_path, "run_finished")] == [done.returncode]
    assert left_in(tmp_path) == [] and not (tmp_path / "runs/default" / LEASE_FILE).exists()


# R22
def test_a_killed_launcher_leaves_nothing_and_the_next_one_goes_on(launch: Launcher, tmp_path: Path) -> None:
    running = begin(launch, {1: "wait@7"})
    running.until("waiting")
    running.signal(signal.SIGKILL)
    running.wait(5)
    assert launch.left_over(10.0) == {} and left_in(tmp_path) == []
    done = train(launch, {1: "wait@7"})
    assert done.returncode == 0, done.stderr
    assert "took over" in done.stderr and "that process is gone" in done.stderr
    assert [r["step"] for r in records(tmp_path, "run_started")] == [0, 5]


# R23
def test_a_run_whose_lease_was_taken_ends_its_workers_and_leaves_the_other_alone(
    launch: Launcher, tmp_path: Path
) -> None:
    running = begin(launch, {1: "wait@7"})
    running.until("waiting")
    lease = tmp_path / "runs" / "default" / LEASE_FILE
    ours = read_holder(lease)
    assert ours is not None
    other = Holder(
        host="elsewhere", namespace="x", pid=4711, process_start="1", attempt=2, since=time.time(), token="t"
    )
    lease.write_bytes(json.dumps({f: getattr(other, f) for f in other.__struct_fields__}).encode())
    done = running.wait(20)
    assert done.returncode == 74 and "held by pid 4711 on elsewhere" in done.stderr
    assert read_holder(lease) == other and left_in(tmp_path) == []
    assert [r["kind"] for r in records(tmp_path, "restart", "run_finished")] == []


# R23
def test_a_directory_held_by_another_host_is_refused_until_it_is_silent(launch: Launcher, tmp_path: Path) -> None:
    assert train(launch, {1: "policy@7"}).returncode == 1
    lease = tmp_path / "runs" / "default" / LEASE_FILE
    other = Holder(host="node-7", namespace="x", pid=4711, process_start="1", attempt=2, since=time.time(), token="t")
    lease.write_bytes(json.dumps({f: getattr(other, f) for f in other.__struct_fields__}).encode())
    done = train(launch, {})
    assert done.returncode == 74 and "held by pid 4711 on node-7 since" in done.stderr and "(attempt 2)" in done.stderr
    assert re.search(r"its last heartbeat is .* old, and it counts as dead after 1m 00s", done.stderr)
    os.utime(lease, (time.time() - 70, time.time() - 70))
    done = train(launch, {})
    assert done.returncode == 0, done.stderr
    assert re.search(r"from pid 4711 on node-7 \(attempt 2\): no heartbeat for 1m 1\ds \(limit 1m 00s\)", done.stderr)
    assert max(r["attempt"] for r in records(tmp_path, "run_started")) == 3
