"""The writer process: it outlives its ranks until what they staged is committed, and not longer; one at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import writer_lock
from paceline.checkpoint.folders import list_steps, read_manifest
from paceline.checkpoint.host_save import DESERTED_SECONDS
from paceline.checkpoint.messages import KeepRule
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.writer_lock import wait_for_old_writer
from paceline.errors import DiskFull, PacelineError
from tests.checkpoint.savers import Ranks, World, equal, head, hooked, odd_tensors, parts, ranks, saved, whole_steps
from tests.pool.pool import ROOT, Pool, RankDied
from tests.pool.proc import process_state


def writer_pid(run: Ranks, rank: int = 0) -> int:
    process = run.savers[rank]._host._process
    assert process is not None
    return process.process.pid


def leave(run: Ranks, rank: int) -> None:
    """What the end of a rank is to its writer: its connection closes."""
    link = run.savers[rank]._host._link
    assert link is not None
    link.close()


def failures(run: Ranks) -> list[str]:
    """The file that each rank's `wait` says there was no room for."""
    files = []

    def wait(rank: int) -> None:
        with pytest.raises(DiskFull, match="no space to write") as error:
            run.savers[rank].wait()
        files.append(Path(str(error.value.values["path"])).stem)

    run.each(wait)
    return files


def await_end(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not process_state(pid).startswith(("gone", "Z")) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process_state(pid).startswith(("gone", "Z"))


def test_the_writer_needs_no_torch_and_nothing_else_that_is_slow_to_start() -> None:
    code = "import sys, paceline.checkpoint.writer as w; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "'paceline'" in out
    assert not [name for name in ("torch", "numpy", "fsspec", "asyncio", "rich", "tomlkit") if f"'{name}'" in out]


def test_the_writer_ends_with_its_ranks(place: Path) -> None:
    with ranks(place, 2) as run:
        run.save(1)
        run.wait()
        pid = writer_pid(run)
        assert not process_state(pid).startswith(("gone", "Z"))
    assert await_end(pid)


def test_ranks_killed_after_they_staged_leave_a_whole_checkpoint_and_no_process(place: Path) -> None:
    script = Path(__file__).with_name("rank_script.py")
    command = [sys.executable, str(script), str(place), "killed-after", "slow", "0.2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    said: list[str] = []
    wait_for_old_writer(str(place), 20.0, said.append)
    assert len(said) == 1 and f"the checkpoint writer (pid {int(done.stdout)} on {os.uname().nodename})" in said[0]
    assert whole_steps(open_storage(place)) == [100]
    assert await_end(int(done.stdout))


def test_a_rank_lost_before_it_staged_fails_the_save_and_leaves_nothing(place: Path) -> None:
    with ranks(place, 3, command=hooked("slow", 0.1)) as run:
        run.save(1)
        run.wait()
        for rank in (0, 1):
            run.savers[rank].save(head(2), {})
        leave(run, 2)
        for rank in (0, 1):
            with pytest.raises(PacelineError, match="rank 2 ended before its part of step 2 was staged"):
                run.savers[rank].wait()
        assert list_steps(run.storage) == [1] and not (place / "step-00000002").exists()


def test_a_rank_that_never_comes_fails_the_save_in_bounded_time(place: Path) -> None:
    with ranks(place, 2, timeout=1.0) as run:
        run.each(lambda rank: run.savers[rank].prepare())
        run.savers[0].save(head(2), {})
        deadline = time.monotonic() + 10
        while run.savers[0].busy() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(PacelineError, match=r"rank 1 did not come to the save of step 2 within 1\.00 s"):
            run.savers[0].wait()
        run.savers[1].save(head(2), {})  # late: hears of it too
        with pytest.raises(PacelineError, match="rank 1 did not come"):
            run.savers[1].wait()
        run.save(3)
        run.wait()
        assert whole_steps(run.storage) == [3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_every_process_do_not_cost_the_last_save(place: Path, number: int) -> None:
    with ranks(place, command=hooked("slow", 0.1)) as run:
        run.save(1)
        while not run.savers[0]._phase.startswith("writing"):
            assert run.savers[0].busy()
        os.kill(writer_pid(run), number)
        run.wait()
        assert whole_steps(run.storage) == [1]


def test_one_writer_at_a_time_works_in_a_place(place: Path) -> None:
    place.mkdir(parents=True)
    held = writer_lock.take(str(place), 0, 1.0)
    with pytest.raises(
        PacelineError, match=rf"the checkpoint writer \(pid {os.getpid()} on .*\) of an earlier attempt still"
    ):
        wait_for_old_writer(str(place), 0.2, lambda text: None)
    with ranks(place, timeout=0.5) as run:
        run.save(1)
        while run.savers[0].busy():
            time.sleep(0.02)
        with pytest.raises(PacelineError, match="of an earlier attempt"):
            run.wait()
        os.close(held)
        wait_for_old_writer(str(place), 0.2, lambda text: pytest.fail(text))
        run.save(2)
        run.wait()
        assert whole_steps(run.storage) == [2]


def test_there_is_nothing_to_wait_for_in_a_new_place(tmp_path: Path) -> None:
    wait_for_old_writer(str(tmp_path / "none"), 0.1, lambda text: pytest.fail(text))
    wait_for_old_writer(f"memory://{tmp_path.name}", 0.1, lambda text: pytest.fail(text))


def test_two_hosts_make_one_checkpoint(place: Path) -> None:
    with ranks(place, 2, hosts=2, sharded=True, command=hooked("slow", 0.02)) as run:
        assert len({id(saver._host._command) for saver in run.savers}) == 2
        for step in (1, 2):
            run.save(step)
            run.wait()
            found = saved(run.storage, step)
            assert equal({n: t for n, t in found.items() if not n.startswith("buffer/")}, odd_tensors())
            assert read_manifest(run.storage, step).ranks == [{"rank": 0}, {"rank": 1}]
            names = sorted(path.name for path in (place / f"step-{step:08d}").iterdir())
            assert names == ["COMMIT", "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
        assert writer_pid(run, 0) != writer_pid(run, 1)
        assert run.states == [(state, step) for step in (1, 2) for state in ("requested", "staged", "durable")]
        run.save(2)  # is there: the other host, which waits for its folder, is told
        run.wait()
        assert run.events[-1].text == "it was there already"


def test_a_failure_on_another_host_is_known_on_all(place: Path) -> None:
    with ranks(place, 2, hosts=2, command=hooked("fail-rank", 1)) as run:
        run.save(1)
        assert sorted(failures(run)) == ["rank-00001"] * 2
        assert not (place / "step-00000001").exists() and run.states[-1] == ("failed", 1)


@pytest.mark.parametrize("host", [0, 1])
def test_a_writer_whose_ranks_are_gone_does_not_wait_for_a_host_that_never_comes(place: Path, host: int) -> None:
    with ranks(place, 2, hosts=2, timeout=60.0) as run:
        run.save(1)
        run.wait()
        pid = writer_pid(run, host)
        # The rank of this host stages alone and is gone; the other host never hears of the save.
        run.savers[host].save(head(2), {})
        leave(run, host)
        began = time.monotonic()
        assert await_end(pid, DESERTED_SECONDS + 10.0)
        assert time.monotonic() - began > DESERTED_SECONDS / 2
        assert list_steps(run.storage) == [1] and not (place / "step-00000002").exists()


def test_a_failure_on_host_0_is_known_on_all(place: Path) -> None:
    with ranks(place, 2, hosts=2, command=hooked("fail-rank", 0)) as run:
        run.save(1)
        assert failures(run) == ["rank-00000"] * 2
        assert not (place / "step-00000001").exists()


def save_as_a_process(rank: int, world_size: int, place: str, lost: int | None) -> tuple[list[int], int, str]:
    """Two saves of one rank of several processes; `lost` closes its connection instead of joining the second."""
    store = torch.distributed.distributed_c10d._get_default_store()
    own, placed = parts(odd_tensors(), rank, world_size)
    saver = Saver(
        storage_place=place, placed=placed, world=World(rank, world_size, world_size, store), run_id="run", attempt=1,
        keep=KeepRule(), timeout_seconds=20.0, notify=lambda event: None,
    )  # fmt: skip
    text = ""
    for step in (1, 2):
        if step == 2 and rank == lost:
            os._exit(9)
        saver.save(head(step), {"rank": rank})
        own["model/a"] += 100  # what is saved is there no more
        try:
            saver.wait()
        except PacelineError as error:
            text = error.message
    process = saver._host._process
    pid = process.process.pid if process else 0
    saver.close()
    return list_steps(open_storage(place)), pid, text


def test_processes_share_one_writer_and_no_collective(pool: Pool, place: Path) -> None:
    results = pool.run(save_as_a_process, 3, str(place), None, timeout=90)
    assert [steps for steps, _, _ in results] == [[1, 2]] * 3 and {text for _, _, text in results} == {""}
    pids = [pid for _, pid, _ in results]
    assert pids[0] > 0 and pids[1:] == [0, 0] and await_end(pids[0])
    found = {n: t for n, t in saved(open_storage(place), 1).items() if not n.startswith("buffer/")}
    assert equal(found, odd_tensors())


def test_a_process_that_dies_before_it_staged_leaves_the_save_before(pool: Pool, place: Path) -> None:
    with pytest.raises(RankDied, match="rank 1 of 2"):
        pool.run(save_as_a_process, 2, str(place), 1, timeout=90)
    wait_for_old_writer(str(place), 20.0, lambda text: None)
    assert whole_steps(open_storage(place)) == [1] and not (place / "step-00000002").exists()
