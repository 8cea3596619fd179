"""Batches in memory that a rank and its loader workers share. Imports no torch.

A buffer is a file without a name (on Linux in /dev/shm): whoever dies, however, nothing is left behind. Its pages are
reserved before they are written, so a full /dev/shm is an error that can be handled, and not a bus error.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.collate import Batch
from paceline.units import format_bytes

SHARED_MEMORY = Path("/dev/shm")
IN_USE_BUFFERS = 2
"""As a step is handed over, the caller still has the one before it."""
_ALIGNMENT = 64

Field = tuple[str, str, tuple[int, ...], int]
Layout = list[list[Field]]
"""Per micro-batch the fields: name, dtype, shape, offset in the buffer."""


def shared_memory_need(*, batch_bytes: int, workers: int, prefetch: int, ranks: int) -> int:
    """Bytes of shared memory of a host: each worker has a buffer per step ahead and `IN_USE_BUFFERS`.

    Args:
        batch_bytes: of one rank's share of an optimizer step.
        workers: per rank.
        prefetch: steps ahead per worker.
        ranks: on this host.
    """
    return batch_bytes * workers * (prefetch + IN_USE_BUFFERS) * ranks if workers else 0


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm, or None where there is none."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def check_shared_memory(need_bytes: int, free_bytes: int | None) -> str | None:
    """A warning with both numbers where the loader needs more shared memory than is free, or None."""
    if free_bytes is None or need_bytes <= free_bytes:
        return None
    return (
        f"loader workers need {format_bytes(need_bytes)} of shared memory, {SHARED_MEMORY} has "
        f"{format_bytes(free_bytes)} free: what does not fit goes through a pipe, which is slower. Lower data.workers "
        f"or batch.global_batch, or enlarge {SHARED_MEMORY} (docker run --shm-size, or an emptyDir of medium Memory in "
        "Kubernetes)."
    )


def batch_bytes(batches: list[Batch]) -> int:
    """Bytes of the arrays of a step."""
    return sum(array.nbytes for batch in batches for array in batch.values())


def new_buffer_file() -> int:
    """A file descriptor for a buffer; the file has no name and goes with the last process that has it open."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    if folder is not None and hasattr(os, "O_TMPFILE"):
        # Never named, so that not even a kill in the right moment leaves it.
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    handle, name = tempfile.mkstemp(prefix="paceline-", dir=folder)
    Path(name).unlink()
    return handle


class _Lease(np.ndarray[Any, Any]):
    """The whole buffer as an array that numpy keeps as the base of every view, and that says when the last one goes."""

    released: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.released is not None:
            self.released()


class _Dtypes(dict[str, np.dtype[Any]]):
    """Each dtype parsed once."""

    def __missing__(self, name: str) -> np.dtype[Any]:
        self[name] = np.dtype(name)
        return self[name]


_DTYPES = _Dtypes()


class Buffer:
    """One step's batches at a time, in a file that grows as needed."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._map: mmap.mmap | None = None

    def write(self, batches: list[Batch]) -> Layout:
        """Copy the batches in. Raises OSError where the memory cannot be had; the buffer then keeps its size."""
        layout, total = _lay_out(batches)
        if self._map is None or total > len(self._map):
            _reserve(self.handle, total)
        memory = self._mapped(total)
        for batch, fields in zip(batches, layout, strict=True):
            for name, dtype, shape, offset in fields:
                np.ndarray(shape, dtype, buffer=memory, offset=offset)[...] = batch[name]
        return layout

    def read(self, layout: Layout, released: Callable[[], None]) -> list[Batch]:
        """Views of the batches, without a copy; `released` is called when the last of them is gone."""
        memory = self._mapped(_size(layout))
        lease = np.ndarray.__new__(_Lease, (len(memory),), np.uint8, buffer=memory)
        lease.released = released
        return [
            {
                name: np.ndarray(shape, _DTYPES[dtype], buffer=lease, offset=offset)
                for name, dtype, shape, offset in fields
            }
            for fields in layout
        ]

    def close(self) -> None:
        """Give the file up; views that are still in use stay valid."""
        self._map = None
        os.close(self.handle)

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.handle, os.fstat(self.handle).st_size)
        return self._map


def copied(batches: list[Batch]) -> list[Batch]:
    """The batches in memory of their own."""
    return [{name: array.copy() for name, array in batch.items()} for batch in batches]


def _size(layout: Layout) -> int:
    """Bytes up to the end of the last field."""
    _, dtype, shape, offset = layout[-1][-1]
    return max(offset + math.prod(shape) * np.dtype(dtype).itemsize, _ALIGNMENT)


def _lay_out(batches: list[Batch]) -> tuple[Layout, int]:
    layout, offset = [], 0
    for batch in batches:
        fields: list[Field] = []
        for name, array in batch.items():
            fields.append((name, array.dtype.str, array.shape, offset))
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        layout.append(fields)
    return layout, max(offset, _ALIGNMENT)


def _reserve(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)
