"""Writing past the page cache and through it gives the same file."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from pathlib import Path

import pytest

from paceline.checkpoint import storage_write
from paceline.checkpoint.storage import WRITE_SLICE_BYTES, open_storage
from paceline.checkpoint.storage_write import BLOCK_BYTES, DIRECT_BYTES, write_parts

SIZES = {
    "small": [100],
    "blocks": [WRITE_SLICE_BYTES, DIRECT_BYTES],
    "a tail": [WRITE_SLICE_BYTES, DIRECT_BYTES + 5],
    "several slices": [2 * WRITE_SLICE_BYTES + DIRECT_BYTES + 17],
    "not at a block's boundary": [96, DIRECT_BYTES],
    "back at one": [96, BLOCK_BYTES - 96, DIRECT_BYTES, 1],
}


def data(size: int) -> memoryview:
    """Random bytes in pages of their own, as a staging buffer has them."""
    pages = mmap.mmap(-1, size + BLOCK_BYTES)
    pages[:size] = os.urandom(size)
    return memoryview(pages)[:size]


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_byte_is_written_where_it_belongs(tmp_path: Path, place: Path, sizes: list[int], in_memory: bool) -> None:
    storage = open_storage(place if in_memory else tmp_path / "c")
    storage.make_folder("")
    whole = data(sum(sizes))
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    storage.write("file", parts, len(whole))
    assert storage.read("file") == whole


def test_bytes_that_lie_anywhere_are_written(tmp_path: Path) -> None:
    shifted = data(2 * DIRECT_BYTES)[7:]
    with (tmp_path / "file").open("wb") as file:
        assert write_parts(file.fileno(), "file", [shifted]) == len(shifted)
    assert (tmp_path / "file").read_bytes() == shifted


def test_a_file_system_that_refuses_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, bool]] = []
    write, fcntl = os.write, storage_write.fcntl.fcntl

    def refuse(handle: int, view: memoryview) -> int:
        is_direct = bool(fcntl(handle, storage_write.fcntl.F_GETFL) & os.O_DIRECT)
        calls.append((len(view), is_direct))
        if is_direct:
            raise OSError(errno.EINVAL, "no")
        return write(handle, view)

    monkeypatch.setattr(storage_write.os, "write", refuse)
    whole = data(2 * WRITE_SLICE_BYTES)
    with (tmp_path / "file").open("wb") as file:
        write_parts(file.fileno(), "file", [whole])
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == whole
    assert calls == [(WRITE_SLICE_BYTES, True), (WRITE_SLICE_BYTES, False), (WRITE_SLICE_BYTES, False)]


def test_a_limit_in_the_middle_of_a_file_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DIRECT_BYTES + BLOCK_BYTES + 10, hard))
    try:
        with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="File too large"):
            write_parts(file.fileno(), "file", [data(2 * DIRECT_BYTES)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
