"""Checkpoints for tests of readers: any tensors, cut in any way over any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box, Placement
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.piece_file import NewPiece, begin_step, commit_step, file_name, tensors_of, write_piece_file
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.reader import DTYPE_NAMES
from paceline.checkpoint.storage import Storage, open_storage

ODD_SHAPES: dict[str, tuple[int, ...]] = {
    "model/a": (3, 5),
    "model/b": (7,),
    "model/c": (1,),
    "model/d": (129, 3),
    "model/e": (),
    "model/f": (0, 4),
    "optimizer/exp_avg/a": (3, 5),
    "optimizer/step/a": (),
}
Split = Callable[[tuple[int, ...], int, int], Placement]
"""What part number `part` of `parts` holds of a tensor of a shape."""


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers of a type, all bits in use."""
    generator = torch.Generator().manual_seed(seed + sum(shape) * 31)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def odd_tensors() -> dict[str, Tensor]:
    """One of each odd shape, in several types."""
    types = [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.float16,
        torch.float32,
        torch.float32,
    ]
    return {
        name: numbers(shape, dtype, seed)
        for seed, ((name, shape), dtype) in enumerate(zip(ODD_SHAPES.items(), types, strict=True))
    }  # fmt: skip


def by_rows(shape: tuple[int, ...], part: int, parts: int) -> Placement:
    """As `fully_shard` cuts; a tensor without dims is whole on every rank."""
    return Placement.rows(shape, part, parts) if shape else Placement.whole(shape)


def by_columns(shape: tuple[int, ...], part: int, parts: int) -> Placement:
    """The last dim cut, as row-parallel layers do."""
    if not shape:
        return Placement.whole(shape)
    (offset, extent), _ = Placement.rows((shape[-1],), part, parts)
    lead = shape[:-1]
    return Placement(Box((*(0 for _ in lead), *offset), (*lead, *extent)), shape)


def part_of(tensor: Tensor, box: Box) -> Tensor:
    """The elements of a box, on their own."""
    slices = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    return tensor[slices].clone()


def random_cut(random_: random.Random, box: Box, pieces: int) -> list[Box]:
    """The box in about so many boxes, cut at random in any dims."""
    boxes = [box]
    while len(boxes) < pieces:
        whole = boxes.pop(random_.randrange(len(boxes)))
        dims = [dim for dim, extent in enumerate(whole.shape) if extent > 1]
        if not dims:
            return [*boxes, whole]
        dim = random_.choice(dims)
        at = random_.randrange(1, whole.shape[dim])
        for begin, end in ((0, at), (at, whole.shape[dim])):
            offset, shape = list(whole.offset), list(whole.shape)
            offset[dim] += begin
            shape[dim] = end - begin
            boxes.append(Box(tuple(offset), tuple(shape)))
    return boxes


def empty_parts(tensors: Mapping[str, Tensor], split: Split, part: int, parts: int) -> list[Placed]:
    """What a rank would want to load, filled with what is surely wrong."""
    wanted = []
    for name, tensor in tensors.items():
        box, shape = split(tuple(tensor.shape), part, parts)
        wanted.append(Placed(name, torch.full(box.shape, 77).to(tensor.dtype), box, shape))
    return wanted


def write_pieces(
    place: str | Path,
    tensors: Mapping[str, Tensor],
    pieces: Sequence[Mapping[str, Sequence[Box]]],
    step: int = 100,
    **fields: Any,
) -> tuple[Storage, Manifest]:
    """A committed checkpoint with one file per entry of `pieces`, which says the boxes in it by tensor name."""
    storage = open_storage(str(place))
    folder = begin_step(storage, step)

    def content(piece: NewPiece) -> bytes:
        flat = part_of(tensors[piece.name], piece.box).contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()

    files = [
        write_piece_file(
            storage,
            folder,
            file_name(rank),
            [
                NewPiece(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape), box)
                for name, boxes in held.items()
                for box in boxes
            ],
            content,
        )
        for rank, held in enumerate(pieces)
    ]
    manifest = Manifest(
        version="0.1.0", run_id="run", attempt=1, step=step, samples=step * 8, time=1e9, world_size=len(pieces),
        layout={"dp_shard": len(pieces)}, tensors=tensors_of(files), files={f.name: f.file for f in files},
        state=fields.get("state", {}), ranks=[{"rank": rank} for rank in range(len(pieces))],
        about=fields.get("about", {}),
    )  # fmt: skip
    commit_step(storage, manifest)
    return storage, manifest


def write_split(
    place: str | Path, tensors: Mapping[str, Tensor], split: Split, ranks: int, step: int = 100, **fields: Any
) -> tuple[Storage, Manifest]:
    """A committed checkpoint as `ranks` ranks would write it: their parts, what is replicated once."""
    pieces: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        boxes = [split(tuple(tensor.shape), rank, ranks).box for rank in range(ranks)]
        for rank, box in enumerate(boxes):
            if box not in boxes[:rank] and (box.elements or not tensor.numel()):
                pieces[rank].setdefault(name, []).append(box)
    return write_pieces(place, tensors, pieces, step, **fields)
