"""Starting and watching real processes; most of them import no torch, so that the suite stays fast."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from tests.pool.launch import Completed, Launcher, Running

pytestmark = pytest.mark.limit(60)


def run(launch: Launcher, *words: str, procs: int = 2, timeout: float = 40.0, **env: str) -> Completed:
    return launch(["--procs", str(procs), *words], module="tests.workers.supervisor", timeout=timeout, env=env)


def begin(launch: Launcher, *words: str, procs: int = 2) -> Running:
    return launch.start(["--procs", str(procs), *words], module="tests.workers.supervisor")


def test_workers_get_torchrun_s_environment(launch: Launcher) -> None:
    done = run(launch, "show_environment", OMP_NUM_THREADS="")
    shown = [json.loads(line[line.index("{") :]) for line in done.stderr.splitlines() if "{" in line]
    assert done.returncode == 0 and len(shown) == 2
    shown.sort(key=lambda one: one["RANK"])
    for rank, one in enumerate(shown):
        assert (one["RANK"], one["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) == ("2", "2", "0")
        assert one["MASTER_ADDR"] == "127.0.0.1"
        assert one["args"][1:] == ["show_environment"]


# BL-83
def test_the_mask_is_in_force_and_the_user_s_is_respected(launch: Launcher) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    done = launch(
        ["--procs", "4", "show_environment"],
        module="tests.workers.supervisor",
        prefix=["taskset", "-c", str(allowed[0])],
    )
    shown = [json.loads(line[line.index("{") :]) for line in done.stderr.splitlines() if "{" in line]
    assert [one["mask"] for one in shown] == [[allowed[0]]] * 4
    assert {one["OMP_NUM_THREADS"] for one in shown} == {"1"}
    if len(allowed) >= 2:
        done = run(launch, "show_environment", procs=2)
        masks = [json.loads(line[line.index("{") :])["mask"] for line in done.stderr.splitlines() if "{" in line]
        assert len(masks) == 2 and not set(masks[0]) & set(masks[1])


# BL-93
def test_output_of_all_ranks_is_one_stream_on_stderr(launch: Launcher) -> None:
    done = run(launch, "talk", procs=4)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1:] == []
    assert done.stderr.count("the same on all") == 1
    assert done.stderr.count("a native warning") == 1
    assert "\rstep 1\rstep 2\rstep 3\n" in done.stderr
    assert re.search(r"\[rank 3\] .*only here", done.stderr)


# BL-74
def test_an_exception_nobody_handles_is_told_once_and_last(launch: Launcher) -> None:
    done = run(launch, "raise_outside")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(r"rank \d of 2 raised ValueError.*not handled by anyone \(.*programs\.py:\d+\)", last)


def test_a_refusal_of_one_rank_keeps_its_exit_code_and_has_no_traceback(launch: Launcher) -> None:
    done = run(launch, "refuse_without_torch")
    assert done.returncode == 78
    assert done.stderr == "paceline: data.sequence_length: rank 1: sample 17 is longer than 128\n  Raise it.\n"


def test_ctrl_c_reaches_the_supervisor_alone_and_leaves_130(launch: Launcher) -> None:
    running = begin(launch, "wait_for_ever", "plain")
    running.until("waiting")
    running.signal_all(signal.SIGINT)
    done = running.wait(15)
    assert done.returncode == 130
    assert done.stderr.count("stopping 2 workers") == 1
    assert "interrupted by Ctrl-C; nothing was saved" in done.stderr and "Traceback" not in done.stderr


def test_sigterm_is_passed_on_and_the_workers_verdict_is_the_result(launch: Launcher) -> None:
    running = begin(launch, "wait_for_ever", "saves")
    running.until("waiting")
    running.signal(signal.SIGTERM)
    done = running.wait(15)
    assert done.returncode == 75
    assert "interrupted at step 0; saved" in done.stderr and "Traceback" not in done.stderr


def test_a_second_ctrl_c_leaves_at_once(launch: Launcher) -> None:
    running = begin(launch, "--stop", "40", "wait_for_ever", "deaf")
    running.until("waiting")
    running.signal(signal.SIGINT)
    running.until("once more to leave at once")
    running.signal(signal.SIGINT)
    done = running.wait(15)
    assert done.returncode == 130 and done.seconds < 30


def test_stopped_and_deaf_workers_are_killed_after_their_time(launch: Launcher) -> None:
    running = begin(launch, "--stop", "0.5", "wait_for_ever", "stopped")
    running.until("waiting")
    time.sleep(0.3)
    running.signal(signal.SIGTERM)
    done = running.wait(15)
    assert done.returncode == 130
    assert "ranks 1 did not stop in 500 ms and were killed" in done.stderr


def test_workers_die_with_a_killed_supervisor(launch: Launcher) -> None:
    running = begin(launch, "wait_for_ever", "deaf")
    running.until("waiting")
    pids = [int(word) for word in running.stdout.split("pids ")[1].split("\n")[0].split()]
    running.signal(signal.SIGKILL)
    running.wait(10)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not launch.left_over()


def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_supervisor(launch: Launcher) -> None:
    done = run(launch, "leave_a_child", procs=1)
    assert done.returncode == 0
    assert launch.left_over(grace=5.0) == {}


def test_silence_of_all_ranks_is_a_stall_that_names_the_rank_behind(launch: Launcher) -> None:
    done = run(launch, "--stall", "1.5", "silent", procs=3)
    assert done.returncode == 76
    assert "paceline: stalled: rank 1 of 3 on" in done.stderr and "step 7, 'training step'" in done.stderr
    last = done.stderr[done.stderr.index("paceline: recovery.stall_timeout: no progress for") :]
    assert "rank 1 on" in last and "at step 7 in 'training step': does nothing at" in last and "in silent" in last


def test_a_rank_that_never_joins_is_named(launch: Launcher) -> None:
    done = run(launch, "--start", "1.5", "never_joins", procs=2)
    assert done.returncode == 76
    assert "1 of 2 workers did not join in 1.50 s: rank 1 (importing)" in done.stderr
    assert "recovery.start_timeout" in done.stderr


# BL-70
def test_a_port_in_use_is_refused_with_the_process_that_holds_it(launch: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = run(launch, "--port", str(port), "show_environment", timeout=10)
    assert done.returncode == 78
    assert f"launch.port: port {port} is already in use by process {os.getpid()}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_whole_output_of_each_rank_is_kept_where_asked(launch: Launcher, tmp_path: Path) -> None:
    assert run(launch, "--logs", "logs", "talk", procs=2).returncode == 0
    assert "the same on all" in (tmp_path / "logs" / "rank-1.log").read_text()
