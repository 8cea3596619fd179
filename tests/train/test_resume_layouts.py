"""Any layout to any layout: what was saved under one is there bit for bit under another, and the curve goes on.

On another layout sums are taken in another order, so curves are compared in float64, where that is 1e-15 or so a step.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.boxes import tiles
from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.places import find_one
from paceline.checkpoint.reader import read_whole
from paceline.checkpoint.storage import open_storage
from paceline.data.prepare import prepare
from paceline.job.resolve import with_samples
from paceline.parallel.offload import config as offload
from paceline.train import startup
from paceline.train.resume import resume
from paceline.train.session import Session
from tests.pool.pool import Pool
from tests.train.attempts import STEPS, attempts, left, resolved_job, said, world_of
from tests.train.test_resume import LAYOUTS

DOUBLE = ("parallel.precision=fp64", "run.eval_every=3")
SAVED_STEP = 4
SOURCES = ("one process", "ddp-2", "fsdp-2 stage 3", "fsdp-4 stage 1", "hsdp-2x2")
PAIRS = {
    "one process": "hsdp-2x2", "ddp-2": "fsdp-4 stage 1", "fsdp-2 stage 3": "one process", "fsdp-4 stage 1": "ddp-3",
    "hsdp-2x2": "fsdp-3 stage 2",
}  # fmt: skip


def run_name(layout: str) -> str:
    return layout.replace(" ", "-").replace(",", "")


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the whole run of one process, and a run of each source that ended after step 4."""
    folder = tmp_path_factory.mktemp("layouts")
    pool.run(attempts, 1, folder, [((*DOUBLE, "run.name=straight"), {})], timeout=60)
    for name in SOURCES:
        ranks, words = LAYOUTS[name]
        call = ((*DOUBLE, *words, f"run.name={run_name(name)}"), {"stop": SAVED_STEP})
        pool.run(attempts, ranks, folder, [call], timeout=60)
    return folder


def loaded(rank: int, world_size: int, words: Sequence[str], source: Path) -> Session:
    """A session that begins with what is in `source`; it is not trained."""
    world = world_of(rank, world_size)
    resolved = resolved_job((*words, f"checkpoint.resume={source}"), world_size)
    data = prepare(resolved.job.data)
    session = startup.build_session(
        with_samples(resolved, len(data.train)), data, world,
        lambda state: resume(state, world, startup.world_group(world), resolved.job.checkpoint, "no/checkpoints"),
    )  # fmt: skip
    session.batches.close()
    return session


def compare_loaded(rank: int, world_size: int, folder: Path, words: Sequence[str], runs: Sequence[str]) -> list[str]:
    """What differs between each run's checkpoint and what is there after it was loaded, gathered over all ranks."""
    different = []
    with contextlib.chdir(folder), mock.patch.object(startup, "measured_peak", return_value=1e9):
        for run in runs:
            session = loaded(rank, world_size, words, folder / "runs" / run)
            found = find_one(str(folder / "runs" / run))
            manifest = found.manifest()
            whole = dict(read_whole(found.storage, manifest, folder=found.folder))
            state = session.state
            assert state is not None
            mine = [*state.weights(), *state.moments()]
            different += [f"{run}: {text}" for text in _differences(mine, whole, session)]
            steps = state.shared()["optimizer"]["steps"]
            if steps != manifest.state["optimizer"]["steps"]:
                different.append(f"{run}: {steps}")
            if {p.name for p in mine} != {n for n in whole if not n.startswith("buffer/")}:
                different.append(f"{run}: other names")
    return different


def _differences(mine: list[Placed], whole: dict[str, torch.Tensor], session: Session) -> list[str]:
    for placed in mine:
        part = tuple(slice(b, b + n) for b, n in zip(placed.box.offset, placed.box.shape, strict=True))
        if placed.shape != tuple(whole[placed.name].shape) or not torch.equal(placed.tensor, whole[placed.name][part]):
            return [f"{placed.name} {placed.box}"]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {p.name: p.box for p in mine})
    for name, tensor in whole.items():
        if name.startswith("model/") and not tiles(list({held[name] for held in everyone}), tuple(tensor.shape)):
            return [f"the ranks do not hold all of {name}"]
    weights = {f"model/{name}": tensor.cpu() for name, tensor in session.whole_weights()}
    return [f"{name} gathered" for name, tensor in weights.items() if not torch.equal(tensor, whole[name])]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.limit(90)
