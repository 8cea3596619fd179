"""`dcp.load` and `dcp.save` on this format: equal to what the library's own files give; no pickle in either direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from paceline.checkpoint.dcp import ManifestReader, ManifestWriter
from paceline.checkpoint.folders import list_steps, read_manifest
from paceline.checkpoint.reader import read_whole
from paceline.checkpoint.storage import open_storage
from paceline.errors import JobError, NoCheckpoint
from tests.checkpoint.written import by_columns, by_rows, numbers, odd_tensors, write_split
from tests.pool.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = {"a": (3, 5), "b": (7,), "c": (1,), "d": (129, 3)}


def cause(caught: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """What a rank raised inside the library's exception."""
    assert isinstance(caught.value, CheckpointException)
    return next(iter(caught.value.failures.values()))[0]


def test_load_reads_what_was_written_by_rows_and_columns(tmp_path: Path) -> None:
    tensors = odd_tensors()
    for split in (by_rows, by_columns):
        write_split(tmp_path / split.__name__, tensors, split, 3)
        state = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
        dcp.load(state, storage_reader=ManifestReader(tmp_path / split.__name__), no_dist=True)
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_a_prefix_gives_the_names_of_the_module(tmp_path: Path) -> None:
    weight, bias = numbers((4, 3)), numbers((4,))
    saved = {"model/weight": weight, "model/bias": bias, "optimizer/exp_avg/weight": weight}
    write_split(tmp_path, saved, by_rows, 2, state={"note": 1})
    module = torch.nn.Linear(3, 4)
    reader = ManifestReader(tmp_path / "step-00000100", prefix="model/")
    dcp.load(module.state_dict(), storage_reader=reader, no_dist=True)
    assert torch.equal(module.weight.detach(), weight) and torch.equal(module.bias.detach(), bias)
    assert reader.manifest.step == 100 and reader.manifest.state == {"note": 1}


def test_the_newest_committed_step_is_read(tmp_path: Path) -> None:
    for step in (90, 100):
        write_split(tmp_path, {"model/w": torch.full((2,), float(step))}, by_rows, 1, step=step)
    (tmp_path / "step-00000110").mkdir()
    state = {"model/w": torch.zeros(2)}
    dcp.load(state, storage_reader=ManifestReader(tmp_path), no_dist=True)
    assert state["model/w"].tolist() == [100, 100]


def test_damage_another_type_and_no_checkpoint_are_refused(tmp_path: Path) -> None:
    _, manifest = write_split(tmp_path / "c", {"model/w": numbers((2,))}, by_rows, 1)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model/w": torch.zeros(2).bfloat16()}, storage_reader=ManifestReader(tmp_path / "c"), no_dist=True)
    error = cause(caught)
    assert isinstance(error, JobError) and "model/w is F32 in the checkpoint and torch.bfloat16" in error.message
    path = tmp_path / "c" / "step-00000100" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[manifest.tensors["model/w"].pieces[0].begin] ^= 8
    path.write_bytes(data)
    state = {"model/w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=ManifestReader(tmp_path / "c"), no_dist=True)
    assert isinstance(cause(caught), NoCheckpoint) and not state["model/w"].any()
    with pytest.raises(CheckpointException, match="there is no folder"):
        dcp.load(state, storage_reader=ManifestReader(tmp_path / "none"), no_dist=True)


def test_save_writes_a_checkpoint_that_every_reader_reads(tmp_path: Path) -> None:
    tensors = odd_tensors()
    writer = ManifestWriter(tmp_path, step=7, samples=56, state={"loss_scale": 4.0}, about={"model": "toy"})
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    storage = open_storage(tmp_path)
    assert list_steps(storage) == [7]
    manifest = read_manifest(storage, 7)
    assert (manifest.step, manifest.samples, manifest.state) == (7, 56, {"loss_scale": 4.0})
    found = dict(read_whole(storage, manifest))
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    names = sorted(path.name for path in (tmp_path / "step-00000007").iterdir())
    assert names == ["COMMIT", "manifest.json", "rank-00000.safetensors"]
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(again, storage_reader=ManifestReader(tmp_path), no_dist=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_large_tensors_are_cut_for_readers_of_parts(tmp_path: Path) -> None:
    tensor = numbers((1030, 4500), torch.float64)  # 37 MB
    dcp.save({"w": tensor.t()}, storage_writer=ManifestWriter(tmp_path, step=1, prefix="model/"), no_dist=True)
    storage = open_storage(tmp_path)
    manifest = read_manifest(storage, 1)
    assert len(manifest.tensors["model/w"].pieces) == 3
    assert all(torch.equal(found, tensor.t()) for _, found in read_whole(storage, manifest))


def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    state = {"model/w": numbers((2,)), "step": 7, "groups": [{"lr": 0.1}]}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ManifestWriter(tmp_path, step=1), no_dist=True)
    error = cause(caught)
    assert isinstance(error, JobError) and error.exit_code == 78
    assert (
        "not a tensor" in error.message and "step" in error.values["names"] and "groups.0.lr" in error.values["names"]
    )
    assert not list(tmp_path.iterdir())
    index = MetadataIndex("step")
    size = torch.Size(())
    plan = LoadPlan([ReadItem(LoadItemType.BYTE_IO, index, size, index, size, size)])
    with pytest.raises(JobError, match=r"not a tensor, so not read .*: step"):
        ManifestReader(tmp_path).prepare_local_plan(plan)


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    state = {"model/w": numbers((2,))}
    dcp.save(state, storage_writer=ManifestWriter(tmp_path, step=1), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ManifestWriter(tmp_path, step=1), no_dist=True)
    assert isinstance(cause(caught), JobError) and "never overwritten" in str(cause(caught))
    assert list_steps(open_storage(tmp_path)) == [1]


def _sharded(world_size: int, row_dim: int = 0) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        name: distribute_tensor(numbers(shape), mesh, [Shard(min(row_dim, len(shape) - 1))])
        for name, shape in SHAPES.items()
    }
    state["replicated"] = distribute_tensor(numbers((5, 2)), mesh, [Replicate()])
    return state


