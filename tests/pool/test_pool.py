"""The pool itself: fresh groups, named failures, replaced processes, stacks of a hang."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.errors import JobError
from tests.pool.launch import Launcher
from tests.pool.limit import limited
from tests.pool.pool import Pool, RankDied, RankFailed, RanksHung


def sum_of_ranks(rank: int, world_size: int, scale: float) -> torch.Tensor:
    value = torch.tensor([float(rank) * scale])
    dist.all_reduce(value)
    return value


def leave_traces(rank: int, world_size: int) -> tuple[int, int, float, torch.dtype, str | None]:
    seen = (
        os.getpid(),
        dist.get_world_size(),
        torch.rand(()).item(),
        torch.get_default_dtype(),
        os.environ.get("TRACE"),
    )
    torch.set_default_dtype(torch.float64)
    os.environ["TRACE"] = "left"
    dist.new_group([0])
    return seen


def refuse(rank: int, world_size: int, guilty: int) -> None:
    if rank == guilty:
        raise JobError("bad sample 17", key="data.source")
    dist.barrier()


def assert_on_rank(rank: int, world_size: int) -> None:
    found = rank * 10
    assert found == 0


def die(rank: int, world_size: int, guilty: int, how: str) -> None:
    if rank == guilty:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_here(rank: int, world_size: int, stop_rank: int | None) -> None:
    # A group that waits longer than the call may take: the default one would give up first on a fast machine.
    patient = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.barrier(patient)
    if rank == stop_rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        time.sleep(60)
    dist.barrier(patient)


def read_variable(rank: int, world_size: int) -> str | None:
    return os.environ.get("GIVEN")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_returns_its_result(pool: Pool, world_size: int) -> None:
    results = pool.run(sum_of_ranks, world_size, 2.0)
    assert [r.item() for r in results] == [sum(range(world_size)) * 2.0] * world_size


def test_calls_share_processes_but_nothing_else(pool: Pool) -> None:
    first = pool.run(leave_traces, 2)
    second = pool.run(leave_traces, 2)
    assert first == second
    assert first[0][1:] == (2, first[1][2], torch.float32, None)


def test_variables_last_one_call(pool: Pool) -> None:
    assert pool.run(read_variable, 2, env={"GIVEN": "yes"}) == ["yes", "yes"]
    assert pool.run(read_variable, 2) == [None, None]


def test_a_failure_names_the_first_rank_and_keeps_its_exception(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 3 raised[\s\S]*in refuse[\s\S]*bad sample 17") as caught:
        pool.run(refuse, 3, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, JobError) and caught.value.exception.key == "data.source"
    assert pool.run(sum_of_ranks, 3, 1.0)[0].item() == 3.0


def test_a_failed_assert_shows_the_values(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="found = 10"):
        pool.run(assert_on_rank, 2)


@pytest.mark.parametrize(("how", "reason"), [("exit", "exited with code 3"), ("kill", r"signal 9 \(SIGKILL\)")])
def test_a_crash_is_named_and_the_process_replaced(pool: Pool, how: str, reason: str) -> None:
    before = pool.run(leave_traces, 2)[1][0]
    with pytest.raises(RankDied, match=f"rank 1 of 2 .*{reason}"):
        pool.run(die, 2, 1, how)
    assert pool.run(leave_traces, 2)[1][0] != before


def test_a_hang_shows_the_stack_of_every_rank(pool: Pool) -> None:
    with pytest.raises(RanksHung) as caught:
        pool.run(hang_here, 3, 2, timeout=3)
    first, second, third = caught.value.stacks
    assert "in hang_here" in first and "in barrier" not in first
    assert "in barrier" in second and "in hang_here" in second
    assert "T (stopped)" in third
    assert "ranks [0, 1, 2] did not finish in 3 s" in str(caught.value)
    assert pool.run(sum_of_ranks, 1, 1.0)[0].item() == 0.0


def test_the_limit_fails_a_test_with_its_stacks() -> None:
    with pytest.raises(pytest.fail.Exception) as caught, limited(0.2, sys.stderr, lambda: "stacks of the ranks"):
        _sleep_too_long()
    assert "longer than its limit of 0.2 s" in str(caught.value)
    assert "_sleep_too_long" in str(caught.value) and "stacks of the ranks" in str(caught.value)


def _sleep_too_long() -> None:
    time.sleep(30)


def test_a_process_left_over_is_found_and_killed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    (tmp_path / "parent.py").write_text(script)
    done = launcher([], module="parent", timeout=20)
    assert done.returncode == 0
    assert len(launcher.left_over(grace=0.1)) == 1
    assert launcher.left_over() == {}


def test_a_command_over_its_limit_is_named_with_its_output(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    (tmp_path / "slow.py").write_text("import time; print('so far', flush=True); time.sleep(60)")
    running = launcher.start(["--option"], module="slow")
    running.until("so far")
    with pytest.raises(AssertionError, match=r"slow --option did not end in 0 s[\s\S]*so far"):
        running.wait(0.1)
    assert launcher.left_over(grace=0)
