"""The arithmetic of boxes, against the planner of `torch.distributed.checkpoint` and against counting elements."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

from paceline.checkpoint.boxes import Box, Overlap, Placement, overlap, rows, tiles
from tests.checkpoint.written import random_cut
from tests.pool.pool import Pool

SHAPES: list[tuple[int, ...]] = [(3, 5), (7,), (1,), (129, 3), (), (0, 4), (4, 6, 5), (2, 1, 3, 2)]


def chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_those_of_the_library_planner(seed: int) -> None:
    random_ = random.Random(seed)
    shape = tuple(random_.randrange(1, 9) for _ in range(random_.randrange(4)))
    whole = Placement.whole(shape).box
    stored, wanted = (random_cut(random_, whole, random_.randrange(1, 9)) for _ in range(2))
    metadata = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [chunk(b) for b in stored])
    theirs = {
        (item.storage_index.index, item.dest_index.index): Overlap(
            tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)
        )
        for item in create_read_items_for_chunk_list("w", metadata, [chunk(b) for b in wanted])
    }
    ours = {
        (i, j): shared
        for i, piece in enumerate(stored)
        for j, box in enumerate(wanted)
        if (shared := overlap(piece, box)) is not None
    }
    assert ours == theirs
    assert sum(Box(o.in_first, o.shape).elements for o in ours.values()) == whole.elements


@pytest.mark.parametrize("seed", range(40))
def test_tiles_counts_as_a_mask_does(seed: int) -> None:
    random_ = random.Random(1000 + seed)
    shape = tuple(random_.randrange(0, 6) for _ in range(random_.randrange(4)))
    boxes = random_cut(random_, Placement.whole(shape).box, random_.randrange(1, 7))
    if random_.random() < 0.5:
        victim = boxes.pop(random_.randrange(len(boxes)))
        boxes += [victim, victim] if random_.random() < 0.5 else []
    if boxes and random_.random() < 0.5:
        moved = boxes.pop()
        boxes.append(Box(tuple(max(0, o + random_.choice((-1, 0, 1))) for o in moved.offset), moved.shape))
    times = torch.zeros(shape, dtype=torch.int64)
    outside = any(o + n > s for b in boxes for o, n, s in zip(b.offset, b.shape, shape, strict=True))
    for box in boxes:
        times[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] += 1
    assert tiles(boxes, shape) == (not outside and bool((times == 1).all()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_rows_and_parts_tile(shape: tuple[int, ...], parts: int) -> None:
    whole = Placement.whole(shape).box
    for elements in (1, 7, 10**6):
        assert tiles(list(rows(whole, elements)), shape)
    if shape:
        assert tiles([Placement.rows(shape, part, parts).box for part in range(parts)], shape)


def test_rows_are_as_large_as_asked_and_never_less_than_one() -> None:
    assert [box.shape for box in rows(Placement.whole((10, 4)).box, 12)] == [(3, 4), (3, 4), (3, 4), (1, 4)]
    assert [box.shape for box in rows(Placement.whole((2, 100)).box, 3)] == [(1, 100), (1, 100)]


def _parts_of_dtensors(rank: int, world_size: int) -> list[tuple[list[int], list[int]]]:
    from torch.distributed.checkpoint.planner_helpers import _create_write_items_for_dtensor

    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for shape in SHAPES:
        if shape:
            tensor = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
            data = _create_write_items_for_dtensor("w", tensor).tensor_data
            assert data is not None
            found.append((list(data.chunk.offsets), list(data.chunk.sizes)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_those_of_dtensors(pool: Pool, ranks: int) -> None:
    found = pool.run(_parts_of_dtensors, ranks)
    for rank, parts in enumerate(found):
        for shape, (offset, extent) in zip([shape for shape in SHAPES if shape], parts, strict=True):
            box = Placement.rows(shape, rank, ranks).box
            assert list(box.shape) == extent, (shape, rank)
            if box.elements:
                assert list(box.offset) == offset, (shape, rank)
