"""Loading into any boxes, element by element against what was saved; what does not fit or is damaged is named."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.checkpoint.boxes import Box, Placement
from paceline.checkpoint.folders import read_manifest
from paceline.checkpoint.manifest import Manifest, Piece, StoredTensor
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.reader import DTYPE_NAMES, DTYPES, load_tensors, read_whole
from paceline.checkpoint.storage import Storage, open_storage
from paceline.errors import JobError, NoCheckpoint
from tests.checkpoint.written import (
    ODD_SHAPES,
    Split,
    by_columns,
    by_rows,
    empty_parts,
    numbers,
    odd_tensors,
    part_of,
    random_cut,
    write_pieces,
    write_split,
)

FILE = "step-00000100/rank-00000.safetensors"


def whole(name: str, tensor: torch.Tensor) -> Placed:
    box, shape = Placement.whole(tensor.shape)
    return Placed(name, torch.zeros_like(tensor), box, shape)


def replaced(manifest: Manifest, name: str, **changes: object) -> Manifest:
    """The manifest with another statement about one tensor."""
    stored = msgspec.structs.replace(manifest.tensors[name], **changes)
    return msgspec.structs.replace(manifest, tensors={**manifest.tensors, name: stored})


@pytest.mark.parametrize("split", [by_rows, by_columns])
@pytest.mark.parametrize("write", [by_rows, by_columns])
def test_every_element_survives_4_to_2_to_3_ranks(tmp_path: Path, write: Split, split: Split) -> None:
    # BL-47
    tensors = odd_tensors()
    saved = {4: write_split(tmp_path / "4", tensors, write, 4)}
    for before, ranks in ((4, 2), (2, 3)):
        storage, manifest = saved[before]
        pieces: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
        again = {name: torch.full_like(tensor, 55) for name, tensor in tensors.items()}
        for rank in range(ranks):
            wanted = empty_parts(tensors, split, rank, ranks)
            report = load_tensors(storage, manifest, wanted)
            assert report.loaded == sorted(tensors) and not report.missing and not report.unexpected
            for placed in wanted:
                expected = part_of(tensors[placed.name], placed.box)
                assert torch.equal(placed.tensor, expected), f"{placed.name} on rank {rank} of {ranks}"
                slices = tuple(slice(o, o + n) for o, n in zip(*placed.box, strict=True))
                again[placed.name][slices] = placed.tensor
                if rank == 0 or (placed.shape and placed.box.elements):
                    pieces[rank].setdefault(placed.name, []).append(placed.box)
        saved[ranks] = write_pieces(tmp_path / str(ranks), again, pieces)
    storage, manifest = saved[3]
    assert {name: tensor.tolist() for name, tensor in read_whole(storage, manifest)} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=lambda d: str(d).removeprefix("torch."))
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = torch.arange(60, dtype=torch.uint8).repeat(8)[: 60 * dtype.itemsize].view(torch.uint8)
    tensor = (saved % 2).bool() if dtype == torch.bool else saved.view(dtype)
    storage, manifest = write_split(tmp_path, {"model/w": tensor.reshape(-1, 6)}, by_rows, 3)
    (_, found), *rest = read_whole(storage, manifest)
    assert not rest and found.dtype == dtype
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert DTYPES[manifest.tensors["model/w"].dtype] == dtype


@pytest.mark.parametrize("seed", range(12))
def test_any_pieces_fill_any_boxes(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    shape = tuple(random_.randrange(1, 8) for _ in range(random_.randrange(1, 5)))
    tensor, box = numbers(shape, torch.float64, seed), Placement.whole(shape).box
    files: list[dict[str, list[Box]]] = [{"model/w": []} for _ in range(3)]
    for piece in random_cut(random_, box, random_.randrange(1, 12)):
        random_.choice(files)["model/w"].append(piece)
    storage, manifest = write_pieces(tmp_path, {"model/w": tensor}, files)
    for wanted in random_cut(random_, box, random_.randrange(1, 12)):
        placed = Placed("model/w", torch.zeros(wanted.shape, dtype=torch.float64), wanted, shape)
        load_tensors(storage, manifest, [placed])
        assert torch.equal(placed.tensor, part_of(tensor, wanted)), wanted


@pytest.mark.gpu
def test_tensors_on_a_device_are_filled_through_the_host(tmp_path: Path) -> None:
    tensor = numbers((7, 5), torch.bfloat16)
    storage, manifest = write_split(tmp_path, {"model/w": tensor}, by_columns, 3)
    parts = [by_rows((7, 5), part, 2) for part in range(2)]
    wanted = [Placed("model/w", torch.zeros(b.shape, dtype=torch.bfloat16, device="cuda"), b, s) for b, s in parts]
    load_tensors(storage, manifest, wanted)
    assert torch.equal(torch.cat([placed.tensor.cpu() for placed in wanted]), tensor)


def test_a_piece_that_several_boxes_need_is_read_once(tmp_path: Path) -> None:
    tensor = numbers((12, 4))
    storage, manifest = write_split(tmp_path, {"model/w": tensor}, by_rows, 3)
    parts = [by_rows((12, 4), part, 4) for part in range(4)]
    wanted = [Placed("model/w", torch.zeros(box.shape), box, shape) for box, shape in parts]
    report = load_tensors(storage, manifest, wanted)
    assert torch.equal(torch.cat([placed.tensor for placed in wanted]), tensor)
    assert (report.pieces, report.bytes_read) == (3, tensor.nbytes)
    one = load_tensors(storage, manifest, wanted[:1])
    assert (one.pieces, one.bytes_read) == (1, tensor.nbytes // 3)


def test_a_parameter_that_takes_gradients_is_filled(tmp_path: Path) -> None:
    tensor = numbers((4, 2))
    storage, manifest = write_split(tmp_path, {"model/w": tensor}, by_rows, 1)
    box, shape = Placement.whole((4, 2))
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    load_tensors(storage, manifest, [Placed("model/w", parameter, box, shape)])
    assert torch.equal(parameter.detach(), tensor) and parameter.requires_grad


def test_names_of_one_side_only_are_listed_both_ways(tmp_path: Path) -> None:
    # BL-49: missing and unexpected names pass in other systems without a word
    storage, manifest = write_split(tmp_path, {"model/w": numbers((2,)), "model/old": numbers((3,))}, by_rows, 1)
    wanted = [whole("model/w", numbers((2,))), whole("model/new", numbers((2,)))]
    with pytest.raises(
        JobError, match="missing from the checkpoint: model/new; only in the checkpoint: model/old"
    ) as e:
        load_tensors(storage, manifest, wanted)
    assert e.value.values["missing"] == ["model/new"] and e.value.values["unexpected"] == ["model/old"]
    assert "checkpoint.allow_missing" in str(e.value.hint)
    assert not wanted[0].tensor.any(), "nothing may be filled where something does not fit"


def test_allowed_names_are_reported_and_left_at_their_value(tmp_path: Path) -> None:
    # BL-49
    storage, manifest = write_split(tmp_path, {"model/w": numbers((2,)), "model/head.old": numbers((3,))}, by_rows, 1)
    wanted = [whole("model/w", numbers((2,))), Placed("model/head.new", torch.ones(2), Box((0,), (2,)), (2,))]
    report = load_tensors(storage, manifest, wanted, allow_missing=["model/head.*"], allow_unexpected=["model/head.*"])
    assert (report.loaded, report.missing, report.unexpected) == (["model/w"], ["model/head.new"], ["model/head.old"])
    assert wanted[1].tensor.tolist() == [1, 1]


def test_no_pattern_excuses_the_optimizer(tmp_path: Path) -> None:
    # BL-38, BL-49: moments left at zero train on with the right gradient and a wrong step
    storage, manifest = write_split(
        tmp_path, {"model/w": numbers((2,)), "optimizer/exp_avg/v": numbers((2,))}, by_rows, 1
    )
    wanted = [whole("model/w", numbers((2,))), whole("optimizer/exp_avg/w", numbers((2,)))]
    with pytest.raises(JobError, match="optimizer/exp_avg/w; only in the checkpoint: optimizer/exp_avg/v") as e:
        load_tensors(storage, manifest, wanted, allow_missing=["*"], allow_unexpected=["*", "optimizer/*"])
    assert "the optimizer's state must be there in full" in str(e.value.hint)


def test_another_shape_or_type_is_named_with_both(tmp_path: Path) -> None:
    storage, manifest = write_split(tmp_path, {"model/w": numbers((4, 2)), "model/v": numbers((2,))}, by_rows, 2)
    wanted = [whole("model/w", numbers((8, 2))), whole("model/v", numbers((2,), torch.bfloat16))]
    with pytest.raises(JobError) as e:
        load_tensors(storage, manifest, wanted)
    assert "model/w has shape (4, 2) in the checkpoint and (8, 2) in the model" in e.value.message
    assert "model/v is F32 in the checkpoint and BF16 in the model" in e.value.message


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_values(tmp_path: Path) -> None:
    tensors = {f"model/w{index:02d}": numbers((1,)) for index in range(20)}
    storage, manifest = write_split(tmp_path, tensors, by_rows, 1)
    with pytest.raises(JobError, match="model/w07 and 12 more") as e:
        load_tensors(storage, manifest, [])
    assert len(e.value.values["unexpected"]) == 20


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def two_files(tmp_path: Path) -> tuple[Storage, Manifest, torch.Tensor]:
    tensor = numbers((6, 4))
    storage, manifest = write_split(tmp_path, {"model/w": tensor}, by_rows, 2)
    return storage, manifest, tensor


def test_a_flipped_bit_is_named_and_nothing_of_its_piece_is_taken(tmp_path: Path) -> None:
    storage, manifest, tensor = two_files(tmp_path)
    piece = manifest.tensors["model/w"].pieces[0]
    flip(tmp_path / FILE, piece.begin + 5)
    wanted = [whole("model/w", tensor)]
    with pytest.raises(NoCheckpoint) as e:
        load_tensors(storage, manifest, wanted)
    assert f"{FILE} is damaged" in e.value.message and "the piece of model/w at [0, 0]" in e.value.message
    assert e.value.values["expected"] == f"checksum {piece.checksum}"
    assert e.value.values["actual"] in e.value.message and e.value.values["tensor"] == "model/w"
    assert not wanted[0].tensor.any()
    intact = by_rows((6, 4), 1, 2)
    load_tensors(storage, manifest, [Placed("model/w", torch.zeros(3, 4), *intact)])  # a reader of the other piece


def test_a_missing_shard_is_named_and_no_tensor_shrinks(tmp_path: Path) -> None:
    # A shape is what the manifest says, never what the files that are present add up to.
    storage, manifest, tensor = two_files(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(NoCheckpoint, match=r"rank-00000.safetensors is damaged: the piece of model/w.*no such file"):
        load_tensors(storage, manifest, [whole("model/w", tensor)])


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    storage, manifest, tensor = two_files(tmp_path)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(manifest.files["rank-00000.safetensors"].size_bytes - 8)
    with pytest.raises(NoCheckpoint, match="should give 48 bytes, and gives 40 bytes before the file ends"):
        load_tensors(storage, manifest, [whole("model/w", tensor)])


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    storage, manifest, tensor = two_files(tmp_path)
    first, second = (tmp_path / f"step-00000100/rank-0000{rank}.safetensors" for rank in (0, 1))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    with pytest.raises(NoCheckpoint, match="should give checksum"):
        load_tensors(storage, manifest, [whole("model/w", tensor)])


def lie(stored: StoredTensor, index: int, **changes: object) -> tuple[Piece, ...]:
    pieces = list(stored.pieces)
    pieces[index] = msgspec.structs.replace(pieces[index], **changes)
    return tuple(pieces)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "F33"}, "type 'F33' is unknown"),
        ({"shape": (7, 4)}, "do not cover shape (7, 4) exactly once"),
        ({"shape": (-6, -4)}, "is negative"),
        ({"dtype": "F64"}, "has 48 bytes where its shape (3, 4) needs 96"),
        ({"piece": {"offset": (4, 0)}}, "do not cover shape (6, 4) exactly once"),
        ({"piece": {"offset": (0, 0)}}, "do not cover shape (6, 4) exactly once"),
        ({"piece": {"offset": (3,)}}, "do not cover"),
        ({"piece": {"shape": (2, 4)}}, "has 48 bytes where its shape (2, 4) needs 32"),
        ({"piece": {"shape": (-3, -4)}}, "is negative"),
        ({"piece": {"file": "rank-00009.safetensors"}}, "rank-00009.safetensors, which is not among the files"),
        ({"piece": {"file": "../../etc/passwd"}}, "which is not among the files"),
        ({"piece": {"begin": 0, "end": 48}}, "lies at bytes 0 to 48"),
        ({"piece": {"begin": 2**40, "end": 2**40 + 48}}, "lies at bytes 1099511627776"),
        ({"pieces": ()}, "its 0 pieces do not cover"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    storage, manifest, _ = two_files(tmp_path)
    if "piece" in changes:
        changes = {"pieces": lie(manifest.tensors["model/w"], 1, **changes["piece"])}  # type: ignore[arg-type]
    lying = replaced(manifest, "model/w", **changes)
    with pytest.raises(NoCheckpoint, match="contradicts itself about model/w") as e:
        list(read_whole(storage, lying))
    assert reason in e.value.message, e.value.message


def test_a_checkpoint_of_one_folder_is_read_where_it_was_copied(tmp_path: Path) -> None:
    _, manifest, tensor = two_files(tmp_path / "here")
    (tmp_path / "here" / "step-00000100").rename(tmp_path / "copy")
    report = load_tensors(open_storage(tmp_path / "copy"), manifest, [placed := whole("model/w", tensor)], folder="")
    assert report.pieces == 2 and torch.equal(placed.tensor, tensor)


def test_whole_tensors_by_name_in_the_order_asked(tmp_path: Path) -> None:
    storage, _ = write_split(tmp_path, odd_tensors(), by_columns, 3)
    manifest = read_manifest(storage, 100)
    names = ["model/d", "model/a"]
    assert [name for name, _ in read_whole(storage, manifest, names)] == names
    assert sorted(ODD_SHAPES) == [name for name, _ in read_whole(storage, manifest)]
    with pytest.raises(JobError, match="holds no tensor model/z"):
        list(read_whole(storage, manifest, ["model/z"]))


def test_a_box_outside_of_its_tensor_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    storage, manifest, _ = two_files(tmp_path)
    with pytest.raises(ValueError, match="was placed at"):
        load_tensors(storage, manifest, [Placed("model/w", torch.zeros(3, 4), Box((5, 0), (3, 4)), (6, 4))])
