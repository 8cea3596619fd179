"""Saves of several ranks: what is saved is what was there, once, whole; what fails is said and moves nothing good."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.folders import list_steps, read_manifest
from paceline.checkpoint.manifest import NextStep
from paceline.checkpoint.messages import KeepRule
from paceline.errors import DiskFull, PacelineError
from tests.checkpoint.savers import equal, head, hooked, odd_tensors, ranks, saved, whole_steps


@pytest.mark.parametrize(("count", "sharded"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_what_is_saved_is_what_the_ranks_held(place: Path, count: int, sharded: bool) -> None:
    with ranks(place, count, sharded=sharded) as run:
        run.save(100)
        run.wait()
        found = saved(run.storage, 100)
        buffers = {n: found.pop(n) for n in list(found) if n.startswith("buffer/")}
        assert equal(found, odd_tensors())
        assert len(buffers) == (count if sharded else 0)
        assert all(buffers[f"buffer/{rank}/count"].tolist() == [rank] * (rank + 1) for rank in range(len(buffers)))
        manifest = read_manifest(run.storage, 100)
        assert (manifest.step, manifest.samples, manifest.world_size) == (100, 800, count)
        assert (manifest.run_id, manifest.attempt, manifest.layout) == ("run", 1, {"dp": 1})
        assert manifest.state == {"lr": 0.1, "eval_loss": None} and manifest.about == {"model": "toy"}
        assert manifest.ranks == [{"rank": rank} for rank in range(count)]
        assert run.states == [("requested", 100), ("staged", 100), ("durable", 100)]
        assert run.events[2].size_bytes == manifest.size_bytes and (run.events[2].seconds or 0) > 0


def test_a_save_is_a_snapshot_of_its_moment(place: Path) -> None:  # R10, operations finding 4
    with ranks(place, 2, keep=100, command=hooked("slow", 0.02)) as run:
        expected = {}
        for step in range(1, 21):
            expected[step] = {name: tensor.clone() for name, tensor in run.tensors[0].items()}
            run.save(step)
            for own in run.tensors:
                for tensor in own.values():
                    tensor += 1
            assert run.savers[0].busy()
            run.wait()
        assert [equal(saved(run.storage, step), expected[step]) for step in expected] == [True] * 20


def test_the_next_steps_result_goes_into_the_manifest(place: Path) -> None:
    with ranks(place, 2) as run:
        run.save(10, final=False)
        time.sleep(0.2)
        assert run.savers[0].busy() and list_steps(run.storage) == []
        run.savers[1].next_step(NextStep(11, 9.0, 9.0))
        run.savers[0].next_step(NextStep(11, 0.5, 2.0))
        run.wait()
        assert read_manifest(run.storage, 10).next_step == NextStep(11, 0.5, 2.0)
        run.save(20, final=False)
        run.wait()  # says that no next step comes
        assert read_manifest(run.storage, 20).next_step is None


def test_a_step_that_is_there_is_not_written_again(place: Path) -> None:
    with ranks(place, 2) as run:
        run.save(100)
        run.wait()
        before = {path: path.stat().st_mtime_ns for path in (place).rglob("*")}
        for own in run.tensors:
            own["model/a"] += 1
        run.save(100)
        run.wait()
        assert run.events[-1].text == "it was there already" and run.states[-1] == ("durable", 100)
        assert {path: path.stat().st_mtime_ns for path in (place).rglob("*")} == before
        assert equal(saved(run.storage, 100), odd_tensors())


def test_a_second_save_in_flight_is_refused(place: Path) -> None:
    with ranks(place, command=hooked("slow", 0.1)) as run:
        run.save(1)
        with pytest.raises(RuntimeError, match="step 2 was to be saved while"):
            run.save(2)
        run.wait()
        assert list_steps(run.storage) == [1]


def test_every_rank_returns_from_wait_after_the_mark_is_there(place: Path) -> None:  # BL-45
    with ranks(place, 3, command=hooked("slow", 0.05)) as run:
        run.save(100)
        seen: list[bool] = []

        def wait(rank: int) -> None:
            run.savers[rank].wait()
            seen.append((place / "step-00000100/COMMIT").exists())

        run.each(wait)
        assert seen == [True] * 3


def test_ranks_that_save_different_steps_all_hear_of_both(place: Path) -> None:  # BL-45
    with ranks(place, 2) as run:
        run.each(lambda rank: run.savers[rank].save(head(100 + rank), {}))
        for saver in run.savers:
            with pytest.raises(PacelineError, match=r"do not save the same step: .*10[01].*10[01]"):
                saver.wait()
        assert not list((place).glob("step-*"))


def test_a_wait_that_lasts_too_long_names_rank_host_step_file_and_seconds(place: Path) -> None:  # BL-44
    with ranks(place, 2, timeout=1.5, command=hooked("slow", 2.5, "step-00000100/rank")) as run:
        run.save(1)
        while any(saver.busy() for saver in run.savers):  # the writer's start has a time of its own
            time.sleep(0.02)
        run.save(100)
        expected = (
            rf"waited 1\.\d+ s for the checkpoint write of rank 0 on {os.uname().nodename}: step 100, writing "
            rf"step-00000100/rank-0000[01].safetensors of rank [01].*, in {place}"
        )

        def wait(rank: int) -> None:
            with pytest.raises(PacelineError, match=expected):
                run.savers[rank].wait()

        run.each(wait)
        # Where nobody waits it is said once. The save itself goes on.
        while any(saver.busy() for saver in run.savers):
            run.savers[0].poll()
            time.sleep(0.05)
        warnings = [event for event in run.events if event.state == "failed"]
        assert len(warnings) == 1 and warnings[0].number == 0 and "step 100, writing" in (warnings[0].text or "")
        assert whole_steps(run.storage) == [1, 100]


def test_old_ones_go_only_after_the_new_one_is_durable(place: Path) -> None:  # R4, BL-39
    with ranks(place, keep=1, command=hooked("slow", 0.1)) as run:
        run.save(1)
        run.wait()
        run.save(2)
        while run.savers[0].busy():
            assert list_steps(run.storage) in ([1], [1, 2], [2])
        run.save(3)
        process = run.savers[0]._host._process
        assert process is not None
        while not run.savers[0]._phase.startswith("writing"):
            assert run.savers[0].busy()
        process.process.kill()
        with pytest.raises(PacelineError, match="was killed by signal 9, while writing"):
            run.wait()
        assert whole_steps(run.storage) == [2]
        assert ("removed", 1) in run.states and ("removed", 2) not in run.states
        run.save(4)
        run.wait()
    assert whole_steps(run.storage) == [4]
    assert not (place / "step-00000003").exists()


def test_one_verified_checkpoint_is_there_whatever_fails(place: Path) -> None:  # R5, BL-43
    stop, missing = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            # Twice: a new one may come and the old one go while the folders are looked at.
            if not list(place.glob("step-*/COMMIT")) and not list(place.glob("step-*/COMMIT")):
                missing.append(time.monotonic())

    with ranks(place, 2, keep=1, command=hooked("fail-odd")) as run:
        run.save(0)
        run.wait()
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for step in range(1, 50):
                run.save(step)
                if step % 2:
                    with pytest.raises(DiskFull, match="no space to write"):
                        run.wait()
                    assert not (place / f"step-{step:08d}").exists()
                else:
                    run.wait()
                newest = max(list_steps(run.storage))
                assert newest == step - step % 2 and whole_steps(run.storage)
        finally:
            stop.set()
            watcher.join()
    assert missing == []
    assert whole_steps(run.storage) == [48]
    assert run.states.count(("failed", 1)) == 1 and sum(state == "failed" for state, _ in run.states) == 25


def test_a_file_too_long_for_one_rank_fails_the_save_of_all(place: Path) -> None:  # BL-43
    tensors = {"model/small": torch.ones(2, 1000), "model/large": torch.ones(3, 50_000)}
    with ranks(place, 2, sharded=True, tensors=tensors, command=hooked("limit", 300_000)) as run:
        run.save(100)
        for saver in run.savers:
            with pytest.raises(
                DiskFull, match=r"rank-00000\.safetensors of .* larger than this process may write"
            ) as error:
                saver.wait()
            assert error.value.values["needed_bytes"] > 300_000
        assert run.states == [("requested", 100), ("staged", 100), ("failed", 100)]
        assert not list((place).glob("step-*"))


def test_the_best_and_the_protected_stay(place: Path) -> None:
    rule = KeepRule(keep=1, keep_best=1, protected=(1,))
    with ranks(place, rule=rule) as run:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan"))):
            run.save(step, eval_loss=loss)
            run.wait()
    assert whole_steps(run.storage) == [1, 2, 4]
    assert [step for state, step in run.states if state == "removed"] == [3]


def test_an_older_one_that_is_damaged_goes_into_quarantine(place: Path) -> None:
    with ranks(place, keep=1) as run:
        run.save(1)
        run.wait()
        (place / "step-00000001/manifest.json").write_text("{}")
        run.save(2)
        run.wait()
    assert ("quarantined", 1) in run.states and list_steps(run.storage) == [2]
    assert (place / "quarantine/step-00000001-1/rank-00000.safetensors").exists()


def test_memory_and_descriptors_do_not_grow_after_the_second_save(place: Path) -> None:  # BL-42
    tensors = {"model/a": torch.ones(4_000_000), "model/b": torch.ones(1000)}
    size = 16 * 2**20
    with ranks(place, tensors=tensors, keep=2) as run:
        used = []
        for step in range(1, 8):
            run.save(step)
            run.wait()
            while run.savers[0]._done < step:  # reading back takes memory for a moment
                run.savers[0].poll()
            process = run.savers[0]._host._process
            assert process is not None
            used.append(
                (_memory(os.getpid()), _memory(process.process.pid), len(list(Path("/proc/self/fd").iterdir())))
            )
    for now, later in itertools.pairwise(used[3:]):  # the first to be read back is the third
        assert later[0] - now[0] < size / 8 and later[1] - now[1] < size / 8 and later[2] == now[2]
    assert used[-1][1] < 2 * size + 60 * 2**20  # the mapped buffer and a small program


def test_a_writer_that_is_killed_between_saves_is_replaced(place: Path) -> None:
    with ranks(place, 3) as run:
        for step in (1, 2, 3):
            run.save(step)
            run.wait()
            process = run.savers[0]._host._process
            assert process is not None
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.wait()
        assert whole_steps(run.storage) == [1, 2, 3]
    assert "failed" not in dict(run.states)


def _memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
