"""Repacked, exported and imported tensors are the ones that were saved, bit for bit; the safetensors library agrees."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.checkpoint.convert import convert, export_weights, import_weights
from paceline.checkpoint.folders import list_steps, read_manifest
from paceline.checkpoint.reader import read_whole
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.verify import verify
from paceline.errors import JobError, NoCheckpoint
from tests.checkpoint.written import by_columns, by_rows, numbers, odd_tensors, write_split

STATE = {"loss_scale": 2.0, "evals": {"loss": 1.5}}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def loaded(place: Path, step: int = 100) -> dict[str, torch.Tensor]:
    storage = open_storage(place)
    return dict(read_whole(storage, read_manifest(storage, step)))


@pytest.mark.parametrize("files", [1, 2, 5])
def test_all_state_is_repacked_bit_for_bit(tmp_path: Path, files: int) -> None:
    tensors = odd_tensors()
    _, before = write_split(tmp_path / "from", tensors, by_columns, 3, state=STATE, about={"model": "toy"})
    done = convert(str(tmp_path / "from"), str(tmp_path / "to"), files=files)
    storage = open_storage(tmp_path / "to")
    assert (done.path, done.step, done.files) == (f"{tmp_path}/to/step-00000100", 100, files)
    assert verify(storage, 100) == []
    same(loaded(tmp_path / "to"), tensors)
    after = read_manifest(storage, 100)
    assert len(after.files) == files and done.size_bytes == after.size_bytes
    again = {"tensors": {}, "files": {}, "digest": ""}
    assert msgspec.structs.replace(after, **again) == msgspec.structs.replace(before, **again)
    for file in after.files:
        with safe_open(tmp_path / "to" / "step-00000100" / file, framework="pt") as plain:
            for key in plain.keys():  # noqa: SIM118
                name, _, offset = key.partition("@")
                begins = [int(begin) for begin in offset.split(",") if begin]
                part = plain.get_tensor(key)
                slices = tuple(slice(b, b + n) for b, n in zip(begins, part.shape, strict=True))
                assert torch.equal(part, tensors[name][slices]), key


def test_files_are_equal_to_within_a_piece(tmp_path: Path) -> None:
    tensors = {f"model/w{index}": numbers((index + 1, 64)) for index in range(20)}
    _, manifest = write_split(tmp_path / "from", tensors, by_rows, 4)
    convert(str(tmp_path / "from"), str(tmp_path / "to"), files=3)
    sizes = [
        file.size_bytes - file.header_bytes for file in read_manifest(open_storage(tmp_path / "to"), 100).files.values()
    ]
    largest = max(piece.end - piece.begin for stored in manifest.tensors.values() for piece in stored.pieces)
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(sizes) - min(sizes) <= largest


def test_weights_alone_in_another_type(tmp_path: Path) -> None:
    tensors = {
        "model/w": numbers((5, 4)), "model/ids": numbers((3,), torch.int64), "buffer/0/mean": numbers((2,)),
        "optimizer/exp_avg/w": numbers((5, 4)),
    }  # fmt: skip
    storage, manifest = write_split(tmp_path / "from", tensors, by_rows, 2, state=STATE, about={"model": "toy"})
    convert(str(tmp_path / "from"), str(tmp_path / "to"), weights_only=True, dtype="bf16")
    assert verify(open_storage(tmp_path / "to"), 100) == []
    same(
        loaded(tmp_path / "to"),
        {
            "model/w": tensors["model/w"].bfloat16(),
            "model/ids": tensors["model/ids"],
            "buffer/0/mean": tensors["buffer/0/mean"],
        },
    )
    after = read_manifest(open_storage(tmp_path / "to"), 100)
    assert (after.state, after.ranks, after.about) == ({}, [], {"model": "toy"})
    assert read_manifest(storage, 100) == msgspec.structs.replace(manifest, digest=read_manifest(storage, 100).digest)


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    write_split(tmp_path, {"model/w": numbers((4,))}, by_rows, 1)
    with pytest.raises(JobError, match="step-00000100 is there already; a checkpoint is never overwritten"):
        convert(str(tmp_path), str(tmp_path))
    assert verify(open_storage(tmp_path), 100) == []
    target = tmp_path / "weights.safetensors"
    target.write_text("mine")
    with pytest.raises(JobError, match="never overwritten"):
        export_weights(str(tmp_path), str(target))
    assert target.read_text() == "mine"


def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path) -> None:
    _, manifest = write_split(tmp_path / "from", {"model/w": numbers((4,)), "model/v": numbers((4,))}, by_rows, 2)
    path = tmp_path / "from" / "step-00000100" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(NoCheckpoint, match=r"rank-00001.safetensors is damaged"):
        convert(str(tmp_path / "from"), str(tmp_path / "to"), files=2)
    assert list_steps(open_storage(tmp_path / "to")) == [] and not list((tmp_path / "to").iterdir())
    with pytest.raises(NoCheckpoint, match=r"rank-00001.safetensors is damaged"):
        export_weights(str(tmp_path / "from"), str(tmp_path / "out" / "w.safetensors"))
    assert not list((tmp_path / "out").iterdir())
    assert manifest.world_size == 2


def test_more_files_than_pieces_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path / "from", {"model/w": numbers((4,))}, by_rows, 2)
    with pytest.raises(JobError, match=r"3 files cannot be filled: .* has 2 pieces"):
        convert(str(tmp_path / "from"), str(tmp_path / "to"), files=3)
    assert not (tmp_path / "to").exists()


def test_an_export_has_the_names_of_the_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    for index, tensor in enumerate(module.state_dict().values()):
        tensor.copy_(numbers(tuple(tensor.shape), tensor.dtype, index))
    parameters = {f"model/{name}": p.detach() for name, p in module.named_parameters()}
    buffers = {f"buffer/{rank}/{name}": b for rank in (0, 1) for name, b in module.named_buffers()}
    optimizer = {"optimizer/exp_avg/0.weight": numbers((5, 3))}
    write_split(tmp_path, {**parameters, **buffers, **optimizer}, by_columns, 3)
    target = tmp_path / "new" / "weights.safetensors"
    done = export_weights(str(tmp_path), str(target))
    found = load_file(target)
    same(found, dict(module.state_dict()))
    assert (done.tensors, done.size_bytes) == (len(found), target.stat().st_size)
    with safe_open(target, framework="pt") as plain:
        assert plain.metadata() == {"format": "pt"}
    export_weights(str(tmp_path), str(tmp_path / "bf16.safetensors"), dtype="bf16")
    narrow = load_file(tmp_path / "bf16.safetensors")
    assert torch.equal(narrow["0.weight"], found["0.weight"].bfloat16())
    assert narrow["1.running_mean"].dtype == torch.float32 and narrow["1.num_batches_tracked"].dtype == torch.int64


def test_an_import_is_a_checkpoint_of_step_0(tmp_path: Path) -> None:
    weights = {"w": numbers((300, 33)), "b": numbers((7,), torch.bfloat16), "scale": numbers((), torch.float64)}
    save_file(weights, tmp_path / "in.safetensors", metadata={"format": "pt"})
    done = import_weights(str(tmp_path / "in.safetensors"), str(tmp_path / "c"))
    assert (done.step, done.path) == (0, f"{tmp_path}/c/step-00000000")
    storage = open_storage(tmp_path / "c")
    assert verify(storage, 0) == []
    manifest = read_manifest(storage, 0)
    assert (manifest.step, manifest.samples, manifest.state) == (0, 0, {})
    same(loaded(tmp_path / "c", 0), {f"model/{name}": tensor for name, tensor in weights.items()})
    export_weights(str(tmp_path / "c"), str(tmp_path / "out.safetensors"))
    same(load_file(tmp_path / "out.safetensors"), weights)


def test_large_imports_are_cut(tmp_path: Path) -> None:
    weights = {"w": numbers((5000, 2100), torch.bfloat16)}  # 21 MB
    save_file(weights, tmp_path / "in.safetensors")
    import_weights(str(tmp_path / "in.safetensors"), str(tmp_path / "c"))
    storage = open_storage(tmp_path / "c")
    assert len(read_manifest(storage, 0).tensors["model/w"].pieces) == 2
    same(loaded(tmp_path / "c", 0), {"model/w": weights["w"]})


def header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


def field(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"PK\x03\x04 a pickle in a zip, with more bytes", "a header of"),
        (header([1]), "cannot be read"),
        (header({"w": {}}), "cannot be read: 'dtype'"),
        (header({"w": field([2], 0, 8)}) + b"1234", "it has .* bytes where its header states"),
        (header({"w": field([2], 0, 4)}) + b"1234", "4 bytes where F32"),
        (header({"w": field([1], 4, 8)}) + b"12341234", "w begins at byte"),
        (header({"w": field([1], 0, 4), "v": field([1], 0, 4)}) + b"1234", "w begins at byte|v begins at byte"),
        (header({"w": field([1], 0, 4, "F5")}) + b"1234", "type 'F5' is unknown"),
        (header({"w": field([-1], 0, -4)}) + b"1234", "a number that is none"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "in.safetensors").write_bytes(data)
    with pytest.raises(JobError, match=rf"is no whole safetensors file: .*({reason})"):
        import_weights(str(tmp_path / "in.safetensors"), str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read .*none.safetensors: No such file"):
        import_weights(str(tmp_path / "none.safetensors"), str(tmp_path / "c"))
    with pytest.raises(NoCheckpoint, match="there is no folder"):
        convert(str(tmp_path / "none"), str(tmp_path / "c"))
    with pytest.raises(NoCheckpoint, match="holds no checkpoint"):
        export_weights(str(tmp_path), str(tmp_path / "w.safetensors"))


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    tensors = {"model/w": numbers((8, 8)), "model/v": numbers((8,))}
    write_split(tmp_path / "from", tensors, by_rows, 2)
    total = sum(tensor.nbytes for tensor in tensors.values())
    seen: list[tuple[int, int]] = []
    convert(str(tmp_path / "from"), str(tmp_path / "to"), progress=lambda done, all_: seen.append((done, all_)))
    assert seen[-1] == (total, total) and len(seen) == 4
    export_weights(str(tmp_path / "from"), str(tmp_path / "w"), progress=lambda done, all_: seen.append((done, all_)))
    assert seen[-1] == (total, total) and len(seen) == 6
