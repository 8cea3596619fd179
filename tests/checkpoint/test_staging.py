"""The staging buffer: a whole file in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.checkpoint.boxes import Placement
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.plan import plan_images
from paceline.checkpoint.staging import Stage, StagingBuffer, held
from paceline.errors import OutOfMemory
from tests.checkpoint.savers import copies, odd_tensors, parts


def test_the_buffer_is_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = odd_tensors()
    _, placed = copies(tensors)
    (image,) = plan_images([held(placed)])
    stage = Stage(image, placed)
    stage.copy()
    assert stage.buffer is not None
    (tmp_path / "x.safetensors").write_bytes(os.pread(stage.buffer.descriptor, image.size_bytes, 0))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        found = {name.partition("@")[0]: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == {name for name, tensor in tensors.items() if tensor.numel()}
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])


def test_a_part_of_a_shard_is_staged_from_the_right_place() -> None:
    tensors = {"a": torch.arange(30.0).view(10, 3)}
    placed = [parts(tensors, rank, 3)[1] for rank in range(3)]
    images = plan_images([held(p) for p in placed])
    for image, own in zip(images, placed, strict=True):
        stage = Stage(image, own)
        stage.copy()
        for piece, begin, end in image.spans():
            assert stage.buffer is not None
            values = stage.buffer.bytes[begin:end].view(torch.float32).view(piece.box.shape)
            if piece.name == "a":
                assert torch.equal(values, tensors["a"][piece.box.offset[0] :][: piece.box.shape[0]])


def test_a_copy_takes_the_values_of_its_moment() -> None:
    own, placed = copies({"a": torch.zeros(5), "b": torch.zeros((), dtype=torch.int64)})
    (image,) = plan_images([held(placed)])
    stage = Stage(image, placed)
    own["a"] += 1
    stage.copy()
    own["a"] += 1
    own["b"] += 1
    assert stage.buffer is not None
    assert stage.buffer.bytes[image.header_bytes + 8 :].view(torch.float32).tolist() == [1.0] * 5
    assert stage.buffer.bytes[image.header_bytes :][:8].view(torch.int64).item() == 0


def test_no_room_for_the_buffer_is_an_error_with_numbers_and_not_a_signal() -> None:  # BL-42
    with pytest.raises(OutOfMemory, match=r"staging buffer .* takes 1024 TiB of this host's memory, and .* are free"):
        StagingBuffer(2**50)


def test_pieces_that_follow_each_other_are_one_copy() -> None:
    tensors = {"a": torch.arange(9_000_000.0), "b": torch.arange(6.0).view(2, 3), "c": torch.tensor(1.0)}
    own, placed = copies(tensors)
    (image,) = plan_images([held(placed)])
    stage = Stage(image, placed)
    assert len(image.pieces) == 5 and [move.size for move in stage._moves] == [36_000_000, 24, 4]
    stage.copy()
    assert stage.buffer is not None
    staged = stage.buffer.bytes[image.header_bytes :].view(torch.float32)
    assert torch.equal(staged, torch.cat([own["a"], own["b"].flatten(), own["c"].view(1)]))


def test_replicas_are_staged_in_parts_that_make_the_whole() -> None:
    tensors = {"a": torch.arange(9_000_000.0), "b": torch.arange(7.0)}
    placed = [copies(tensors)[1] for _ in range(3)]
    found = torch.zeros(9_000_000)
    for image, own in zip(plan_images([held(p) for p in placed]), placed, strict=True):
        stage = Stage(image, own)
        stage.copy()
        for piece, begin, end in image.spans():
            assert stage.buffer is not None
            if piece.name == "a":
                part = found[piece.box.offset[0] :][: piece.box.shape[0]]
                part += stage.buffer.bytes[begin:end].view(torch.float32)
    assert torch.equal(found, tensors["a"])


def test_a_tensor_that_is_not_contiguous_is_staged_by_its_elements() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    placed = [Placed("a", tensor, *Placement.whole(tensor.shape))]
    (image,) = plan_images([held(placed)])
    stage = Stage(image, placed)
    stage.copy()
    assert stage.buffer is not None
    assert torch.equal(stage.buffer.bytes[image.header_bytes :].view(torch.float32), tensor.reshape(-1))
