"""How large a checkpoint is, and whether there is room for it before step 0. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from paceline.errors import DiskFull
from paceline.model.spec import ModelSpec, parameters
from paceline.optim.config import OptimizerSection
from paceline.optim.cost import moments_bytes
from paceline.units import format_bytes

TENSOR_HEAD_BYTES = 1024
"""Room for the names, boxes and checksums of a tensor's pieces in the headers and the manifest."""

FILES_BESIDE_RANKS = 4
"""The folder, the manifest, the mark and one that is being written."""


class Room(Protocol):
    """The part of a storage that is asked here; None where it does not say."""

    @property
    def place(self) -> str: ...

    def free_bytes(self) -> int | None: ...

    def free_files(self) -> int | None: ...


def checkpoint_bytes(elements: ModelSpec | Sequence[int], optimizer: OptimizerSection, element_bytes: int = 4) -> int:
    """Bytes of a checkpoint: weights, moments and step counts, and about what names them.

    Args:
        elements: the model, or the elements of each of its parameters; all of them trained.
        optimizer: what keeps moments.
        element_bytes: of weights and moments; 8 under fp64.
    """
    if isinstance(elements, ModelSpec):
        elements = [math.prod(p.shape) for p in parameters(elements)]
    total, tensors = sum(elements), len(elements)
    state = total * element_bytes + moments_bytes(optimizer, total, tensors, element_bytes)
    return state + tensors * TENSOR_HEAD_BYTES


def preflight(storage: Room, size_bytes: int, keep: int, *, ranks: int = 1, present: int = 0) -> list[str]:
    """Sentences to print before step 0 about the room for checkpoints.

    Args:
        storage: where they go.
        size_bytes: of one checkpoint.
        keep: checkpoints that are kept; one more is there until it is verified.
        ranks: that write a file each.
        present: checkpoints of this run that are there already.

    Raises:
        DiskFull: not even one checkpoint fits, in bytes or in files.
    """
    free, files, wanted = storage.free_bytes(), storage.free_files(), ranks + FILES_BESIDE_RANKS
    where = f"a checkpoint takes {format_bytes(size_bytes)} and {wanted} files in {storage.place}"
    if free is not None and free < size_bytes:
        raise _no_room(storage.place, f"{where}, where {format_bytes(free)} are free", size_bytes, free)
    if files is not None and files < wanted:
        raise _no_room(storage.place, f"{where}, where {files} more files (inodes) may be made", wanted, files)
    more = max(1, keep + 1 - present)
    if free is None or free >= more * size_bytes:
        return []
    if free < min(2, more) * size_bytes:
        reason = "less than two, so that the second save will fail unless room is made"
    else:
        needed = format_bytes(more * size_bytes)
        reason = f"checkpoint.keep = {keep} needs {needed} more, one of them until the newest is verified"
    return [f"warning: {where}, where {format_bytes(free)} are free: {reason}"]


def _no_room(place: str, message: str, needed: int, free: int) -> DiskFull:
    return DiskFull(
        f"{message}; the run would end without one",
        key="checkpoint.dir",
        values={"path": place, "needed": needed, "free": free},
        hint="Free space there, or point checkpoint.dir at another disk, then give the same command again.",
    )
