"""Where offloaded moments live: a memory-mapped file of this rank, or pinned host memory.

A store hands out flat tensors and takes back the pages of a part that is done with.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import DiskFull, JobError
from paceline.run.files import disk_full, is_no_space

KEY = "parallel.offload_dir"


class Store(Protocol):
    """Memory for moments. `release(first, last)`: elements in that range are not needed for now."""

    flat: Tensor

    def release(self, first: int, last: int) -> None: ...


class MappedFile:
    """`elements` zeros in a file of this process, mapped into memory; pages come and go with their use.

    The file loses its name at once: whatever ends the process, nothing stays in the folder. Its space is reserved before
    anything is written, since a mapped write to a full disk would kill the process.

    Raises:
        DiskFull: the folder's file system has too little space.
        JobError: the folder cannot be written.
    """

    def __init__(self, folder: Path, elements: int, dtype: torch.dtype) -> None:
        self._element_bytes = dtype.itemsize
        size = max(1, elements) * self._element_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix="moments-", dir=folder)
        except OSError as error:
            raise _failed(folder, size, error) from None
        try:
            Path(name).unlink()
            _reserve(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            raise _failed(folder, size, error) from None
        finally:
            os.close(descriptor)
        self.flat = torch.frombuffer(self._map, dtype=dtype, count=max(1, elements))[:elements]

    def release(self, first: int, last: int) -> None:
        """Drop the pages of a range from memory; what was written is in the file's pages, which the system writes out."""
        begin = first * self._element_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, last * self._element_bytes - begin)


class PinnedHost:
    """`elements` zeros in page-locked host memory, which an accelerator copies from without a detour."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self.flat = torch.zeros(elements, dtype=dtype, pin_memory=torch.cuda.is_available())

    def release(self, first: int, last: int) -> None:
        """Nothing: host memory is the place."""


def _reserve(descriptor: int, size: int) -> None:
    """Give the file its blocks, all zeros."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(2**20)
    for begin in range(0, size, len(zeros)):
        os.write(descriptor, zeros[: size - begin])


def _failed(folder: Path, size: int, error: OSError) -> DiskFull | JobError:
    if is_no_space(error):
        full = disk_full(folder, size, error)
        full.key, full.hint = KEY, f"Free space there, or set {KEY} to a folder on another disk."
        return full
    return JobError(
        f"{folder} cannot hold the optimizer's moments: {error.strerror or error}",
        key=KEY,
        values={"folder": str(folder), "bytes": size},
        hint=f"Set {KEY} to a folder on a local disk that can be written.",
    )