def test_weights_and_moments_are_those_that_were_saved(pool: Pool, saved: Path, name: str) -> None:  # BL-47 BL-38 R24
    ranks, words = LAYOUTS[name]
    runs = [run_name(source) for source in SOURCES if source != name]
    for different in pool.run(compare_loaded, ranks, saved, (*DOUBLE, *words), runs, timeout=80):
        assert different == []
    for run in runs:
        found = find_one(str(saved / "runs" / run))
        moments = dict(read_whole(found.storage, found.manifest(), folder=found.folder))
        assert all(tensor.any() for name, tensor in moments.items() if "/exp_avg" in name)
        assert set(found.manifest().state["optimizer"]["steps"].values()) == {SAVED_STEP}


@pytest.mark.parametrize("source", PAIRS)
@pytest.mark.limit(60)
def test_another_layout_walks_on_along_the_curve(pool: Pool, saved: Path, source: str) -> None:  # BL-47
    ranks, words = LAYOUTS[PAIRS[source]]
    copy = saved / "runs" / f"{run_name(source)}-elsewhere"
    shutil.copytree(saved / "runs" / run_name(source), copy)
    pool.run(attempts, ranks, saved, [((*DOUBLE, *words, f"run.name={copy.name}"), {})], timeout=50)
    resumed, straight = left(copy), left(saved / "runs" / "straight")
    assert resumed.samples == straight.samples
    for step, numbers in straight.curve.items():
        assert resumed.curve[step] == pytest.approx(numbers, rel=1e-9), step
    certificate = said(copy, "certificate")[0]
    assert certificate["same_layout"] is False and certificate["verdict"] == "unknown"
    assert [r["step"] for r in said(copy, "run_started")] == [0, SAVED_STEP]
    assert list_steps(open_storage(copy / "checkpoints")) == [SAVED_STEP, STEPS]


STATES = {
    "bf16 weights": (2, ("parallel.precision=bf16", "parallel.parameter_dtype=bf16")),
    "fp16": (2, ("parallel.precision=fp16",)),
    "momentum": (2, ("parallel.dp_shard=2", "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1")),
    "tied": (2, ("parallel.dp_shard=2", "model.tie_embeddings=true")),
    "moments on disk": (1, ("parallel.offload=disk",)),
}


def attempts_with_disks(rank: int, world_size: int, folder: Path, calls: Any) -> None:
    """Where the test's folder lies in memory, that is as good as a disk here."""
    with mock.patch.object(offload, "MEMORY_FILE_SYSTEMS", frozenset()):
        attempts(rank, world_size, folder, calls)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.limit(90)
def test_every_kind_of_state_is_there_again(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks, words = STATES[name]
    calls: list[Any] = [
        ((*words, "run.name=straight"), {}), ((*words, "run.name=broken"), {"stop": 4}), ((*words, "run.name=broken"), {}),
    ]  # fmt: skip
    pool.run(attempts_with_disks, ranks, tmp_path, calls, timeout=80)
    straight, broken = left(tmp_path / "runs" / "straight"), left(tmp_path / "runs" / "broken")
    assert broken == straight._replace(verdicts=["unknown"])
    kinds = {name.split("/")[1] for name in straight.tensors if name.startswith("optimizer/")}
    assert kinds == ({"momentum_buffer"} if name == "momentum" else {"exp_avg", "exp_avg_sq"})
    dtypes = {t.dtype for t in find_one(str(tmp_path / "runs" / "broken")).manifest().tensors.values()}
    assert dtypes == {"F32"}
    if name == "fp16":
        assert straight.state["loss_scale"] is not None
    if name == "tied":  # BL-51: the decoder's head reads the embedding itself, so there is one tensor for both
        assert "model/embedding.weight" in straight.tensors and "model/lm_head.weight" not in straight.tensors
