"""Which samples a resumed run reads: those that the run that was never stopped reads, from every step, under any workers."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from paceline.checkpoint.folders import list_steps, read_manifest, step_of
from paceline.checkpoint.storage import open_storage
from paceline.train import worker
from paceline.train.loop import NO_VOTES
from tests.cli.job import TEXT
from tests.pool.pool import Pool
from tests.train.attempts import attempt, attempts, left, said

EPOCHS = 3
TINY = (
    "data.eval_fraction=0", "run.steps=0", f"run.epochs={EPOCHS}", "model.dim=8", "model.num_heads=1", "model.ffn_dim=8",
    "batch.global_batch=2",
)  # fmt: skip
TEN = TEXT[:330]
"""Text of ten samples."""


class SavesNothing:
    """In a keeper's place, for attempts that are only to be begun."""

    def votes(self, step: int) -> tuple[float, ...]:
        return NO_VOTES

    def stops(self, *_: Any) -> bool:
        return False

    def wants(self, *_: Any) -> bool:
        return False

    def finish(self, *_: Any) -> None: ...
    def close(self) -> None: ...


def resume_from_every_step(rank: int, world_size: int, folder: Path, steps: int) -> dict[int, list[dict[str, Any]]]:
    """By step: the `samples` records of an attempt that begins after it, in a copy of the run as it was then."""
    words = (*TINY, "checkpoint.every=1", f"checkpoint.keep={steps}")
    attempt(rank, world_size, folder, (*words, "run.name=straight"), steps, each=True, text=TEN)
    found = {}
    for step in range(1, steps):
        copy = folder / "runs" / f"from-{step}"
        if rank == 0:
            shutil.copytree(folder / "runs" / "straight", copy, ignore=_later_than(step))
        dist.barrier()
        with mock.patch.object(worker, "_keeper", return_value=SavesNothing()):
            attempt(rank, world_size, folder, (*words, f"run.name={copy.name}"), steps)
        found[step] = [r for r in said(copy, "samples") if r["attempt"] == 2]
    return found


def _later_than(step: int) -> Any:
    return lambda _, names: [n for n in names if (found := step_of(n)) is not None and found > step]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.limit(90)
def test_a_run_resumed_after_any_step_reads_on(pool: Pool, tmp_path: Path, ranks: int) -> None:  # BL-23 BL-26
    resumed = pool.run(resume_from_every_step, ranks, tmp_path, 15, timeout=80)[0]
    straight = said(tmp_path / "runs" / "straight", "samples")
    assert [r["step"] for r in straight] == list(range(1, 16))
    assert Counter(i for r in straight for i in r["ids"]) == dict.fromkeys(range(10), EPOCHS)
    orders = [tuple(i for r in straight[at : at + 5] for i in r["ids"]) for at in (0, 5, 10)]
    assert len(set(orders)) == EPOCHS, "epochs have one order, so that a resume into the wrong one would not be seen"
    for step in range(1, 15):
        assert [(r["step"], r["ids"]) for r in resumed[step]] == [(r["step"], r["ids"]) for r in straight[step:]], step


@pytest.mark.limit(60)
def test_five_stops_leave_every_sample_seen_as_often_as_none(pool: Pool, tmp_path: Path) -> None:  # BL-26
    words = (*TINY, "run.name=broken")
    cycles: list[Any] = [(words, {"stop": stop, "text": TEN}) for stop in (2, 5, 6, 11, 13)]
    pool.run(attempts, 2, tmp_path, [*cycles, (words, {}), ((*TINY, "run.name=straight"), {})], timeout=50)
    broken, straight = left(tmp_path / "runs" / "broken"), left(tmp_path / "runs" / "straight")
    assert len(said(tmp_path / "runs" / "broken", "step")) == 15
    assert Counter(i for ids in broken.samples.values() for i in ids) == dict.fromkeys(range(10), EPOCHS)
    assert (broken.curve, broken.samples, broken.tensors) == (straight.curve, straight.samples, straight.tensors)


@pytest.mark.limit(90)
def test_loader_workers_change_nothing(pool: Pool, tmp_path: Path) -> None:
    # BL-25, BL-27: 16 samples, 4 steps an epoch; stopped in the second one with a step left, then two whole epochs.
    words = (*TINY, "run.epochs=4", "batch.global_batch=4")
    plan = {"none": [(0, 7), (0, None)], "one": [(1, 7), (1, 9), (1, None)], "fewer": [(3, 7), (1, None)]}
    calls: list[Any] = [
        ((*words, f"run.name={name}", f"data.workers={workers}", 'checkpoint.allow_change=["data.workers"]'),
         {"stop": stop})
        for name, parts in plan.items() for workers, stop in parts
    ]  # fmt: skip
    straight: Any = ((*words, "run.name=straight"), {"text": TEXT[:520]})
    pool.run(attempts, 2, tmp_path, [straight, *calls], timeout=80)
    whole = left(tmp_path / "runs" / "straight")
    for epoch in range(4):
        ids = [i for step in range(4 * epoch + 1, 4 * epoch + 5) for i in whole.samples[step]]
        assert sorted(ids) == list(range(16))
    for name in plan:
        resumed = left(tmp_path / "runs" / name)
        assert (resumed.samples, resumed.curve, resumed.tensors) == (whole.samples, whole.curve, whole.tensors), name
    storage = open_storage(tmp_path / "runs" / "one" / "checkpoints")
    positions = {step: read_manifest(storage, step).samples for step in list_steps(storage)}
    assert positions == {7: 28, 9: 36, 16: 64}
