"""Known faults of launching, with real ranks over Gloo."""

from __future__ import annotations

import os

import pytest
from tests.pool.launch import Completed, Launcher

pytestmark = pytest.mark.limit(110)
SUPERVISOR = "tests.workers.supervisor"
PROGRAMS = "tests.workers.programs"


def steps(launch: Launcher, rank: int, how: str, *rest: str, procs: int = 4) -> Completed:
    words = ["--procs", str(procs), "steps", *rest]
    if how:
        words = ["--procs", str(procs), "steps", str(rank), how, *rest]
    return launch(words, module=SUPERVISOR, timeout=90)


# BL-74
def test_the_first_failure_stands_at_the_end_with_one_traceback(launch: Launcher) -> None:
    done = steps(launch, 2, "raise")
    end = "\n".join(done.stderr.splitlines()[-20:])
    assert done.returncode == 1
    assert "rank 2 of 4 raised ValueError at step 3: bad sample 17" in end and "programs.py:" in end
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "closed by peer" not in done.stderr


# BL-74
def test_a_rank_killed_by_a_signal_is_named_with_it(launch: Launcher) -> None:
    done = steps(launch, 1, "SIGKILL", procs=2)
    assert done.returncode == 1
    assert (
        "rank 1 of 2 was ended at step 3 by signal 9 (SIGKILL): killed from outside, likely out of memory"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


# BL-74
def test_a_rank_that_never_arrives_is_named_with_step_and_collective(launch: Launcher) -> None:
    done = steps(launch, 2, "sleep", "3", procs=3)
    assert done.returncode == 76
    last = done.stderr[done.stderr.index("paceline:") :]
    assert "ranks 0, 1 waited in vain at step 3 while reducing gradients: all_reduce number 4" in last
    assert "rank 2 did not arrive (rank 2 last seen at step 3 in 'forward')" in last
    assert "time.sleep" not in last and "in fail" in done.stderr


# BL-70
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.soak, pytest.mark.limit(600)])])
def test_jobs_started_at_the_same_moment_do_not_meet(launch: Launcher, rounds: int) -> None:
    for _ in range(rounds):
        both = [launch.start(["--procs", "2", "steps"], module=SUPERVISOR) for _ in range(2)]
        ended = [running.wait(60) for running in both]
        assert [done.returncode for done in ended] == [0, 0], ended
        assert all("2 ranks done" in done.stderr for done in ended)


# BL-83
def test_an_openmp_runtime_that_binds_the_process_is_said(launch: Launcher) -> None:
    env = {"OMP_PROC_BIND": "close", "OMP_PLACES": "{0}"}
    bound = launch(["--procs", "1", "bound_mask"], module=SUPERVISOR, timeout=60, env=env)
    assert bound.returncode == 0, bound.stderr
    if len(os.sched_getaffinity(0)) > 1:
        assert "OMP_PROC_BIND=close" in bound.stderr and "bound this process to CPUs 0 of its" in bound.stderr


def test_the_same_program_joins_under_torchrun(launch: Launcher) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "-m", PROGRAMS, "steps"]
    done = launch(words, module="torch.distributed.run", timeout=80)
    assert done.returncode == 0, done.stderr
    assert "2 ranks done" in done.stdout


def test_alone_it_is_a_world_of_one(launch: Launcher) -> None:
    done = launch(["steps"], module=PROGRAMS, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 ranks done" in done.stdout
    assert "warning" not in done.stderr