def _save(rank: int, world_size: int, place: str) -> None:
    state: dict[str, Any] = {**_sharded(world_size), "plain": numbers((2, 2))}
    dcp.save(state, storage_writer=ManifestWriter(place, step=3, prefix="model/"))


def _load(rank: int, world_size: int, place: str, row_dim: int) -> list[str]:
    """Names that differ from what was saved; DTensors over these ranks, cut along another dim."""
    state: dict[str, Any] = {**_sharded(world_size, row_dim), "plain": numbers((2, 2))}
    wanted = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone() for name, tensor in state.items()
    }
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    dcp.load(state, storage_reader=ManifestReader(place, prefix="model/"))
    got = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    return [name for name in wanted if not torch.equal(got[name], wanted[name])]


def _save_pickled(rank: int, world_size: int, place: str) -> str:
    try:
        dcp.save({"w": numbers((2,)), "epoch": 3}, storage_writer=ManifestWriter(place, step=4))
    except CheckpointException as error:
        return "; ".join(str(failure[0]) for failure in error.failures.values())
    return ""


def test_dtensors_over_2_ranks_reshard(tmp_path: Path, pool: Pool) -> None:
    place = str(tmp_path / "checkpoints")
    pool.run(_save, 2, place)
    storage = open_storage(place)
    manifest = read_manifest(storage, 3)
    assert manifest.world_size == 2 and len(manifest.files) == 2
    assert len(manifest.tensors["model/a"].pieces) == 2 and len(manifest.tensors["model/replicated"].pieces) == 1
    expected = {f"model/{name}": numbers(shape) for name, shape in SHAPES.items()}
    assert {name: t.tolist() for name, t in read_whole(storage, manifest, expected)} == {
        name: t.tolist() for name, t in expected.items()
    }
    for ranks, row_dim in ((2, 1), (3, 0)):
        assert pool.run(_load, ranks, place, row_dim) == [[]] * ranks
    assert all("not a tensor" in text and "epoch" in text for text in pool.run(_save_pickled, 2, place))
    assert list_steps(storage) == [3]


def test_nothing_pickled_lies_on_disk(tmp_path: Path) -> None:
    dcp.save({"model/w": numbers((2,))}, storage_writer=ManifestWriter(tmp_path, step=1), no_dist=True)
    for path in (tmp_path / "step-00000001").glob("[!r]*"):
        json.loads(path.read_text())
