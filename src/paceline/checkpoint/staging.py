"""The staging buffer: a rank's file, laid out in shared memory, into which a save copies and from which the writer writes.

Allocated once: pages that are there take a copy at memory speed, fresh ones cost 25 times as much (2-core AMX machine).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box, overlap
from paceline.checkpoint.piece_file import NewPiece
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.plan import Image
from paceline.checkpoint.reader import DTYPE_NAMES, DTYPES
from paceline.errors import OutOfMemory
from paceline.units import format_bytes


def held(placed: Sequence[Placed]) -> list[NewPiece]:
    """What a rank holds, as the plan wants it."""
    return [NewPiece(p.name, DTYPE_NAMES[p.tensor.dtype], p.shape, p.box) for p in placed]


class StagingBuffer:
    """`size` bytes of memory that another process can map.

    Attributes:
        descriptor: of the memory, to be handed over.
        bytes: the memory as a tensor of bytes.

    Raises:
        OutOfMemory: this host has no room for it.
    """

    def __init__(self, size: int) -> None:
        free = available_bytes()
        if free is not None and size > free:
            raise OutOfMemory(
                f"no room for the staging buffer of checkpoints: it takes {format_bytes(size)} of this host's memory, and "
                f"{format_bytes(free)} are free",
                values={"needed_bytes": size, "free_bytes": free},
                hint="More ranks stage less each; `paceline plan` shows what a rank needs.",
            )
        self.size = size
        self.descriptor = _anonymous_file()
        os.ftruncate(self.descriptor, size)
        self._pages = mmap.mmap(self.descriptor, size)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last tensor that lies in it and the last process that maps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Stage:
    """A rank's staging buffer and what belongs where in it.

    Args:
        image: the rank's file.
        placed: what the rank holds; the same tensors are read at each `copy`.
    """

    def __init__(self, image: Image, placed: Sequence[Placed]) -> None:
        self.image = image
        self.buffer = StagingBuffer(image.size_bytes) if image.pieces else None
        self._moves: list[Move] = []
        if self.buffer is None:
            return
        header = self.image.header()
        # Makes the pages, so that no save has to wait for them.
        self.buffer.bytes.zero_()
        self.buffer.bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._moves = list(_moves(self.buffer.bytes, image, placed))

    @torch.no_grad()
    def copy(self) -> None:
        """Take a snapshot: every element is really copied, so that the tensors may change as soon as this returns."""
        for target, source, size in self._moves:
            if source.is_cpu and source.is_contiguous():
                # Half as fast again as torch's copy, which reads the target's lines before it writes them.
                ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
            else:
                target.copy_(source)

    def close(self) -> None:
        self._moves = []
        if self.buffer is not None:
            self.buffer.close()


class Move(NamedTuple):
    """A part of the buffer, the part of a tensor that belongs there, and their bytes."""

    target: Tensor
    source: Tensor
    size: int


def _moves(memory: Tensor, image: Image, placed: Sequence[Placed]) -> Iterator[Move]:
    by_name: dict[str, list[Placed]] = {}
    for p in placed:
        by_name.setdefault(p.name, []).append(p)
    for piece, begin, end in _runs(image):
        target = memory[begin:end].view(DTYPES[piece.dtype]).view(piece.box.shape)
        yield Move(target, _part(by_name[piece.name], piece.box), end - begin)


def _runs(image: Image) -> Iterator[tuple[NewPiece, int, int]]:
    """The pieces, those that follow each other in their tensor as well as in the file as one."""
    run: tuple[NewPiece, int, int] | None = None
    for piece, begin, end in image.spans():
        if run is not None and _follows(run[0], piece):
            first = run[0].box
            rows = first.shape[0] + piece.box.shape[0]
            run = (piece._replace(box=Box(first.offset, (rows, *first.shape[1:]))), run[1], end)
            continue
        if run is not None:
            yield run
        run = (piece, begin, end)
    if run is not None:
        yield run


def _follows(first: NewPiece, second: NewPiece) -> bool:
    one, other = first.box, second.box
    return (
        first.name == second.name
        and bool(one.shape)
        and one.offset[0] + one.shape[0] == other.offset[0]
        and (one.offset[1:], one.shape[1:]) == (other.offset[1:], other.shape[1:])
    )


def _part(placed: Sequence[Placed], box: Box) -> Tensor:
    """The part of this rank's tensors that is `box` of the whole one."""
    for p in placed:
        shared = overlap(p.box, box)
        if shared is not None and shared.shape == box.shape:
            index = tuple(slice(b, b + n) for b, n in zip(shared.in_first, shared.shape, strict=True))
            return p.tensor.detach()[index]
    raise ValueError(f"this rank does not hold {box} of {placed[0].name}")


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("paceline-staging")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def available_bytes() -> int | None:
    """Memory that this process could still get without swapping; None where the system does not say.

    Looked at before the buffer is made: pages that the host does not have end some process without a word.
    """
    limits = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    # What a control group uses counts without its page cache, which gives way.
    used = [
        int(line.split()[1]) for line in _lines("/sys/fs/cgroup/memory.stat") if line.startswith(("anon ", "shmem "))
    ]
    limits += [int(limit) - sum(used) for limit in _lines("/sys/fs/cgroup/memory.max") if limit.isdigit()]
    return min(limits, default=None)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []
