"""The regions of a file of pieces, each with the checksum that its bytes must give. No torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.checkpoint.header import FilePiece
from paceline.checkpoint.manifest import StoredFile, piece_hasher
from paceline.checkpoint.storage import READ_SLICE_BYTES, Storage


class Region(NamedTuple):
    """Bytes `begin` to `end` of a file and the checksum that they must give."""

    begin: int
    end: int
    checksum: str
    tensor: str | None = None
    offset: tuple[int, ...] | None = None


def regions_of(stored: StoredFile, pieces: Sequence[FilePiece]) -> Iterator[Region]:
    """The header, then the pieces as they lie."""
    yield Region(0, stored.header_bytes, stored.header_checksum)
    for tensor, _, piece in pieces:
        yield Region(piece.begin, piece.end, piece.checksum, tensor, piece.offset)


class Window:
    """A file read from front to back in large slices, however small the regions are."""

    def __init__(self, storage: Storage, name: str, size: int) -> None:
        self._storage, self._name, self._size = storage, name, size
        self._begin, self._data = 0, memoryview(b"")

    def checksum(self, begin: int, end: int) -> str:
        """Of the bytes from `begin` to `end`, in the memory of one slice."""
        hasher = piece_hasher()
        while begin < end:
            part = self._at(begin, end)
            hasher.update(part)
            begin += len(part)
        return hasher.hexdigest()

    def first_difference(self, expected: bytes) -> str:
        """Where the file's begin is not `expected`, in words."""
        for begin in range(0, len(expected), READ_SLICE_BYTES):
            part = self._storage.read(self._name, begin, min(begin + READ_SLICE_BYTES, len(expected)))
            for index, (wanted, byte) in enumerate(zip(expected[begin:], part, strict=False)):
                if wanted != byte:
                    return f" from byte {begin + index} on"
        return ""

    def _at(self, begin: int, end: int) -> memoryview:
        if not self._begin <= begin < self._begin + len(self._data):
            self._data = memoryview(self._storage.read(self._name, begin, min(begin + READ_SLICE_BYTES, self._size)))
            self._begin = begin
            if not self._data:
                raise OSError(errno.EIO, f"the file ends at byte {begin}")
        return self._data[begin - self._begin : end - self._begin]
